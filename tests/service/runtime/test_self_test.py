"""The self-test of a default precision: its cost is measured, logged and stored; too high a cost selects float32."""

import hashlib
import logging
import math
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from polyhead.models import checkpoint
from polyhead.models.checkpoint import ignore_progress, weight_reader
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.errors import CheckpointError
from polyhead.models.core.files import SourceFile
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import Stopped
from polyhead.service.core.model import Model
from polyhead.service.runtime import loader
from polyhead.service.runtime import self_test as fidelity
from polyhead.service.runtime import self_test_results as cost_files
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.self_test import (
    SelfTest,
    apply_known_cost,
    cost_key,
    find_known_costs,
    read_costs,
    weight_hashes,
)
from polyhead.service.runtime.self_test_results import MAX_RESULT_BYTES, FileHashes, PrecisionCosts
from tests.families.conformance import save_checkpoint
from tests.families.test_encoders import ROWS
from tests.service.runtime.test_registry import serving
from tests.support import zoo

MANY = 1e-9  # nats: no narrow precision costs so little


def file_of(folder: Path, name: str = "key biases", kind: str = "Q8_0") -> Path:
    return zoo.gguf_file(folder / f"{name}-{kind}.gguf", name, kind)


def served(source: Path, folder: Path, **settings: Any) -> Model:
    """Return the model that is served for one source."""

    async def act(registry: ModelRegistry) -> Model:
        await registry.load_all()
        [model] = registry.models()
        return model

    found: Model = serving({"m": source}, act, model_dir=folder, **settings)
    return found


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if name in record.name]


