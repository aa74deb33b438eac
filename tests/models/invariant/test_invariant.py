"""Deterministic mode: answers do not depend on the batch, to the bit; they equal the reference; kernels are tested."""

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

from polyhead.models.core import turns
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
    store_transposed,
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


def logits_alone(executor: TorchExecutor, sequence: list[int], table: list[int]) -> Tensor:
    """The logits [T, V] of a sequence alone, in one step."""
    rows = list(range(len(sequence)))
    return executor.step(StepInput(sequence, rows, [0, len(rows)], [table], rows)).clone()


def logits_in_batches(
    executor: TorchExecutor, sequences: list[list[int]], tables: list[list[int]], seed: int
) -> list[Tensor]:
    """The logits [T, V] of each sequence, in chunks of random size beside chunks of the others."""
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
    """The logits of five sequences, each alone, and all in mixed batches."""
    longest = network.config.max_positions - 2
    sequences = [*random_sequences(4, min(longest, 90), network.config.vocab_size), [5] * longest]
    counts = [-(-len(sequence) // size) for sequence in sequences]
    executor = TorchExecutor(network, head, block_count=sum(counts), block_size=size)
    free = random.Random(1).sample(range(sum(counts)), sum(counts))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    apart = [logits_alone(executor, sequence, table) for sequence, table in zip(sequences, tables, strict=True)]
    return apart, logits_in_batches(executor, sequences, tables, seed=2)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# Logits and states


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_family_equals_the_reference_in_deterministic_mode(name: str) -> None:
    theirs, ours, head = build(name)
    make_invariant(ours, head or nn.Identity())
    states = ours(RaggedBatch.of(SEQUENCES))
    packed = states if head is None else head(states)
    expected = torch.cat([reference(theirs, sequence, head) for sequence in SEQUENCES])
    scale = max(1.0, float(expected.abs().max()))
    assert float((packed - expected).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama-biased-tied", "mistral-window", "qwen3", "gemma3"])
def test_logits_do_not_depend_on_chunks_or_the_batch(name: str, dtype: torch.dtype) -> None:
    _, ours, head = build(name)
    assert name in CAUSAL
    assert head is not None
    make_invariant(ours.to(dtype), head.to(dtype))
    assert equal(*over_a_cache(ours, head, size=5))


WIDE: dict[str, Any] = dict(vocab_size=400, width=192, depth=1, heads=6, kv_heads=2, mlp_width=1536, max_positions=560)


def wide(dtype: torch.dtype = torch.float32) -> tuple[Transformer, LanguageHead]:
    """A network wide enough for kernels that split sums over threads, with a context of several tiles of keys."""
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


def test_without_deterministic_mode_logits_differ() -> None:
    assert not equal(*over_a_cache(*wide(), size=16))


def test_a_prefix_computed_in_another_batch_is_equal() -> None:
    """Keys that were computed in chunks beside other sequences are read by a sequence that computes only the rest."""
    network, head = wide()
    make_invariant(network, head)
    executor = TorchExecutor(network, head, block_count=64, block_size=16)
    prompt = random_sequences(6, 300, 400)[0][:1] + list(range(300))
    fresh = logits_alone(executor, prompt, list(range(19)))
    logits_in_batches(executor, [prompt[:288], [3] * 40], [list(range(20, 38)), [60, 61, 62]], seed=5)
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
        batch_alone = RaggedBatch.of([text])
        state = ours(batch_alone)
        assert torch.equal(state, states[batch.starts[n] : batch.starts[n + 1]])
        assert torch.equal(head.postprocess(head(state.float(), batch_alone.starts)), scores[n : n + 1])


# Answers of workers, and the command verify-determinism


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignores progress."""


def verified_settings(folder: Path, executor: str, precision: str) -> Settings:
    flags = {"models": {"verified": str(folder)}, "deterministic": True}
    return settings.read_settings({**flags, "executor": executor, "precision": precision, "threads": 1})


@pytest.mark.parametrize("kind", ["tiny_generator", "tiny_classifier"])
@pytest.mark.parametrize(
    ("executor", "precision", "count"),
    [
        ("torch", "float32", 48),
        ("torch", "bfloat16", 24),
        ("native", "float32", 60),
        ("native", "int8", 60),
        ("native", "int4", 60),
        pytest.param("torch", "float32", 200, marks=pytest.mark.thorough),
        pytest.param("torch", "bfloat16", 200, marks=pytest.mark.thorough),
        pytest.param("native", "float32", 400, marks=pytest.mark.thorough),
        pytest.param("native", "int8", 400, marks=pytest.mark.thorough),
    ],
)
def test_answers_of_many_requests_do_not_depend_on_the_batch(
    kind: str,
    executor: str,
    precision: str,
    count: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, in batches of 2 to 32, in chunks, over cached prefixes, preempted; greedy and with seeds."""
    if executor == "native" and not runnable_targets():
        pytest.skip("polyhead was installed without a compiler")
    if (
        executor == "torch" and precision == "float32"
    ):  # the slowest cases: shorter answers, which still fill several blocks
        monkeypatch.setattr(determinism, "USUAL_ANSWER", 4)
        monkeypatch.setattr(determinism, "LONG_ANSWER", 5 * determinism.SMALL_BLOCK)
    configured = verified_settings(request.getfixturevalue(kind), executor, precision)
    loaded = determinism.load_checkpoint(configured)
    verdicts = determinism.verify(loaded, configured, determinism.random_requests(loaded, count), ignore_progress)
    assert [(verdict.equal, verdict.max_difference) for verdict in verdicts] == [(count, 0.0)] * len(verdicts)
    notes = " ".join(verdict.note for verdict in verdicts)
    assert kind == "tiny_classifier" or ("tokens found" in notes and "preemptions" in notes)
    assert not any(note.note.startswith("0 ") for note in verdicts), "a condition did not occur, so nothing was tested"


def test_vectors_of_an_embedder_do_not_depend_on_the_batch(tiny_embedder: Path) -> None:
    for executor in ("torch", "auto"):
        configured = verified_settings(tiny_embedder, executor, "float32")
        loaded = determinism.load_checkpoint(configured)
        verdicts = determinism.verify(loaded, configured, determinism.random_requests(loaded, 40), ignore_progress)
        assert all(verdict.equal == 40 for verdict in verdicts)


class BatchDependent(nn.Module):
    """A head whose logits depend slightly on the number of rows."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states)
        return logits + 1e-3 * len(states) * torch.arange(logits.size(1))


def test_answers_that_depend_on_the_batch_are_counted(tiny_generator: Path) -> None:
    configured = verified_settings(tiny_generator, "torch", "float32")
    loaded = determinism.load_checkpoint(configured)
    loaded.head.output = BatchDependent(loaded.head.output)
    verdict = determinism.verify(loaded, configured, determinism.random_requests(loaded, 6), ignore_progress)[0]
    assert verdict.equal < 6
    assert verdict.max_difference > 1e-4


def polyhead(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["verify-determinism", *arguments])


def test_the_command_reports_equal_answers(tiny_generator: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    result = polyhead(str(tiny_generator), "--count", "12")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("12 of 12        0.0e+00") == 4
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A good film\n\nA bad film, dull and long\nParis\n")
    result = polyhead(str(tiny_classifier), "--prompts", str(prompts), "--precision", "bfloat16")
    assert result.exit_code == 0
    assert result.stdout.count("3 of 3") == 3


def test_the_command_fails_where_answers_differ(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(executors, "make_invariant", lambda *built: None)
    before = LanguageHead.forward
    monkeypatch.setattr(LanguageHead, "forward", lambda head, x: before(head, x) + 1e-3 * len(x) * torch.arange(384))
    monkeypatch.setenv("POLYHEAD_EXECUTOR", "torch")
    result = polyhead(str(tiny_generator), "--count", "4")
    assert result.exit_code == 1
    assert "answers depend on the batch" in result.stderr
    result = polyhead(str(tiny_generator), "--count", "4", "--no-deterministic")
    assert result.exit_code == 0, "not in deterministic mode"
    assert "0 of 4" in result.stdout
    assert polyhead(str(tmp_path / "absent")).exit_code == 1
    assert polyhead(str(tiny_generator), "--precision", "float16").exit_code == 2
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    result = polyhead(str(tiny_generator), "--prompts", str(empty))
    assert (result.exit_code, "has no prompts" in result.stderr) == (1, True)
    long = tmp_path / "long.txt"
    long.write_text("film " * 500)
    assert "prompt 1 has" in polyhead(str(tiny_generator), "--prompts", str(long)).stderr


# Splitting of rows, and the self-test


@pytest.mark.parametrize("sizes", [ROW_COUNTS, (16,), (2, 4, 8, 12, 16, 256, 512), (5, 7)])
def test_split_rows_cover_all_rows_once(sizes: tuple[int, ...]) -> None:
    for count in (*range(70), 511, 512, 513, 3000):
        pieces = split_rows(count, sizes)
        assert {size for _, size in pieces} <= set(sizes)
        ends = [start + size for start, size in pieces]
        assert [start for start, _ in pieces] == [0, *ends][: len(pieces)]
        assert count <= (ends[-1] if ends else 0) < count + sizes[-1]
        assert not pieces or pieces[-1][0] < count


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16])
def test_threads_get_full_vector_lanes(threads: int) -> None:
    for count in range(0, 400_000, 6_400):
        pieces = even_thread_size(count, threads)
        assert sum(pieces) == count
        assert all(piece % (VECTOR_MULTIPLE * min(threads, -(-piece // 32768) or 1)) == 0 for piece in pieces)


@pytest.mark.parametrize("width", [64, 192, 50])
def test_the_last_elements_of_an_activation_are_computed_as_all_others(width: int) -> None:
    def ragged_loop(x: Tensor) -> Tensor:
        """Rounds the remainder of a vectorised loop differently."""
        x = x.clone()
        x.view(-1)[x.numel() // VECTOR_MULTIPLE * VECTOR_MULTIPLE :] += 1
        return x

    x = torch.zeros(37, width)
    assert torch.equal(InvariantActivation(ragged_loop)(x), x)
    values = torch.randn(37, width)
    assert torch.equal(InvariantActivation(F.silu)(values).contiguous(), InvariantActivation(F.silu)(values.clone()))
    assert torch.allclose(InvariantActivation(F.gelu)(values), F.gelu(values), atol=1e-6)


def depending(on: str) -> Callable[..., Tensor]:
    """A matrix product with other results for few rows ("size"), some row indices ("place") or the batch ("batch")."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        rows = x.double() @ weight.double().t()
        if on == "size" and len(x) < 8:
            rows = rows + 1e-3
        if on == "place":
            rows = rows + 1e-3 * (torch.arange(len(x))[:, None] == 5)
        if on == "batch":
            rows = rows + 1e-9 * x.double().abs().sum()
        return rows.float() if out is None else out.copy_(rows)

    return product


def test_a_large_matrix_is_made_invariant_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a turn after two inputs of the matrix, after an output of its test matrix, and after each product."""
    monkeypatch.setattr(turns, "PART_NUMBERS", 48)
    plain, taken = nn.Linear(48, 20, bias=False), list[None]()
    weight = plain.weight.detach().clone()
    store_transposed(plain.weight, lambda: taken.append(None))
    assert len(taken) == 24
    assert torch.equal(plain.weight, weight)
    assert plain.weight.stride() == (1, 20)
    kept, count = plain.weight.data_ptr(), len(taken)
    store_transposed(plain.weight, lambda: taken.append(None))
    assert (plain.weight.data_ptr(), len(taken)) == (kept, count)  # as for another head with the same matrix
    find_safe_sizes(plain, lambda: taken.append(None))
    assert len(taken) - count >= 20 + len(ROW_COUNTS)


def test_row_counts_with_other_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "linear_product", depending("size"))
    plain = nn.Linear(48, 20, bias=False)
    sizes = find_safe_sizes(plain)
    assert sizes == tuple(size for size in ROW_COUNTS if size >= 8)
    x = torch.randn(43, 48)
    expected = InvariantLinear(plain, sizes, 20)(x)
    assert torch.equal(torch.cat([InvariantLinear(plain, sizes, 20)(row) for row in torch.split(x, 1)]), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 2, 5, 7, 10, 17])
def test_small_heads_give_each_row_the_same_result_alone(threads: int, outputs: int, bias: bool) -> None:
    plain = nn.Linear(32, outputs, bias=bias)
    head = nn.Sequential(plain)
    make_head_invariant(head)
    x = torch.randn(43, 32)
    expected = head(x)
    assert expected.shape == (43, outputs)
    assert torch.equal(torch.cat([head(row) for row in torch.split(x, 1)]), expected)
    torch.testing.assert_close(expected, plain(x))


@pytest.mark.parametrize("on", ["place", "batch"])
def test_a_machine_whose_products_depend_on_the_batch_is_refused(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, head = wide()
    monkeypatch.setattr(linear_module, "linear_product", depending(on))
    with pytest.raises(InvarianceError, match="192 features in float32 on cpu gives a row other bits"):
        make_invariant(network, head)


def test_a_machine_whose_batched_products_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: product(a, b) * (1 + 1e-6 * len(a)))
    with pytest.raises(InvarianceError, match="attention heads of width 32"):
        self_test_attention(32, 3, torch.device("cpu"))


def test_the_rehearsal_finds_other_dependences_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    network, head = wide()
    rotation = network.rotaries[0].rotation
    monkeypatch.setattr(
        network.rotaries[0], "rotation", lambda at, dtype: [part + 1e-4 * len(at) for part in rotation(at, dtype)]
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
    """Texts of one token up to the longest possible one."""
    loaded = determinism.load_checkpoint(verified_settings(tiny_classifier, "torch", "float32"))
    requests = [Encode(str(length), (7,) * length) for length in (1, 256, 255, 2)]
    executor = TorchExecutor(loaded.network)
    worker = EncoderWorker(executor, loaded.head, model="judge", task="classify")  # type: ignore[arg-type]
    (first, *_), _ = determinism.run_batch(worker, requests)
    (only,), _ = determinism.run_batch(worker, requests[:1])
    assert first.events == only.events
