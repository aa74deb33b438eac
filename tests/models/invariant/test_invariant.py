"""The mode whose answers do not depend on the batch: equal to the bit, equal to the reference, and proven at start."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from polyhead.models.core.errors import InvarianceError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import invariant_linear as linear_module
from polyhead.models.invariant import make_head_invariant, make_invariant
from polyhead.models.invariant.invariant_attention import KEY_TILE, self_test_attention
from polyhead.models.invariant.invariant_linear import (
    VECTOR_MULTIPLE,
    InvariantActivation,
    InvariantLinear,
    even_thread_size,
    find_safe_sizes,
)
from polyhead.models.invariant.safe_sizes import ROW_COUNTS, split_rows
from polyhead.models.native.library import runnable_targets
from polyhead.models.network.heads import LabelScoring, LanguageHead, SequenceHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from polyhead.service.cli import determinism
from polyhead.service.cli import main as cli
from polyhead.service.config import settings
from polyhead.service.config.settings import Settings
from polyhead.service.core.request import Encode
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.runtime import executor_choice as executors
from tests.models.architectures.test_families import CASES, CAUSAL, SEQUENCES, build, reference

Built = tuple[Transformer, nn.Module]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_sequences(count: int, longest: int, words: int) -> list[list[int]]:
    choice = random.Random(count)
    lengths = [choice.choice((1, 2, 3, 17, 40, longest)) for _ in range(count)]
    return [[choice.randrange(words) for _ in range(length)] for length in lengths]


def alone(executor: TorchExecutor, sequence: list[int], table: list[int]) -> Tensor:
    """[T, V] in one step."""
    rows = list(range(len(sequence)))
    return executor.step(StepInput(sequence, rows, [0, len(rows)], [table], rows)).clone()


def in_company(executor: TorchExecutor, sequences: list[list[int]], tables: list[list[int]], seed: int) -> list[Tensor]:
    """[T, V] of each sequence, in chunks of any size beside chunks of others."""
    choice = random.Random(seed)
    done, outputs = [0] * len(sequences), [[] for _ in sequences]  # type: ignore[var-annotated]
    while left := [n for n, sequence in enumerate(sequences) if done[n] < len(sequence)]:
        rows = StepInput([], [], [0], [], [])
        members = choice.sample(left, choice.randint(1, len(left)))
        for n in members:
            span = range(done[n], min(done[n] + choice.choice((1, 1, 7, 50)), len(sequences[n])))
            rows.tokens.extend(sequences[n][p] for p in span)
            rows.positions.extend(span)
            rows.starts.append(len(rows.tokens))
            rows.block_tables.append(tables[n][: span[-1] // executor.block_size + 1])
            done[n] = span[-1] + 1
        rows.output_rows.extend(range(len(rows.tokens)))
        logits = executor.step(rows)
        for index, n in enumerate(members):
            outputs[n].append(logits[rows.starts[index] : rows.starts[index + 1]])
    return [torch.cat(parts) for parts in outputs]


def over_a_cache(network: Transformer, head: LanguageHead, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The logits of five sequences, each alone, and all mixed."""
    longest = network.config.max_positions - 2
    sequences = [*random_sequences(4, min(longest, 90), network.config.vocab_size), [5] * longest]
    counts = [-(-len(sequence) // size) for sequence in sequences]
    executor = TorchExecutor(network, head, block_count=sum(counts), block_size=size)
    free = random.Random(1).sample(range(sum(counts)), sum(counts))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    apart = [alone(executor, sequence, table) for sequence, table in zip(sequences, tables, strict=True)]
    return apart, in_company(executor, sequences, tables, seed=2)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# What it computes


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_family_equals_the_reference_in_this_mode_too(name: str) -> None:
    theirs, ours, head = build(name)
    make_invariant(ours, head or nn.Identity())
    states = ours(RaggedBatch.of(SEQUENCES))
    packed = states if head is None else head(states)
    expected = torch.cat([reference(theirs, sequence, head) for sequence in SEQUENCES])
    scale = max(1.0, float(expected.abs().max()))
    assert float((packed - expected).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-biased-tied", "mistral-window", "qwen3", "gemma3"])
def test_logits_do_not_depend_on_chunks_and_company(name: str, dtype: torch.dtype) -> None:
    _, ours, head = build(name)
    assert name in CAUSAL
    assert head is not None
    make_invariant(ours.to(dtype), head.to(dtype))
    assert equal(*over_a_cache(ours, head, size=5))


WIDE: dict[str, Any] = dict(vocab_size=400, width=192, depth=1, heads=6, kv_heads=2, mlp_width=1536, max_positions=560)


def wide(dtype: torch.dtype = torch.float32) -> tuple[Transformer, LanguageHead]:
    """Wide enough for kernels that divide a sum among threads, with a context of several tiles of keys."""
    torch.manual_seed(0)
    config = replace(build("llama")[1].config, **WIDE, head_width=32)
    network = Transformer(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return network.to(dtype), LanguageHead(config, network.tokens).to(dtype)


def test_a_wide_network_over_several_tiles_of_keys(threads: int) -> None:
    network, head = wide()
    assert network.config.max_positions > 2 * KEY_TILE
    make_invariant(network, head)
    assert equal(*over_a_cache(network, head, size=16))


def test_the_fast_mode_differs_which_this_test_sees() -> None:
    assert not equal(*over_a_cache(*wide(), size=16))


def test_a_prefix_computed_in_other_company_is_as_good() -> None:
    """Keys that were stored beside others, in chunks, then read by somebody who computes only the rest."""
    network, head = wide()
    make_invariant(network, head)
    executor = TorchExecutor(network, head, block_count=64, block_size=16)
    prompt = random_sequences(6, 300, 400)[0][:1] + list(range(300))
    fresh = alone(executor, prompt, list(range(19)))
    in_company(executor, [prompt[:288], [3] * 40], [list(range(20, 38)), [60, 61, 62]], seed=5)
    rest = list(range(288, 301))
    table = [*range(20, 38), 50]
    reused = executor.step(StepInput(prompt[288:], rest, [0, len(rest)], [table], list(range(len(rest)))))
    assert torch.equal(reused, fresh[288:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_states_and_scores_of_an_encoder_are_those_of_each_text_alone(dtype: torch.dtype) -> None:
    _, ours, _ = build("bert")
    head = SequenceHead(ours.config, 3, LabelScoring(), "sigmoid")
    make_invariant(ours.to(dtype), head.to(dtype))
    texts = random_sequences(40, 60, 97)
    batch = RaggedBatch.of(texts)
    states = ours(batch)
    scores = head.postprocess(head(states.float(), batch.starts))
    for n, text in enumerate(texts):
        mine = RaggedBatch.of([text])
        state = ours(mine)
        assert torch.equal(state, states[batch.starts[n] : batch.starts[n + 1]])
        assert torch.equal(head.postprocess(head(state.float(), mine.starts)), scores[n : n + 1])


# What workers answer, and the command that shows it


def quiet(what: str, done: int, total: int) -> None:
    """Nobody listens."""


def asked(folder: Path, executor: str, precision: str) -> Settings:
    flags = {"models": {"verified": str(folder)}, "deterministic": True}
    return settings.read_settings({**flags, "executor": executor, "precision": precision, "threads": 1})


@pytest.mark.parametrize("kind", ["tiny_generator", "tiny_classifier"])
@pytest.mark.parametrize(
    ("executor", "precision", "count"),
    [
        ("torch", "float32", 200),
        ("torch", "bfloat16", 60),
        ("native", "float32", 200),
        ("native", "int8", 200),
        ("native", "int4", 60),
    ],
)
def test_two_hundred_in_any_company(
    kind: str,
    executor: str,
    precision: str,
    count: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, in batches of 2 to 32, in chunks, over stored prefixes, preempted; greedy and seeded."""
    if executor == "native" and not runnable_targets():
        pytest.skip("no compiler was there when polyhead was installed")
    if executor == "torch" and count == 200:  # steps that take longest; half the answer still outgrows several blocks
        monkeypatch.setattr(determinism, "USUAL_ANSWER", 4)
        monkeypatch.setattr(determinism, "LONG_ANSWER", 5 * determinism.SMALL_BLOCK)
    known = asked(request.getfixturevalue(kind), executor, precision)
    loaded = determinism.load_checkpoint(known)
    verdicts = determinism.verify(loaded, known, determinism.random_requests(loaded, count), quiet)
    assert [(verdict.equal, verdict.max_difference) for verdict in verdicts] == [(count, 0.0)] * len(verdicts)
    notes = " ".join(verdict.note for verdict in verdicts)
    assert kind == "tiny_classifier" or ("tokens found" in notes and "preemptions" in notes)
    assert not any(note.note.startswith("0 ") for note in verdicts), (
        "a condition that did not come about proves nothing"
    )


def test_an_embedder_too(tiny_embedder: Path) -> None:
    for executor in ("torch", "auto"):
        known = asked(tiny_embedder, executor, "float32")
        loaded = determinism.load_checkpoint(known)
        verdicts = determinism.verify(loaded, known, determinism.random_requests(loaded, 40), quiet)
        assert all(verdict.equal == 40 for verdict in verdicts)


class Crowded(nn.Module):
    """A head whose logits depend, a little, on how many rows there are."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states)
        return logits + 1e-3 * len(states) * torch.arange(logits.size(1))


def test_what_depends_on_the_batch_is_counted(tiny_generator: Path) -> None:
    known = asked(tiny_generator, "torch", "float32")
    loaded = determinism.load_checkpoint(known)
    loaded.head.output = Crowded(loaded.head.output)
    verdict = determinism.verify(loaded, known, determinism.random_requests(loaded, 6), quiet)[0]
    assert verdict.equal < 6
    assert verdict.max_difference > 1e-4


def polyhead(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["verify-determinism", *arguments])


def test_the_command_shows_it(tiny_generator: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    said = polyhead(str(tiny_generator), "--count", "12")
    assert said.exit_code == 0, said.output
    assert said.stdout.count("12 of 12        0.0e+00") == 4
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A good film\n\nA bad film, dull and long\nParis\n")
    said = polyhead(str(tiny_classifier), "--prompts", str(prompts), "--precision", "bfloat16")
    assert said.exit_code == 0
    assert said.stdout.count("3 of 3") == 3


def test_the_command_fails_where_a_promise_is_not_kept(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(executors, "make_invariant", lambda *built: None)
    before = LanguageHead.forward
    monkeypatch.setattr(LanguageHead, "forward", lambda head, x: before(head, x) + 1e-3 * len(x) * torch.arange(384))
    monkeypatch.setenv("POLYHEAD_EXECUTOR", "torch")
    said = polyhead(str(tiny_generator), "--count", "4")
    assert said.exit_code == 1
    assert "answers depend on the batch" in said.stderr
    said = polyhead(str(tiny_generator), "--count", "4", "--no-deterministic")
    assert said.exit_code == 0, "nothing was promised"
    assert "0 of 4" in said.stdout
    assert polyhead(str(tmp_path / "absent")).exit_code == 1
    assert polyhead(str(tiny_generator), "--precision", "float16").exit_code == 2
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    said = polyhead(str(tiny_generator), "--prompts", str(empty))
    assert (said.exit_code, "has no prompts" in said.stderr) == (1, True)
    long = tmp_path / "long.txt"
    long.write_text("film " * 500)
    assert "prompt 1 has" in polyhead(str(tiny_generator), "--prompts", str(long)).stderr


# Pieces, and the proof


@pytest.mark.parametrize("sizes", [ROW_COUNTS, (16,), (2, 4, 8, 12, 16, 256, 512), (5, 7)])
def test_pieces_cover_all_rows_once(sizes: tuple[int, ...]) -> None:
    for count in (*range(70), 511, 512, 513, 3000):
        pieces = split_rows(count, sizes)
        assert {size for _, size in pieces} <= set(sizes)
        ends = [start + size for start, size in pieces]
        assert [start for start, _ in pieces] == [0, *ends][: len(pieces)]
        assert count <= (ends[-1] if ends else 0) < count + sizes[-1]
        assert not pieces or pieces[-1][0] < count


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
def test_threads_are_given_whole_lanes(threads: int) -> None:
    for count in range(0, 400_000, 6_400):
        pieces = even_thread_size(count, threads)
        assert sum(pieces) == count
        assert all(piece % (VECTOR_MULTIPLE * min(threads, -(-piece // 32768) or 1)) == 0 for piece in pieces)


@pytest.mark.parametrize("width", [64, 192, 50])
def test_an_activation_s_last_elements_are_like_all_others(width: int) -> None:
    def ragged_loop(x: Tensor) -> Tensor:
        """Rounds what a vectorised loop leaves over in another way."""
        x = x.clone()
        x.view(-1)[x.numel() // VECTOR_MULTIPLE * VECTOR_MULTIPLE :] += 1
        return x

    x = torch.zeros(37, width)
    assert torch.equal(InvariantActivation(ragged_loop)(x), x)
    values = torch.randn(37, width)
    assert torch.equal(InvariantActivation(F.silu)(values).contiguous(), InvariantActivation(F.silu)(values.clone()))
    assert torch.allclose(InvariantActivation(F.gelu)(values), F.gelu(values), atol=1e-6)


def depending(on: str) -> Callable[..., Tensor]:
    """A product as of a library that has other kernels for few rows, for some places, or for some company."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        rows = x.double() @ weight.double().t()
        if on == "size" and len(x) < 8:
            rows = rows + 1e-3
        if on == "place":
            rows = rows + 1e-3 * (torch.arange(len(x))[:, None] == 5)
        if on == "company":
            rows = rows + 1e-9 * x.double().abs().sum()
        return rows.float() if out is None else out.copy_(rows)

    return product


def test_sizes_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "linear_product", depending("size"))
    plain = nn.Linear(48, 20, bias=False)
    sizes = find_safe_sizes(plain)
    assert sizes == tuple(size for size in ROW_COUNTS if size >= 8)
    x = torch.randn(43, 48)
    whole = InvariantLinear(plain, sizes, 20)(x)
    assert torch.equal(torch.cat([InvariantLinear(plain, sizes, 20)(row) for row in torch.split(x, 1)]), whole)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 2, 5, 7, 10, 17])
def test_a_few_outputs_are_those_of_a_row_alone(threads: int, outputs: int, bias: bool) -> None:
    plain = nn.Linear(32, outputs, bias=bias)
    head = nn.Sequential(plain)
    make_head_invariant(head)
    x = torch.randn(43, 32)
    whole = head(x)
    assert whole.shape == (43, outputs)
    assert torch.equal(torch.cat([head(row) for row in torch.split(x, 1)]), whole)
    torch.testing.assert_close(whole, plain(x))


@pytest.mark.parametrize("on", ["place", "company"])
def test_a_machine_whose_products_depend_on_the_batch_is_refused(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, head = wide()
    monkeypatch.setattr(linear_module, "linear_product", depending(on))
    with pytest.raises(InvarianceError, match="192 features in float32 on cpu gives a row other bits"):
        make_invariant(network, head)


def test_a_machine_whose_batched_products_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: product(a, b) * (1 + 1e-6 * len(a)))
    with pytest.raises(InvarianceError, match="attention heads of width 32"):
        self_test_attention(32, 3, torch.device("cpu"))


def test_what_nobody_thought_of_is_found_by_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    network, head = wide()
    turn = network.rotaries[0].rotation
    monkeypatch.setattr(
        network.rotaries[0], "rotation", lambda at, dtype: [part + 1e-4 * len(at) for part in turn(at, dtype)]
    )
    with pytest.raises(InvarianceError, match="although each kernel passed"):
        make_invariant(network, head)


def test_weights_stay_the_same_and_stay_tied() -> None:
    network, head = wide()
    before = {name: value.clone() for name, value in (*network.state_dict().items(), *head.state_dict().items())}
    make_invariant(network, head)
    after = {**network.state_dict(), **head.state_dict()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert head.output.weight is network.tokens.weight


def test_texts_of_any_length_through_the_worker(tiny_classifier: Path) -> None:
    """One token, and the longest there is."""
    loaded = determinism.load_checkpoint(asked(tiny_classifier, "torch", "float32"))
    requests = [Encode(str(length), (7,) * length) for length in (1, 256, 255, 2)]
    executor = TorchExecutor(loaded.network)
    worker = EncoderWorker(executor, loaded.head, model="judge", task="classify")  # type: ignore[arg-type]
    (first, *_), _ = determinism.run_batch(worker, requests)
    (only,), _ = determinism.run_batch(worker, requests[:1])
    assert first.events == only.events
