"""A malicious tokenizer is tried in a child process, and the server survives."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.cli.main import app
from polyhead.service.runtime import tokenizer_check as vetting
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from tests.models.tokenizer.test_tokenizer import sentencepiece_fields
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.service.runtime.test_registry import serving
from tests.support import hostile

pytestmark = pytest.mark.usefixtures("every_tokenizer_is_checked")

PATIENCE_S = 120.0
WORDS = "a tokenizer: words of any length"
HANGS, ABORTS = "a tokenizer: many steps on one letter", "a normalizer that panics"
DIES = (
    r"the tokenizers library fails on the tokenizer: the process that tried it ended with signal 6; it may take 4 GiB"
)


@pytest.fixture
def hostile_checkpoint(tiny_classifier: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint with one of the tokenizers of `hostile`."""

    def make(name: str) -> Path:
        folder = tmp_path / "spoiled" / str(len(name))
        shutil.copytree(tiny_classifier, folder)
        hostile.FOLDERS[name](folder)
        return folder

    return make


@pytest.fixture
def checker() -> Iterator[TokenizerCheck]:
    checker = TokenizerCheck()
    yield checker
    checker.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "CPU_SECONDS", 2)


def test_a_tokenizer_that_aborts_the_process_ends_the_child_and_the_next_is_checked(
    checker: TokenizerCheck, hostile_checkpoint: Callable[[str], Path], tiny_classifier: Path
) -> None:
    """It allocates 4 GiB; a Rust library aborts if it does not get them."""
    folder = hostile_checkpoint(ABORTS)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=DIES) as raised:
            checker.check_folder(folder, {})
        assert raised.value.file == str(folder)
        checker.check_folder(tiny_classifier, {})


def test_a_check_that_takes_too_long_is_ended(
    checker: TokenizerCheck, hostile_checkpoint: Callable[[str], Path], tiny_classifier: Path
) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer takes more than 2 s of a processor to be read and tried"):
        checker.check_folder(hostile_checkpoint(HANGS), {})
    checker.check_folder(tiny_classifier, {})


def test_a_slow_text_is_named(checker: TokenizerCheck, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "CPU_SECONDS_PER_TEXT", 0.0)
    said = r"the tokenizer takes \S+ s of a processor for 8192 characters as '.+'; 0 s are the most"
    with pytest.raises(CheckpointError, match=said):
        checker.check_folder(tiny_classifier, {})


def test_a_text_that_becomes_much_longer_is_named(
    checker: TokenizerCheck, hostile_checkpoint: Callable[[str], Path]
) -> None:
    said = r"may make 2\d+ characters of the 8192 of a text; 135168 are the most \(as 'a'\)"
    with pytest.raises(CheckpointError, match=said):
        checker.check_folder(hostile_checkpoint("a tokenizer: a normalizer that multiplies within bounds"), {})


