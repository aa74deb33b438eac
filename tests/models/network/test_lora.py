"""Unmerged adapters of a base model equal peft, alone and in a batch, and leave no state when they are detached."""

import gc
import shutil
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.checkpoint.unmerged_adapter import MAX_RANK, BaseModel
from polyhead.models.core import turns
from polyhead.models.core.errors import CheckpointError, StepInputError, UnsupportedError
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_head_invariant, make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.service.cli.check import check_models
from polyhead.service.config.settings import Settings, SettingsError, read_settings
from polyhead.service.core.errors import BadRequest, Conflict, InsufficientMemory, NotFound, StepFailed, Unavailable
from polyhead.service.core.request import Encode, Failed, HeadOutput, Task, TokenOutputs
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.head_outputs import OutputHead
from polyhead.service.runtime import loader
from polyhead.service.runtime.load_task import LoadTask
from polyhead.service.runtime.memory_budget import MemoryBudget, adapter_bytes, adapter_memory_need
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from tests.families.conformance import save_checkpoint
from tests.families.test_encoders import ROWS
from tests.models.architectures.test_encoder_families import CASES
from tests.models.checkpoint.test_merged_adapter import adapted, classifier, edit, generator, overlay, retensor
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as administering
from tests.service.runtime.test_registry import serving
from tests.support import checkpoints
from tests.support.engine_fakes import ask, finish, generate

TEXT = "A good film"
IDS = (2, 5, 6, 7, 8, 9, 30, 31, 32, 3)
EVERYWHERE = ["query", "key", "value", "dense"]
COMPILED = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
Make = Callable[[Checkpoint], Executor]


def torch_executor(loaded: Checkpoint, blocks: int = 0) -> Executor:
    head = loaded.head if blocks else None
    return TorchExecutor(loaded.network, cast(Any, head), block_count=blocks, block_size=16 if blocks else 0)


def native_executor(loaded: Checkpoint, blocks: int = 0, **options: Any) -> Executor:
    return NativeExecutor(loaded.network, cast(Any, loaded.head if blocks else None), block_count=blocks, **options)


def float32_executor(loaded: Checkpoint, blocks: int = 0) -> Executor:
    return native_executor(loaded, blocks, precision="float32")


def int8_executor(loaded: Checkpoint, blocks: int = 0) -> Executor:
    return native_executor(loaded, blocks, precision="int8", threads=2)