@pytest.fixture(autouse=True)
def warnings_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(("kind", "precision"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q5_0", "int8")])
def test_the_cost_of_the_default_is_logged(
    kind: str, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = served(file_of(tmp_path, kind=kind), tmp_path)
    assert model.dtype == precision
    [ready] = [line for line in lines(caplog, "loader") if "is ready" in line]
    assert "nats (KL) from float32's" in ready


def test_the_cost_is_the_difference_of_the_answers(tmp_path: Path) -> None:
    """Measured in two stages, one layer at a time, the cost is the same as with both networks in memory."""
    source = file_of(tmp_path)
    what, settings = checkpoint.describe_source(str(source)), Settings(model_dir=tmp_path)
    place = choose_placement(settings, what.default_precision, what.decoder_config)
    test = SelfTest(what, place, settings, what.max_tokens)
    test.compute_reference(WeightReader(what), ignore_progress)
    loaded = checkpoint.load(str(source))
    head: Any = loaded.head
    narrow = NativeExecutor(loaded.network, head, precision="int8", block_count=16)
    wide = NativeExecutor(loaded.network, head, precision="float32", block_count=16)
    p, q = (
        torch.cat([executor.step(test._rows_of(text, executor)).double().log_softmax(-1) for text in test._texts])
        for executor in (wide, narrow)
    )
    test.compare(narrow)
    assert test.cost == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert 0 < test.cost < 0.005


def test_a_cost_above_the_bound_means_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = file_of(tmp_path)
    assert served(source, tmp_path, max_kl=MANY).dtype == "float32"
    [why] = [line for line in lines(caplog, "loader") if line.startswith("m: float32, since its answers in int8 are")]
    assert "more than max_kl, which is 1e-09" in why


def test_a_cost_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = file_of(tmp_path)
    assert served(source, tmp_path).dtype == "int8"

    def again(*_: object) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(SelfTest, "_compared_rows", again)
    assert served(source, tmp_path).dtype == "int8"
    assert served(source, tmp_path, max_kl=MANY).dtype == "float32"  # the plan uses float32 from the start
    what = checkpoint.describe_source(str(source))
    assert apply_known_cost(what, Settings(model_dir=tmp_path, max_kl=MANY)).default_precision.precision == "float32"
    assert apply_known_cost(what, Settings(model_dir=tmp_path)).default_precision.precision == "int8"


def test_what_is_no_arithmetic_is_not_done_on_the_engine_s_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long for many tensors, experts or control tokens: other models wait for that thread."""
    threads = dict[str, set[str]]()

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(fidelity, "fingerprint_weights")
    watch(PrecisionCosts, "store")
    watch(WeightReader, "__init__")
    watch(Tokenizer, "with_text_tags")
    assert served(file_of(tmp_path), tmp_path).dtype == "int8"
    assert threads.keys() == {"fingerprint_weights", "store", "__init__", "with_text_tags"}
    assert not any(name.startswith("engine") for names in threads.values() for name in names)


@pytest.mark.parametrize("tokens", [16, 32, 48])
def test_a_small_cache_gets_short_texts(tokens: int, tmp_path: Path) -> None:
    """No text is longer than the cache, and every block number is within it."""
    source = file_of(tmp_path)
    what, settings = checkpoint.describe_source(str(source)), Settings(model_dir=tmp_path)
    test = SelfTest(what, choose_placement(settings, what.default_precision, what.decoder_config), settings, tokens)
    loaded = checkpoint.load(str(source))
    head: Any = loaded.head
    executor = NativeExecutor(loaded.network, head, precision="int8", block_count=tokens // 16)
    steps = [test._rows_of(text, executor) for text in test._texts]
    assert steps
    assert max(block for rows in steps for block in rows.block_tables[0]) < executor.block_count
    test.compute_reference(WeightReader(what), ignore_progress)
    test.compare(executor)
    assert test.cost is not None
    assert served(source, tmp_path, cache_tokens=max(tokens, 32)).dtype == "int8"


def test_a_requested_precision_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = served(file_of(tmp_path), tmp_path, max_kl=MANY, precision="int8")
    assert model.dtype == "int8"
    assert any("nats (KL) from float32's" in line for line in lines(caplog, "loader"))


def test_without_memory_for_float32_the_default_is_kept_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = file_of(tmp_path)
    real = loader.Loader._load

    async def crowded(self: Any, loading: Any, described: Any, *rest: Any, **more: Any) -> Any:
        if described.size.default_precision.precision == "float32":
            raise loader.InsufficientMemory("no room")
        return await real(self, loading, described, *rest, **more)

    monkeypatch.setattr(loader.Loader, "_load", crowded)
    assert served(source, tmp_path, max_kl=MANY).dtype == "int8"
    assert served(source, tmp_path, max_kl=MANY).dtype == "int8"  # the cost is known from the start
    warnings = [line for line in lines(caplog, "loader") if "float32 does not fit" in line]
    assert len(warnings) == 2
    assert all("its answers in int8 are" in warning for warning in warnings)


def test_the_states_of_an_encoder_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert served(file_of(tmp_path, "bert"), tmp_path).dtype == "int8"
    assert any("(1 - cosine) from float32's" in line for line in lines(caplog, "loader"))


def test_layers_that_share_their_weights_are_read_once(tmp_path: Path) -> None:
    """Their reference is what torch computes with the whole network in memory."""
    source = save_checkpoint(ROWS["AlbertModel"], tmp_path)
    what, settings = checkpoint.describe_source(str(source)), Settings(model_dir=tmp_path, precision="int8")
    test = SelfTest(what, choose_placement(settings, None, what.config), settings, what.max_tokens)
    test.compute_reference(WeightReader(what), ignore_progress)
    loaded = checkpoint.load(str(source))
    with torch.inference_mode():
        states = loaded.network(RaggedBatch.of(test._texts))
    assert test._reference is not None
    assert torch.allclose(test._reference, states[: len(test._reference)], atol=1e-5)
    taken = list[None]()
    test.compare(NativeExecutor(loaded.network, precision="int8"), lambda: taken.append(None))
    assert len(taken) == len(test._texts)  # others may compute after each
    assert test.cost is not None
    assert 0 < test.cost < 0.01


def test_others_may_compute_while_a_text_of_an_encoder_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may have many layers with one set of tensors. Turns change no cost."""
    source = save_checkpoint(ROWS["AlbertModel"], tmp_path / "model")
    what, costs, turns = checkpoint.describe_source(str(source)), [], []
    for turn_s in (3600.0, 1e-9):
        settings = Settings(model_dir=tmp_path, precision="int8")
        test = SelfTest(what, choose_placement(settings, None, what.config), settings, what.max_tokens)
        test.compute_reference(WeightReader(what), ignore_progress)
        monkeypatch.setattr(fidelity, "COMPUTING_TURN_S", turn_s)
        taken = list[None]()
        loaded = checkpoint.load(str(source))
        test.compare(NativeExecutor(loaded.network, precision="int8"), lambda taken=taken: taken.append(None))
        costs.append(test.cost)
        turns.append(len(taken))
    assert turns[0] == len(fidelity.self_test_windows(what, what.max_tokens)) < turns[1] // 4
    assert costs[0] == costs[1]


def test_nan_costs_too_much(tmp_path: Path) -> None:
    source = file_of(tmp_path)
    what, settings = checkpoint.describe_source(str(source)), Settings(model_dir=tmp_path)
    test = SelfTest(
        what, choose_placement(settings, what.default_precision, what.decoder_config), settings, what.max_tokens
    )
    test.compute_reference(WeightReader(what), ignore_progress)

    class Broken:
        block_size, block_count, state_count, window_blocks = 16, 16, 0, 0

        def step(self, rows: Any) -> torch.Tensor:
            return torch.full((len(rows.output_rows), what.config.vocab_size), math.nan)

    test.compare(Broken())  # type: ignore[arg-type]
    assert test.cost == math.inf


def unstopped() -> None:
    """The check that never ends the load."""


def name_of(what: Description, folder: Path) -> str:
    """Return the hash under which its costs are stored."""
    return read_costs(what, FileHashes(folder), unstopped).weights_hash


def test_a_merged_adapter_changes_the_fingerprint(tiny_classifier: Path, tmp_path: Path) -> None:
    folders = []
    for number, alpha in enumerate((8, 8, 16)):
        config = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=alpha, init_lora_weights=False)
        torch.manual_seed(min(number, 1))
        base = AutoModelForSequenceClassification.from_pretrained(tiny_classifier)
        get_peft_model(base, config).save_pretrained(tmp_path / str(number))
        folders.append(f"{tiny_classifier}+{tmp_path / str(number)}")
    found = {name_of(checkpoint.describe_source(source), tmp_path) for source in (str(tiny_classifier), *folders)}
    assert len(found) == 4


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    one, other = (checkpoint.describe_source(str(file_of(tmp_path, name))) for name in ("key biases", "plain"))
    same = checkpoint.describe_source(str(file_of(tmp_path / "..", "key biases")))
    assert name_of(one, tmp_path) == name_of(same, tmp_path) != name_of(other, tmp_path)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Random bytes, in place of weights."""
    file = tmp_path / "large.bin"
    file.write_bytes(random.Random(0).randbytes(5 << 20))
    return file


def changed(file: Path, place: int) -> None:
    """Change one bit of the file at a later time; its length and modification time stay the same."""
    before = file.stat()
    with file.open("r+b") as out:
        out.seek(place)
        [byte] = out.read(1)
        while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of a file system may have a low resolution
            out.seek(place)
            out.write(bytes([byte ^ 1]))
            out.flush()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 100_000, 1_234_567, (5 << 20) - 70_000, (5 << 20) - 1])
def test_every_byte_of_every_file_counts(place: int, large: Path, tmp_path: Path) -> None:
    """A copy with any change shares no cost with the original."""
    what = checkpoint.describe_source(str(file_of(tmp_path)))
    crafted = tmp_path / "crafted.bin"
    crafted.write_bytes(large.read_bytes())
    one, other = (
        replace(
            what, entries={name: replace(entry, source=SourceFile(file, ())) for name, entry in what.entries.items()}
        )
        for file in (large, crafted)
    )
    costs = read_costs(one, FileHashes(tmp_path / "kept"), unstopped)
    assert read_costs(other, FileHashes(tmp_path / "kept"), unstopped) == costs
    costs.store("key", 0.25)
    changed(crafted, place)
    assert read_costs(other, FileHashes(tmp_path / "kept"), unstopped).find("key") is None
    assert read_costs(one, FileHashes(tmp_path / "kept"), unstopped).find("key") == 0.25


def test_every_shard_counts(large: Path, tmp_path: Path) -> None:
    what, shard = checkpoint.describe_source(str(file_of(tmp_path))), tmp_path / "shard.bin"
    shard.write_bytes(large.read_bytes())
    files = [large, shard] * len(what.entries)
    entries = zip(what.entries.items(), files, strict=False)
    two = replace(what, entries={name: replace(entry, source=SourceFile(file, ())) for (name, entry), file in entries})
    before = name_of(two, tmp_path / "kept")
    changed(shard, 1_234_567)
    assert name_of(two, tmp_path / "kept") != before


def test_the_fingerprint_includes_tokenizer_and_head(tiny_classifier: Path, tmp_path: Path) -> None:
    """The same weights with another vocabulary or another output have their own cost."""
    what, other = checkpoint.describe_source(str(file_of(tmp_path))), checkpoint.describe_source(str(tiny_classifier))
    tied = replace(what, head=replace(what.head, ignored_names=("head.output.weight", "more")))
    assert len({name_of(each, tmp_path) for each in (what, replace(what, tokenizer=other.tokenizer), tied)}) == 3


def test_a_file_is_hashed_once_wherever_it_lies(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = FileHashes(tmp_path / "kept")
    assert hashes.find(large) == ""
    found = hashes.hash_file(large, unstopped)
    assert found == hashlib.sha256(large.read_bytes()).hexdigest()
    other = large.rename(tmp_path / "other.bin")  # changes its times on some file systems
    hashes.hash_file(other, unstopped)

    def again(_: Path) -> None:
        raise AssertionError("it is known")

    monkeypatch.setattr(cost_files, "open_regular", again)
    assert (
        FileHashes(tmp_path / "kept").hash_file(other, unstopped) == FileHashes(tmp_path / "kept").find(other) == found
    )


def test_a_file_that_was_changed_or_replaced_is_hashed_again(large: Path, tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path / "kept")
    found = hashes.hash_file(large, unstopped)
    changed(large, 1_234_567)
    assert hashes.find(large) == ""
    assert hashes.hash_file(large, unstopped) != found
    times = large.stat()
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(times.st_size))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(large)
    assert hashes.find(large) == ""


def test_a_hash_of_a_file_that_changes_meanwhile_is_not_stored(large: Path, tmp_path: Path) -> None:
    pieces = iter(range(9))
    hashes = FileHashes(tmp_path / "kept")
    hashes.hash_file(large, lambda: changed(large, 7) if next(pieces) == 2 else None)
    assert hashes.find(large) == ""
    assert not (tmp_path / "kept").exists()


def test_hash_errors_are_logged_and_a_cancelled_load_stops(large: Path, tmp_path: Path) -> None:
    calls = []

    def stop() -> None:
        calls.append(1)
        raise Stopped("the load was ended")

    with pytest.raises(CheckpointError, match="cannot be read"):
        FileHashes(tmp_path).hash_file(tmp_path / "nothing", unstopped)
    with pytest.raises(CheckpointError, match="no regular file"):
        FileHashes(tmp_path).hash_file(tmp_path, unstopped)
    with pytest.raises(Stopped):
        FileHashes(tmp_path).hash_file(large, stop)
    assert len(calls) == 1


def test_a_cost_of_weights_that_changed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    """The hashed weights are not the measured ones."""
    source = file_of(tmp_path)
    what, settings = checkpoint.describe_source(str(source)), Settings(model_dir=tmp_path)
    place = choose_placement(settings, what.default_precision, what.decoder_config)
    test = SelfTest(what, place, settings, what.max_tokens)
    test.compute_reference(WeightReader(what), ignore_progress)
    loaded = checkpoint.load(str(source))
    head: Any = loaded.head
    executor = NativeExecutor(loaded.network, head, precision="int8", block_count=16)
    changed(source, source.stat().st_size - 1)
    test.compare(executor)
    test.store_cost()
    assert test.cost is not None
    assert find_known_costs(what, weight_hashes(settings)) is None
    assert [path for path in (tmp_path / "fidelity").iterdir() if b"sha256" not in path.read_bytes()] == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"sha256": 1}', b'{"sha256": "ABC"}', b'{"sha256": "../../' + b"0" * 58 + b'"}']
)
def test_an_invalid_stored_hash_is_computed_again(content: bytes, large: Path, tmp_path: Path) -> None:
    hashes = FileHashes(tmp_path / "kept")
    found = hashes.hash_file(large, unstopped)
    [record] = (tmp_path / "kept").iterdir()
    record.write_bytes(content)
    assert hashes.find(large) == ""
    assert hashes.hash_file(large, unstopped) == hashes.find(large) == found


def test_stored_results_that_are_not_regular_files_are_not_read(tmp_path: Path) -> None:
    """A pipe does not block the reader, and a link that leads elsewhere is not followed."""
    secret = tmp_path / "elsewhere" / "secret.json"
    secret.parent.mkdir()
    secret.write_bytes(b'{"key": 0.5}')
    folder = tmp_path / "kept"
    folder.mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to(secret)
    (folder / "folder.json").mkdir()
    (folder / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe", "link", "folder", "zero"):
        assert PrecisionCosts(folder, name).find("key") is None
    PrecisionCosts(folder, "link").store("key", 0.25)
    assert (PrecisionCosts(folder, "link").find("key"), secret.read_bytes()) == (0.25, b'{"key": 0.5}')


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"key": "many"}',
        b'{"key": {}}',
        b'{"key": NaN}',
        b"[" * MAX_RESULT_BYTES,
        b'{"key": 0.5, "more": "' + b" " * MAX_RESULT_BYTES + b'"}',
    ],
)
def test_an_invalid_file_of_costs_is_measured_again(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "abc.json").write_bytes(content)
    costs = PrecisionCosts(tmp_path, "abc")
    assert costs.find("key") is None
    costs.store("key", 0.25)
    assert costs.find("key") == 0.25


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    PrecisionCosts(tmp_path / "file", "abc").store("key", 0.25)
    assert any("is not kept" in line for line in lines(caplog, "fidelity"))


def test_a_cost_belongs_to_kernels_and_instructions() -> None:
    place = choose_placement(Settings(precision="int8"))
    assert place.instructions in cost_key(place)
    assert len(cost_key(place).split()[-1]) == 64
    assert fidelity.is_tested(place)
    assert not fidelity.is_tested(choose_placement(Settings(precision="float32")))


@pytest.mark.parametrize("bound", [None, MANY])
def test_a_network_is_built_once_for_a_load_and_not_by_the_engine(
    bound: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other models wait for the engine's thread. A second load, in float32, has a network of its own."""
    threads: dict[str, list[str]] = {"build_on_meta": [], "match_entries": []}

    def note_thread(called: list[str], real: Any) -> Any:
        def noted(*given: Any) -> Any:
            called.append(threading.current_thread().name)
            return real(*given)

        return noted

    for name, called in threads.items():
        monkeypatch.setattr(weight_reader, name, note_thread(called, getattr(weight_reader, name)))
    source = file_of(tmp_path)
    assert served(source, tmp_path, **({"max_kl": bound} if bound else {})).dtype == ("float32" if bound else "int8")
    assert [set(called) for called in threads.values()] == [{"aside"}, {"aside"}]
    assert [len(called) for called in threads.values()] == ([2, 2] if bound else [1, 1])