def test_one_call_of_the_library_has_a_bound(
    checker: TokenizerCheck, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps the interpreter's lock in a call, so the server would wait as long."""
    monkeypatch.setattr(vetting, "CPU_SECONDS_PER_CALL", 0.0)
    said = r"reading the tokenizer takes \S+ s of a processor in one call, while no other thread runs; 0 s are the most"
    with pytest.raises(CheckpointError, match=said) as raised:
        checker.check_folder(tiny_classifier, {})
    assert raised.value.file == str(tiny_classifier)


def test_a_call_that_keeps_the_interpreter_is_measured_whole() -> None:
    with vetting.InterpreterWatch() as watch:
        before = time.process_time()
        sum(range(20_000_000))  # one call, in which no other thread runs
        spent = time.process_time() - before
    assert watch.longest >= spent / 2


def test_an_expression_is_tried_on_its_own_characters(
    checker: TokenizerCheck, tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its letter is in none of the fixed texts, and a search in its runs gives up."""
    folder = tmp_path / "runs"
    shutil.copytree(tiny_classifier, folder)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    hostile.vocabulary(folder, hostile.cut(split | {"pattern": {"Regex": "(?:\u0436{1,2}){1,16}\u0449"}}))
    monkeypatch.setattr(vetting, "CPU_SECONDS", 60)
    monkeypatch.setattr(vetting, "CPU_SECONDS_PER_TEXT", 0.05)
    said = re.escape("its regular expression '(?:\u0436{1,2}){1,16}\u0449', with those before it, takes ")
    with pytest.raises(CheckpointError, match=said):
        checker.check_folder(folder, {})


def test_texts_of_pieces_of_the_vocabulary_are_checked_too(
    checker: TokenizerCheck, tiny_classifier: Path, tmp_path: Path
) -> None:
    """Only a letter grows that is in none of the fixed texts, and the only one with a token in the vocabulary."""
    folder = tmp_path / "z"
    shutil.copytree(tiny_classifier, folder)

    def slow(values: dict[str, Any]) -> None:
        hostile.repeated_unseen(values)
        values["post_processor"] = None
        hostile.normalized(*[hostile.replacing("z", "zz")] * 8)(values)

    hostile.vocabulary(folder, slow)
    with pytest.raises(CheckpointError, match=r"of the 8192 of a text; 135168 are the most \(as 'z'\)"):
        checker.check_folder(folder, {})


def test_long_pieces_are_truncated_before_they_are_repeated(
    checker: TokenizerCheck, tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined they have 1.5 million characters, which 8,192 times would not fit in memory."""
    folder = tmp_path / "long"
    shutil.copytree(tiny_classifier, folder)

    def lengthened(values: dict[str, Any]) -> None:
        names = ["[UNK]", "[CLS]", "[SEP]", *(f"{number:03}" + "x" * 3000 for number in range(509))]
        values["model"] |= {"vocab": {name: number for number, name in enumerate(names)}, "unk_token": "[UNK]"}
        values["added_tokens"], values["post_processor"] = [], None

    hostile.vocabulary(folder, lengthened)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    monkeypatch.setattr(vetting, "CPU_SECONDS", 60)
    checker.check_folder(folder, {})


def test_the_vocabulary_of_a_gguf_file_is_checked_too(checker: TokenizerCheck, tmp_path: Path) -> None:
    file, fields = tmp_path / "a.gguf", sentencepiece_fields()
    checker.check_folder(file, fields)
    checker.check_folder(file, fields | {"tokenizer.ggml.tokens_of_another": ["x" * 100] * 50_000})  # it has megabytes
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model is missing"):
        checker.check_folder(file, {name: value for name, value in fields.items() if not name.endswith(".model")})


def test_a_question_is_a_line_of_json() -> None:
    for fields in (
        {},
        {"one": "a\n\u00e9\U0001f642\x01"},
        {"one": ["a", "b"], "two": [1, 2.5, float("inf")], "three": True, "none": []},
        {"long": list(range(2 * vetting.SLICE_ITEMS + 1)), "full": [0.1] * vetting.SLICE_ITEMS},
    ):
        line = vetting.write_question({"source": "a\nb", "memory": 3}, fields)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert json.loads(line) == {"source": "a\nb", "memory": 3, "fields": fields}


def test_metadata_is_sent_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while one call writes a list as JSON: four million numbers take seconds."""
    written, dumps = list[int](), json.dumps

    def count_items(value: object, **options: Any) -> str:
        written.append(len(value) if isinstance(value, list | dict) else 1)
        return dumps(value, **options)

    monkeypatch.setattr(vetting, "json", SimpleNamespace(dumps=count_items, loads=json.loads))
    fields: dict[str, Any] = {"scores": [0.1] * 10_000, "tokens": ["a"] * 10_000}
    vetting.write_question({"source": "a"}, fields)
    assert max(written) <= vetting.SLICE_ITEMS
    assert sum(written) > 20_000


def test_a_child_that_ends_by_itself_is_no_failure_of_the_library() -> None:
    assert vetting.describe_exit(1).startswith(
        "the tokenizer cannot be tried: the process that tried it ended with status 1"
    )
    assert vetting.describe_exit(-6).startswith("the tokenizers library fails on the tokenizer: ")


def test_other_errors_have_the_message_of_the_loader(
    checker: TokenizerCheck, hostile_checkpoint: Callable[[str], Path]
) -> None:
    folder = hostile_checkpoint("a template that panics")
    with pytest.raises(CheckpointError) as here:
        Tokenizer.from_folder(folder)
    with pytest.raises(CheckpointError) as there:
        checker.check_folder(folder, {})
    assert (str(there.value), there.value.file) == (str(here.value), here.value.file)


def test_a_child_that_was_ended_from_outside_is_started_again(checker: TokenizerCheck, tiny_classifier: Path) -> None:
    checker.check_folder(tiny_classifier, {})
    process = checker.child._process
    assert process is not None
    process.kill()
    process.wait()
    checker.check_folder(tiny_classifier, {})
    checker.close()
    assert checker.child._process is None


def test_a_child_that_does_not_answer_is_ended(
    checker: TokenizerCheck, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check_folder(tiny_classifier, {})
    assert checker.child._process is not None
    os.kill(checker.child._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr(vetting, "WALL_SECONDS", 0.2)
        with pytest.raises(CheckpointError, match=r"could not be tried: the machine is too busy, it had 0\.2 s"):
            checker.check_folder(tiny_classifier, {})
    checker.check_folder(tiny_classifier, {})


def test_the_child_imports_no_torch() -> None:
    loaded = "'torch' in sys.modules or 'numpy' in sys.modules"
    command = f"import sys, polyhead.service.runtime.tokenizer_check; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_polyhead_check_reports_a_hostile_tokenizer(
    hostile_checkpoint: Callable[[str], Path], tiny_classifier: Path
) -> None:
    result = CliRunner().invoke(app, ["check", f"sick={hostile_checkpoint(ABORTS)}", f"well={tiny_classifier}"])
    assert result.exit_code == 1
    assert "polyhead: sick: " in result.output
    assert "ended with signal 6" in result.output
    assert "well" in result.output
    assert "Traceback" not in result.output


def test_the_other_models_of_a_server_are_loaded(
    hostile_checkpoint: Callable[[str], Path], tiny_classifier: Path
) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
        states = registry.states()
        assert [states[name].phase for name in ("aborts", "hangs", "well")] == ["broken", "broken", "ready"]
        assert "ended with signal 6" in states["aborts"].reason
        assert "more than 2 s of a processor" in states["hangs"].reason

    serving({"aborts": hostile_checkpoint(ABORTS), "hangs": hostile_checkpoint(HANGS), "well": tiny_classifier}, act)


def test_a_load_of_a_hostile_tokenizer_fails_and_the_server_goes_on(
    hostile_checkpoint: Callable[[str], Path], tiny_classifier: Path
) -> None:
    async def act(client: Client) -> None:
        for name, said in ((ABORTS, "the tokenize"), (HANGS, "the tokenize"), (WORDS, "max_input_chars_per_word of")):
            asked: dict[str, Any] = {"name": "sick", "source": str(hostile_checkpoint(name))}
            async with asyncio.timeout(PATIENCE_S):
                refused = await client.ask("POST", "/admin/models", asked)
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]
            assert (await client.ask("POST", "/predict", {"inputs": "good"})).status_code == 200
        assert await client.names() == ["judge"]

    served(act, {"judge": tiny_classifier})


def test_a_text_without_tokens_fails_its_request(tiny_classifier: Path) -> None:
    """A vocabulary without an unknown token; the library then raises a bare Exception."""

    def lacking(values: dict[str, Any]) -> None:
        pieces = [[piece, -1.0] for piece in values["model"]["vocab"]]
        values["model"] = {"type": "Unigram", "unk_id": None, "vocab": pieces, "byte_fallback": False}

    async def act(client: Client) -> None:
        answer = await client.ask("POST", "/tokenize", {"inputs": "\u4e2d"})
        assert answer.status_code in (400, 422)
        assert "the tokenizer cannot read this text: Encountered an unknown token" in answer.text

    folder = tiny_classifier.parent / "lacking"
    shutil.copytree(tiny_classifier, folder)
    hostile.vocabulary(folder, lacking)
    served(act, {"judge": folder})