def rows(*sequences: Sequence[int], adapters: list[int] | None) -> StepInput:
    starts = list(accumulate(map(len, sequences), initial=0))
    tables, first = [], 0
    for sequence in sequences:
        tables.append(list(range(first, first - (-len(sequence) // 16))))
        first += len(tables[-1])
    return StepInput(
        tokens=[token for sequence in sequences for token in sequence],
        positions=[position for sequence in sequences for position in range(len(sequence))],
        starts=starts,
        block_tables=tables,
        output_rows=list(range(starts[-1])),
        adapters=adapters,
    )


@torch.inference_mode()
def states(executor: Executor, number: int, ids: Sequence[int] = IDS) -> Tensor:
    return executor.step(rows(ids, adapters=[number])).clone()


def load_adapter_parts(base: Path, folder: Path) -> tuple[Any, Any, Any]:
    """The plan of an adapter, its low-rank matrices and its head."""
    base_model = BaseModel(describe_source(str(base)))
    found = base_model.plan_adapter(folder)
    return (found, *base_model.load_adapter(found, torch.float32, torch.device("cpu")))


EXECUTORS = [torch_executor, pytest.param(float32_executor, marks=COMPILED)]
HEADS: dict[str, tuple[type, str, str]] = {
    "SEQ_CLS": (tf.AutoModelForSequenceClassification, "classify", "logits"),
    "TOKEN_CLS": (tf.AutoModelForTokenClassification, "tag", "logits"),
    "QUESTION_ANS": (tf.AutoModelForQuestionAnswering, "span", ""),
    "FEATURE_EXTRACTION": (tf.AutoModel, "embed", "last_hidden_state"),
}


@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("kind", HEADS)
def test_adapters_of_every_encoder_head_equal_peft(tiny_embedder: Path, tmp_path: Path, kind: str, make: Make) -> None:
    auto, task, field = HEADS[kind]
    model = cast(Any, auto).from_pretrained(tiny_embedder)
    merged = adapted(model, tmp_path, task_type=kind, target_modules=EVERYWHERE)
    found, lora, head = load_adapter_parts(tiny_embedder, tmp_path)
    assert found.description.head.task == task
    with torch.inference_mode():
        wanted = merged(torch.tensor([IDS]))
        wanted = wanted[field] if field else torch.stack((wanted["start_logits"], wanted["end_logits"]), -1)
        executor = make(load(str(tiny_embedder)))
        got = states(executor, executor.attach(lora))
        got = head(got, [0, len(IDS)]) if head is not None and task != "embed" else got
    assert float((got - wanted.squeeze(0)).abs().max()) < 1e-5
    assert float((states(executor, 0) - states(executor, 1)).abs().max()) > 1e-2
    tagged = load(f"{tiny_embedder}+{tmp_path}")  # merged, it has the same task
    assert tagged.task == task


def test_a_head_is_not_read_from_a_file_that_took_the_place_of_the_base(tiny_classifier: Path, tmp_path: Path) -> None:
    """An adapter may come hours after its base; the places of the base's tensors are those of the file that it was."""
    base = Path(shutil.copytree(tiny_classifier, tmp_path / "base"))
    model = tf.AutoModelForSequenceClassification.from_pretrained(base)
    adapted(model, tmp_path / "a", task_type="SEQ_CLS", target_modules=EVERYWHERE)
    base_model = BaseModel(describe_source(str(base)))
    found = base_model.plan_adapter(tmp_path / "a")
    assert found.shared_names
    file = base / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="was changed or replaced after the model was described"):
        base_model.load_adapter(found, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_of_generators_equal_peft(
    tmp_path: Path, tiny_generator: Path, family: str, make: Callable[..., Executor]
) -> None:
    """GPT-2 stores query, key and value as one transposed matrix; Llama's MLP has a gate."""
    base, settings = tiny_generator, {"target_modules": "all-linear"}
    if family == "gpt2":
        config = tf.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        base = checkpoints.save(tf.GPT2LMHeadModel(config), checkpoints.byte_level_bpe(), tmp_path / "base")
        settings = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    merged = adapted(generator(base), tmp_path / "a", task_type="CAUSAL_LM", **settings)
    _, lora, head = load_adapter_parts(base, tmp_path / "a")
    assert head is None
    executor = make(load(str(base)), 8)
    number = executor.attach(lora)
    with torch.inference_mode():
        wanted = merged(torch.tensor([IDS])).logits[0]
    assert float((states(executor, number) - wanted).abs().max()) < 1e-4
    assert float((states(executor, 0) - wanted).abs().max()) > 1e-2


TARGETS = {
    "electra": ["query", "value"],
    "albert": ["query", "ffn"],  # all layers share their weights
    "mpnet": ["attn.q", "attn.o"],
    "modernbert": ["Wqkv", "Wi"],  # three fused matrices, and two
    "llama": ["q_proj", "up_proj"],
    "longformer": ["query", "value", "output.dense"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_of_families_with_fused_or_shared_matrices_equal_merged_ones(tmp_path: Path, name: str) -> None:
    row = ROWS[CASES[name]]
    base, kind = save_checkpoint(row, tmp_path / "base"), row.kind
    unsupported = unsupported_reason(load(str(base)).config)
    adapted(kind.from_pretrained(base), tmp_path / "a", task_type="SEQ_CLS", target_modules=TARGETS[name])
    _, lora, head = load_adapter_parts(base, tmp_path / "a")
    merged = load(f"{base}+{tmp_path / 'a'}")
    with torch.inference_mode():
        wanted = merged.head(states(torch_executor(merged), 0), [0, len(IDS)])
        for executor in (
            torch_executor(load(str(base))),
            *([float32_executor(load(str(base)))] if runnable_targets() and not unsupported else []),
        ):
            got = states(executor, executor.attach(lora))
            assert float((head(got, [0, len(IDS)]) - wanted).abs().max()) < 1e-4
            assert float((head(states(executor, 0), [0, len(IDS)]) - wanted).abs().max()) > 1e-3


def test_adapters_of_disentangled_attention_must_be_merged(tmp_path: Path) -> None:
    row = ROWS["DebertaV2ForSequenceClassification"]
    base, kind = save_checkpoint(row, tmp_path / "base"), row.kind
    adapted(kind.from_pretrained(base), tmp_path / "a", task_type="SEQ_CLS", target_modules=["value_proj"])
    with pytest.raises(UnsupportedError, match=r"distance scores.*load it merged"):
        load_adapter_parts(base, tmp_path / "a")


def build_adapters(base: Path, folder: Path) -> list[Any]:
    """Adapters of one base model, with different ranks and targets."""
    kinds: list[dict[str, Any]] = [
        {"target_modules": ["query", "value"], "r": 3},
        {"target_modules": EVERYWHERE, "r": 8},
        {"target_modules": ["intermediate.dense"], "r": 1, "use_rslora": True},
    ]
    base_model = BaseModel(describe_source(str(base)))
    found = []
    for number, settings in enumerate(kinds):
        adapted(tf.AutoModel.from_pretrained(base), folder / str(number), **settings)
        plan = base_model.plan_adapter(folder / str(number))
        found.append(dict(base_model.load_adapter(plan, torch.float32, torch.device("cpu"))[0]))
    return found


LENGTHS = (5, 40, 1, 33, 17, 150, 20, 2, 9)


def batch_of_texts(numbers: list[int]) -> tuple[list[list[int]], list[int]]:
    texts = [[(7 * place + 3 * number) % 97 + 5 for place in range(length)] for number, length in enumerate(LENGTHS)]
    return texts, [numbers[index % len(numbers)] for index in range(len(LENGTHS))]


@pytest.mark.parametrize("make", [*EXECUTORS, pytest.param(int8_executor, marks=COMPILED)])
def test_adapters_give_the_same_answers_alone_and_in_a_batch(tiny_embedder: Path, tmp_path: Path, make: Make) -> None:
    """To the bit on executors whose answers do not depend on the batch."""
    executor = make(load(str(tiny_embedder)))
    numbers = [executor.attach(lora) for lora in build_adapters(tiny_embedder, tmp_path)]
    texts, each = batch_of_texts([0, *numbers])
    with torch.inference_mode():
        together = executor.step(rows(*texts, adapters=each)).clone().split(LENGTHS)
        last = replace(rows(*texts, adapters=each), output_rows=[end - 1 for end in accumulate(LENGTHS)])
        ends = executor.step(last).clone()
    bound = 1e-5 if make is torch_executor else 0.0
    for text, number, got, end in zip(texts, each, together, ends, strict=True):
        assert float((states(executor, number, text) - got).abs().max()) <= bound
        assert float((got[-1] - end).abs().max()) <= bound


@COMPILED
def test_int8_weights_lose_no_more_than_with_merged_adapters(tiny_embedder: Path, tmp_path: Path) -> None:
    executor, plain = int8_executor(load(str(tiny_embedder))), torch_executor(load(str(tiny_embedder)))
    for index, lora in enumerate(build_adapters(tiny_embedder, tmp_path)):
        number, wanted = executor.attach(lora), states(plain, plain.attach(lora))
        merged = states(int8_executor(load(f"{tiny_embedder}+{tmp_path / str(index)}")), 0)
        unmerged_error, merged_error = ((got - wanted).abs().mean() for got in (states(executor, number), merged))
        assert float(unmerged_error) < 1.5 * float(merged_error)


@pytest.mark.parametrize("make", EXECUTORS)
def test_a_detached_adapter_is_freed(tiny_embedder: Path, tmp_path: Path, make: Make) -> None:
    executor = make(load(str(tiny_embedder)))
    first, second, _ = build_adapters(tiny_embedder, tmp_path)
    kept = weakref.ref(next(iter(second.values())).a)
    numbers = executor.attach(first), executor.attach(second)
    before = states(executor, numbers[0])
    del second
    executor.detach(numbers[1])
    gc.collect()
    assert kept() is None
    assert torch.equal(states(executor, numbers[0]), before)
    assert executor.attach(first) not in numbers
    with pytest.raises(StepInputError, match="is not attached"):
        states(executor, numbers[1])


# Adapters are read in parts


class ReadWatch:
    """What an adapter's load has in memory at each turn, and what it does between two turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns, self.most_numbers, self.read = 0, 0, list[weakref.ref[Tensor]]()
        real = TensorEntry.read

        def read(entry: TensorEntry, *given: Any) -> Tensor:
            found = real(entry, *given)
            self.read.append(weakref.ref(found))
            return found

        monkeypatch.setattr(TensorEntry, "read", read)
        monkeypatch.setattr(turns, "PART_NUMBERS", 64)

    def yield_turn(self, _: int = 0) -> None:
        self.turns += 1
        alive = [tensor for ref in self.read if (tensor := ref()) is not None]
        self.most_numbers = max(self.most_numbers, sum(tensor.numel() for tensor in alive))


@pytest.mark.parametrize("make", [torch_executor, pytest.param(float32_executor, marks=COMPILED)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_adapter_is_read_and_attached_in_parts(
    tmp_path: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, family: str, make: Callable[..., Executor]
) -> None:
    """One product at a time is in memory beside what is attached, and others have turns. GPT-2 has fused matrices."""
    base, targets = tiny_generator, {"target_modules": "all-linear"}
    if family == "gpt2":
        config = tf.GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        base = checkpoints.save(tf.GPT2LMHeadModel(config), checkpoints.byte_level_bpe(), tmp_path / "base")
        targets = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    adapted(generator(base), tmp_path / "a", task_type="CAUSAL_LM", **targets)
    base_model, is_packed = BaseModel(describe_source(str(base))), make is float32_executor
    executor = make(load(str(base), dtype=torch.float32 if is_packed else torch.bfloat16), 8)
    plan, watch = base_model.plan_adapter(tmp_path / "a"), ReadWatch(monkeypatch)
    lora, _ = base_model.load_adapter(plan, torch.float32, torch.device("cpu"), watch.yield_turn)
    assert not watch.read  # nothing is read before it is asked for
    sizes = {name: sum(side.numel() for side in (low.a, low.b)) for name, low in dict(lora).items()}
    watch.read.clear()
    watch.turns = watch.most_numbers = 0
    executor.attach(lora, watch.yield_turn)
    assert len(watch.read) == 2 * len(plan.updates)  # each once
    assert watch.turns >= sum(sizes.values()) // 64
    assert 4 * watch.most_numbers <= plan.loading_bytes(is_packed)
    assert watch.most_numbers < sum(sizes.values()) / 2
    if is_packed:
        kept = cast(Any, executor)._loras[1]
        assert plan.packed_bytes == kept.byte_count


def test_adapters_may_be_attached_and_detached_in_turns_of_another(tiny_embedder: Path, tmp_path: Path) -> None:
    executor = (float32_executor if runnable_targets() else torch_executor)(load(str(tiny_embedder)))
    first, second, third = build_adapters(tiny_embedder, tmp_path)
    numbers, wanted = [executor.attach(first)], list[Tensor]()

    def turn() -> None:
        if len(numbers) == 1:
            numbers.append(executor.attach(second))
            wanted.append(states(executor, numbers[1]))
            executor.detach(numbers[0])

    numbers.append(executor.attach(third, turn))
    assert numbers == [1, 3, 2]
    assert torch.equal(states(executor, numbers[1]), wanted[0])
    assert not torch.equal(states(executor, numbers[2]), wanted[0])


def test_deterministic_torch_refuses_by_name(tiny_embedder: Path, tmp_path: Path) -> None:
    loaded = load(str(tiny_embedder))
    make_invariant(loaded.network, loaded.head)
    with pytest.raises(UnsupportedError, match=r"exact to the bit.*load it merged"):
        torch_executor(loaded).attach(build_adapters(tiny_embedder, tmp_path)[0])


# Workers


def encoder_with_adapters(base: Path, folder: Path, kinds: Sequence[str]) -> tuple[EncoderWorker, list[int]]:
    """An encoder worker with one adapter of each kind."""
    base_model, loaded = BaseModel(describe_source(str(base))), load(str(base))
    make = float32_executor if runnable_targets() else torch_executor
    worker = EncoderWorker(
        make(loaded), cast(OutputHead, loaded.head), model="base", task=loaded.task, token_budget=400
    )
    numbers = []
    for index, kind in enumerate(kinds):
        model = cast(Any, HEADS[kind][0]).from_pretrained(base)
        adapted(model, folder / str(index), task_type=kind, target_modules=["query", "value"], r=2 + index)
        found = base_model.plan_adapter(folder / str(index))
        lora, head = base_model.load_adapter(found, torch.float32, torch.device("cpu"))
        if head is not None:
            make_head_invariant(head)
        numbers.append(worker.attach(lora, cast(Task, found.description.head.task), cast(Any, head)))
    return worker, numbers


def test_one_step_serves_all_adapters_each_with_its_head(tiny_embedder: Path, tmp_path: Path) -> None:
    worker, numbers = encoder_with_adapters(
        tiny_embedder, tmp_path, ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", "SEQ_CLS"]
    )
    texts, each = batch_of_texts([0, *numbers])
    requests = [Encode(str(n), tuple(text), adapter=each[n]) for n, text in enumerate(texts)]
    requests.append(Encode("rows", tuple(texts[1]), rows=(3, 9), adapter=numbers[1]))
    requests.append(Encode("raw", tuple(texts[1]), raw=True, adapter=numbers[0]))
    tickets = ask(worker, *requests)
    reports = finish(worker)
    assert len(reports) == 1
    for request, ticket in zip(requests, tickets, strict=True):
        [single] = ask(worker, request)
        finish(worker)
        if runnable_targets():
            assert single.events == ticket.events
        answer = ticket.events[0]
        if request.adapter == numbers[1]:
            assert isinstance(answer, TokenOutputs)
            assert answer.scores.shape[0] == len(request.rows or request.tokens)
        else:
            assert isinstance(answer, HeadOutput)
            assert len(answer.values) == (2 if request.adapter in (numbers[0], numbers[3]) else 32)
    worker.detach(numbers[0])
    with pytest.raises(KeyError):
        ask(worker, requests[-1])


def test_an_adapter_with_outputs_that_are_not_finite_is_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    worker, _ = encoder_with_adapters(tiny_embedder, tmp_path, [])
    lora = {name: replace(low, b=low.b * 1e38) for name, low in build_adapters(tiny_embedder, tmp_path)[1].items()}
    with pytest.raises(StepFailed, match="not finite"):
        worker.attach(lora, "embed", None)
    [ticket] = ask(worker, Encode("e", IDS))
    finish(worker)
    assert not isinstance(ticket.events[-1], Failed)


def test_no_prefix_is_shared_between_adapters(tiny_generator: Path, tmp_path: Path) -> None:
    worker = GeneratorWorker(
        (float32_executor if runnable_targets() else torch_executor)(load(str(tiny_generator)), 64), model="base"
    )  # type: ignore[operator]
    merged, numbers = [], []
    for seed, targets in enumerate((["q_proj", "v_proj"], ["gate_proj", "down_proj"])):
        settings = {"task_type": "CAUSAL_LM", "target_modules": targets, "r": 4 + seed}
        merged.append(adapted(generator(tiny_generator), tmp_path / str(seed), **settings))
        numbers.append(worker.attach(load_adapter_parts(tiny_generator, tmp_path / str(seed))[1]))
    prompt = tuple(range(20, 60))
    tokens_of = {}
    for number in (0, *numbers):
        for cached in (0, 32):
            [ticket] = ask(worker, generate(prompt, 6, adapter=number))
            finish(worker)
            assert ticket.events[-1].cached_tokens == cached  # type: ignore[union-attr]
            assert tokens_of.setdefault(number, ticket.tokens) == ticket.tokens
    for number, model in zip(numbers, merged, strict=True):
        [wanted] = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert tokens_of[number] == wanted[len(prompt) :].tolist()
    tickets = ask(worker, *(generate(prompt, 6, adapter=number) for number in (0, *numbers)))
    finish(worker)
    assert [ticket.tokens for ticket in tickets] == list(tokens_of.values())


# Adapters that can only be merged, and invalid ones


@pytest.fixture
def spam(tiny_embedder: Path, tmp_path: Path) -> Path:
    """A classifier over the embedder."""
    adapted(classifier(tiny_embedder, 2), tmp_path / "spam", task_type="SEQ_CLS", target_modules=["query", "value"])
    overlay(tmp_path / "spam", "ham", "spam")
    return tmp_path / "spam"


def test_invalid_adapters_are_refused(tiny_embedder: Path, tiny_generator: Path, spam: Path, tmp_path: Path) -> None:
    def bad(**changes: Any) -> Path:
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(spam, folder)
        edit(folder, **changes)
        return folder

    base_model = BaseModel(describe_source(str(tiny_embedder)))
    with pytest.raises(UnsupportedError, match="use_dora"):
        base_model.plan_adapter(bad(use_dora=True))
    adapted(generator(tiny_generator), tmp_path / "other", target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0.*to merge it into"):
        base_model.plan_adapter(tmp_path / "other")
    adapted(classifier(tiny_generator), tmp_path / "judge", task_type="SEQ_CLS", target_modules=["q_proj"])
    generator_model = BaseModel(describe_source(str(tiny_generator)))
    with pytest.raises(UnsupportedError, match=r"its task is classify.*is generate.*load it merged"):
        generator_model.plan_adapter(tmp_path / "judge")
    name = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_{}.weight"

    def high(tensors: dict[str, Tensor]) -> None:
        tensors[name.format("A")], tensors[name.format("B")] = torch.zeros(300, 32), torch.zeros(32, 300)

    folder = bad(rank_pattern={"layer.0.attention.self.query": 300})
    retensor(folder, high)
    with pytest.raises(UnsupportedError, match=f"its rank is 300, and at most {MAX_RANK}"):
        base_model.plan_adapter(folder)

    def norm(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.bert.embeddings.LayerNorm.weight"] = torch.ones(32)

    folder = bad()
    retensor(folder, norm)
    with pytest.raises(UnsupportedError, match=r"it changes embedding_norm\.weight, which all adapters.*merged"):
        base_model.plan_adapter(folder)
    assert load(f"{tiny_embedder}+{folder}").task == "classify"


def test_heads_share_the_weights_of_the_base_model(tiny_embedder: Path, spam: Path, tmp_path: Path) -> None:
    shutil.copytree(spam, tmp_path / "copy")
    base_model = BaseModel(describe_source(str(tiny_embedder)))
    heads = [
        base_model.load_adapter(base_model.plan_adapter(folder), torch.float32, torch.device("cpu"))[1]
        for folder in (spam, tmp_path / "copy")
    ]
    one, other = (cast(Any, head) for head in heads)
    assert one.dense.weight is other.dense.weight
    assert one.out.weight is not other.out.weight


# Served adapters


def test_settings_name_base_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(read_settings({"models": ["base:a=./a", "base=./b"]}).models) == ["base:a", "base"]
    for name in ("base:", ":a", "base:a:b", "base:-a"):
        with pytest.raises(SettingsError, match="is no name"):
            read_settings({"models": [f"{name}=./a", "base=./b"]})
    with pytest.raises(SettingsError, match="'base:a' is an adapter of 'base', which is not served"):
        read_settings({"models": ["base:a=./a"]})
    with pytest.raises(SettingsError, match="is no name"):
        read_settings({"api_keys": ["a:b=a-long-secret-key"]})


async def answer(served: ModelRegistry, name: str, tokens: tuple[int, ...] = IDS) -> Any:
    model = next(model for model in served.models() if model.name == name)
    [stream] = served.submit(model, [Encode(name, tokens, adapter=model.adapter)])
    return await anext(stream)


def count_turns(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The turns that the engine gives to others while an adapter is attached, by the adapter's name: after each part
    of the work."""
    taken, all_taken = Counter[str](), list[None]()
    attach, yield_turn = loader.Loader._attach_on_engine, Engine.yield_turn

    def counted(self: loader.Loader, loading: LoadTask, *given: Any) -> int:
        before = len(all_taken)
        number = attach(self, loading, *given)
        taken[loading.name] = len(all_taken) - before
        return number

    def turn(self: Engine) -> None:
        all_taken.append(None)
        yield_turn(self)

    monkeypatch.setattr(loader.Loader, "_attach_on_engine", counted)
    monkeypatch.setattr(Engine, "yield_turn", turn)
    monkeypatch.setattr(loader, "READ_SLICE_S", -1.0)
    return taken


def test_a_base_model_and_its_adapters_are_models(
    tiny_embedder: Path, spam: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count_turns(monkeypatch)
    adapted(
        tf.AutoModelForTokenClassification.from_pretrained(tiny_embedder, num_labels=5),
        tmp_path / "tags",
        task_type="TOKEN_CLS",
        target_modules=["key"],
    )

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        base, judge, tags = (
            next(m for m in served.models() if m.name == n) for n in ("base", "base:spam", "base:tags")
        )
        assert (base.task, judge.task, tags.task) == ("embed", "classify", "tag")
        assert (judge.labels, len(tags.labels)) == (("ham", "spam"), 5)
        assert taken["base:spam"] > 2 * 4 * 3  # each A and B of two layers is read, scaled and packed
        assert taken["base:tags"] > 2 * 2 * 3
        assert judge.tokenizer is base.tokenizer
        statuses = {each.name: each for each in served.model_statuses()}
        assert 0 < statuses["base:spam"].memory < statuses["base"].memory / 10
        alone = [await answer(served, name) for name in ("base", "base:spam")]
        streams = [
            served.submit(model, [Encode(f"{n}", IDS, adapter=model.adapter) for n in range(3)])
            for model in (base, judge, tags)
        ]
        answers = [await anext(stream) for each in streams for stream in each]
        for together, one in zip(answers[:6:3], alone, strict=True):
            assert together.values == pytest.approx(one.values, abs=1e-5)
        served.alias("filter", "base:spam")
        assert served.resolve("filter", ["classify"]) is judge
        with pytest.raises(Conflict, match="base has adapters: base:spam, base:tags"):
            served.unload("base", 0)
        with pytest.raises(Conflict, match="base has adapters"):
            served.reload("base", "", 0)
        with pytest.raises(Conflict, match="base:spam has aliases"):
            served.unload("base:spam", 0)
        with pytest.raises(NotFound, match="absent"):
            served.load("absent:spam", str(spam))
        with pytest.raises(BadRequest, match="BASE:spam"):
            served.load("spam", str(spam), merge=True)

    models = {"base:spam": spam, "base": tiny_embedder, "base:tags": tmp_path / "tags"}
    serving(models, act)


def traced_bytes(make: Callable[[], object]) -> int:
    """The bytes that each of ten results of `make` holds."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = [make() for _ in range(10)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] // len(kept)
    finally:
        tracemalloc.stop()


def test_the_memory_of_adapters_is_estimated(tiny_embedder: Path, spam: Path) -> None:
    models = {"base": str(tiny_embedder), "base:spam": str(spam)}
    found = check_models(Settings(models=models))
    assert found.fits
    assert "base:spam" in found.report
    base = BaseModel(describe_source(str(tiny_embedder)))
    needed = adapter_memory_need("base:spam", base.plan_adapter(spam), choose_placement(Settings()))
    described = traced_bytes(lambda: base.plan_adapter(spam).description)
    assert (
        2 * 2 * 2 * 4 * 32 * 4 + described < needed.weights < 20_000 + 2 * described
    )  # queries and values of two layers, of rank 4
    assert needed.total == needed.weights + needed.loading
    with pytest.raises(InsufficientMemory, match="base:spam needs 1 MiB, and 1 of 1 MiB are free"):
        MemoryBudget(1000, Settings()).reserve_adapter(needed)
    budget = MemoryBudget(2 * needed.total - 1, Settings())
    budget.reserve_adapter(needed)
    with pytest.raises(InsufficientMemory):
        budget.reserve_adapter(needed)
    settled = budget.settle(needed)  # loaded
    assert budget.free == budget.limit - needed.weights
    budget.reserve_adapter(needed)
    assert adapter_bytes([needed, needed]) == needed.weights + needed.total
    budget.release(settled)


def test_a_broken_adapter_leaves_the_others_alone(tiny_embedder: Path, spam: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        assert [model.name for model in served.models()] == ["base", "base:spam"]
        assert "adapter_config.json" in served.states()["base:cut"].reason
        assert "could not be loaded" in served.states()["lost:spam"].reason

    models = {
        "base": tiny_embedder,
        "base:cut": tiny_embedder,
        "lost": "/nowhere",
        "lost:spam": spam,
        "base:spam": spam,
    }
    serving(models, act)


def test_adapters_are_loaded_and_unloaded_while_the_base_model_serves(tiny_embedder: Path, spam: Path) -> None:
    async def predict(client: Client, name: str) -> Any:
        return await client.ask("POST", f"/models/{name}/predict", {"inputs": TEXT})

    async def act(client: Client) -> None:
        assert (await predict(client, "base:spam")).status_code == 404
        refused = await client.ask("POST", "/admin/models", {"name": "none:spam", "source": str(spam)})
        assert refused.status_code == 404
        before = (await client.ask("GET", "/admin/models")).json()["memory"]["free_bytes"]
        loaded = await client.ask("POST", "/admin/models", {"name": "base:spam", "source": str(spam)})
        assert (loaded.status_code, loaded.json()["task"]) == (200, "classify")
        scores = (await predict(client, "base:spam")).json()
        assert {label["label"] for label in scores} == {"ham", "spam"}
        assert await client.metric('polyhead_requests_total{model="base:spam",outcome="done",task="classify"}') == "1.0"
        again = await client.ask("POST", "/admin/models/base:spam/reload")
        assert again.status_code == 200
        assert (await predict(client, "base:spam")).json() == scores
        body = {"name": "base:own", "source": str(spam), "merge": True}
        assert (await client.ask("POST", "/admin/models", body)).json()["source"].endswith(f"+{spam}")
        own = {label["label"]: label["score"] for label in (await predict(client, "base:own")).json()}
        assert own == pytest.approx({label["label"]: label["score"] for label in scores}, abs=1e-5)
        assert (await client.ask("DELETE", "/admin/models/base")).status_code == 409
        for name in ("base:spam", "base:own"):
            assert (await client.ask("DELETE", f"/admin/models/{name}?drain_seconds=0")).status_code == 200
            assert (await predict(client, name)).status_code == 404
        assert (await client.ask("GET", "/admin/models")).json()["memory"]["free_bytes"] == before
        embedded = await client.ask("POST", "/models/base/embed", {"inputs": TEXT})
        assert embedded.status_code == 200
        assert (await client.ask("DELETE", "/admin/models/base")).status_code == 200

    administering(act, {"base": tiny_embedder})


def test_unloading_an_adapter_ends_its_requests(tiny_generator: Path, tmp_path: Path) -> None:
    adapted(generator(tiny_generator), tmp_path, task_type="CAUSAL_LM", target_modules=["q_proj"])

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        _, model = served.models()
        [stream] = served.submit(model, [generate(IDS, 200, adapter=model.adapter)])
        change = served.unload("base:a", 0)
        await change.wait_and_raise()
        *_, last = [event async for event in stream]
        assert isinstance(last, Failed)
        assert "base:a" in last.error.message
        with pytest.raises(Unavailable, match="was removed"):
            served.submit(model, [generate(IDS, 2, adapter=model.adapter)])
        base = served.resolve("base", ["generate"])
        [stream] = served.submit(base, [generate(IDS, 2)])
        assert not isinstance([event async for event in stream][-1], Failed)

    serving({"base": tiny_generator, "base:a": tmp_path}, act)
