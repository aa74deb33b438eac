"""Attention over the paged cache and recorded steps, with plain torch in place of the kernel and of CUDA graphs.

Tests that need a GPU are at the end and are skipped where there is none.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.checkpoint.default_precision import DefaultPrecision
from polyhead.models.core.errors import InvarianceError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.cuda_graphs import PagedAttention, RunStep, graph_sizes
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.executors.workspace import block_bytes
from polyhead.models.invariant import make_invariant, self_test_kernel
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.scoring import Scoring
from polyhead.models.network.sequence_spans import Kernel, KeysAndValues, SequenceSpans, Window
from polyhead.models.network.varlen import find_kernel, is_supported, kernel_problem, wrong_result
from polyhead.service.config.settings import Settings
from polyhead.service.core.request import Done, Generate, Sampling
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.worker import RequestTiming
from polyhead.service.runtime import placement as place
from polyhead.service.runtime.executor_choice import CacheSize, build_executor, executor_name
from polyhead.service.runtime.memory_budget import ModelSize, memory_need
from polyhead.service.runtime.placement import choose_placement
from tests.models.native.test_step import (
    BLOCKS,
    ENCODERS,
    GENERATORS,
    LLAMA,
    all_logits,
    head,
    network,
    rows_of,
    tables,
    texts,
)

CPU = torch.device("cpu")
# Networks whose attention the kernel can compute; the others attend in groups.
KERNEL_GENERATORS = [name for name, config in GENERATORS.items() if is_supported(config)]
KERNEL_ENCODERS = [name for name, config in ENCODERS.items() if is_supported(config)]


def attention(query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window, scoring: Scoring) -> Tensor:
    """A kernel for a CPU, one row at a time, that checks its arguments.

    Each row is computed from its own keys only, so its result does not depend on other rows, to the bit.
    """
    (key, value), counts, table = kept, spans.key_counts, spans.block_table
    integers = [spans.starts, spans.key_starts, *(part for part in (counts, table) if part is not None)]
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in integers)
    assert spans.starts[0] == 0
    assert spans.starts[-1] == len(query)
    assert len(spans.starts) == len(spans.key_starts)
    assert (table is None) == (counts is None) == (key.dim() == 3)
    out = torch.empty_like(query)
    for n, (start, end) in enumerate(pairwise(spans.starts.tolist())):
        first, last = spans.key_starts[n : n + 2].tolist()
        assert end - start <= spans.max_rows
        assert last - first <= spans.max_keys
        keys, values = key[first:last] if table is None else key, value
        if table is None:
            values = value[first:last]
        else:
            assert counts is not None
            assert counts[n] == last - first
            pages = table[n, : -(-(last - first) // key.size(1))].long()
            keys, values = (part[pages].flatten(0, 1)[: last - first] for part in (key, value))
        for row in range(start, end):
            at = last - first - (end - row)
            low = max(at - window[0], 0) if window[0] >= 0 else 0
            high = at + window[1] + 1 if window[1] >= 0 else last - first
            out[row] = one_row(query[row], keys[low:high], values[low:high], scoring)
    return out


def one_row(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """[H, D] over [K, KV, D]."""
    folded = query.float().view(key.size(1), -1, query.size(1))  # [KV, S, D]
    scores = scoring.score(folded, key.float().transpose(0, 1), None)
    sinks = None if scoring.sinks is None else scoring.sinks.float().view(key.size(1), -1, 1)
    return (scoring.weigh(scores, sinks) @ value.float().transpose(0, 1)).reshape(query.shape).to(query.dtype)


class Recorder:
    """A stand-in for CUDA graphs: every replay runs the step again over the same memory."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: RunStep) -> RunStep:
        self.recorded += 1

        def replay() -> Any:
            self.replayed += 1
            return run()

        return replay


def in_place(config: ModelConfig, max_decoding: int = 0, blocks: int = BLOCKS) -> tuple[TorchExecutor, Recorder]:
    recorder = Recorder()
    paged = PagedAttention(attention, max_decoding, recorder)
    return TorchExecutor(network(config), head(config), block_count=blocks, block_size=16, in_place=paged), recorder


# The executor


@pytest.mark.parametrize("name", KERNEL_GENERATORS)
def test_a_generator_equals_grouped_attention(name: str) -> None:
    config = GENERATORS[name]
    grouped = TorchExecutor(network(config), head(config), block_count=BLOCKS, block_size=16)
    torch.testing.assert_close(
        all_logits(config, in_place(config)[0]), all_logits(config, grouped), rtol=2e-4, atol=2e-4
    )


@pytest.mark.parametrize("name", KERNEL_ENCODERS)
def test_an_encoder_equals_grouped_attention(name: str) -> None:
    config = ENCODERS[name]
    net, sequences = network(config), texts(config)
    rows = rows_of([(tokens, 0, []) for tokens in sequences], last_only=False)
    if config.segments:
        rows = replace(rows, segments=[i % 2 for i in range(len(rows.tokens))])
    executor = TorchExecutor(net, in_place=PagedAttention(attention))
    for wanted in (rows.output_rows, rows.output_rows[::7]):
        some = replace(rows, output_rows=wanted)
        torch.testing.assert_close(executor.step(some), TorchExecutor(net).step(some), rtol=2e-4, atol=2e-4)
    assert executor.padding(rows) == 0


def test_in_half_precision() -> None:
    net, last = network(LLAMA).bfloat16(), head(LLAMA).bfloat16()
    executor = TorchExecutor(
        net, last, block_count=BLOCKS, block_size=16, in_place=PagedAttention(attention, 4, Recorder())
    )
    expected = all_logits(LLAMA, TorchExecutor(network(LLAMA), head(LLAMA), block_count=BLOCKS, block_size=16))
    found = all_logits(LLAMA, executor)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def schedule(seed: int, config: ModelConfig, max_running: int) -> Iterator[tuple[StepInput, list[int]]]:
    """Steps of a server: texts start and end, in chunks and single tokens. With each step, the texts of its rows."""
    choice = random.Random(seed)
    lengths = [choice.choice((1, 3, 17, 40)) for _ in range(3 * max_running)]
    sequences = texts(config, tuple(lengths))
    block_tables, done = tables(tuple(lengths), choice), [0] * len(lengths)
    while left := [n for n in range(len(lengths)) if done[n] < lengths[n]][:max_running]:
        members = left if choice.random() < 0.6 else choice.sample(left, choice.randint(1, len(left)))
        parts = []
        for n in members:
            count = 1 if choice.random() < 0.95 else min(9, lengths[n] - done[n])
            parts.append(
                (sequences[n][done[n] : done[n] + count], done[n], block_tables[n][: (done[n] + count - 1) // 16 + 1])
            )
            done[n] += count
        yield rows_of(parts), members


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_recorded_steps_equal_plain_ones(name: str) -> None:
    config = GENERATORS[name]
    executor, recorder = in_place(config, max_decoding=11)
    plain, _ = in_place(config)
    grouped = TorchExecutor(network(config), head(config), block_count=BLOCKS, block_size=16)
    steps = list(schedule(1, config, max_running=11))
    for rows, _ in steps:
        logits = executor.step(rows).clone()
        torch.testing.assert_close(logits, plain.step(rows), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, grouped.step(rows), rtol=5e-4, atol=5e-4)
    decoding = [rows for rows, _ in steps if len(rows.tokens) == len(rows.block_tables)]
    assert 10 < recorder.replayed == len(decoding) < len(steps)
    assert recorder.recorded == len({executor.padding(rows) + len(rows.tokens) for rows in decoding}) > 2
    assert not executor.nonfinite_blocks


def test_steps_are_padded_to_a_recorded_number() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert graph_sizes(11) == [1, 2, 4, 8, 11]
    executor, _ = in_place(LLAMA, max_decoding=11)

    def step(count: int, rows: int = 1) -> StepInput:
        return rows_of([([1] * rows, 0, [n]) for n in range(count)])

    assert [executor.padding(step(count)) for count in (1, 3, 8, 9, 11)] == [0, 1, 0, 2, 0]
    assert [executor.padding(step(count, 2)) for count in (1, 3)] == [0, 0]
    for rows in (step(12), step(3, 2), replace(step(3), output_rows=[0, 2])):
        assert executor.step(rows).shape == (len(rows.output_rows), LLAMA.vocab_size)


def test_batch_chunks_and_recording_change_nothing() -> None:
    """To the bit, in a batch-invariant network: texts alone equal texts in any batch, in padded steps too."""
    net, last = network(LLAMA), head(LLAMA)
    make_invariant(net, last, kernel=attention)
    recorder = Recorder()
    paged = PagedAttention(attention, 11, recorder)
    executor = TorchExecutor(net, last, block_count=BLOCKS, block_size=16, in_place=paged)
    alone = TorchExecutor(net, last, block_count=BLOCKS, block_size=16, in_place=PagedAttention(attention))
    seen: dict[int, list[tuple[int, Tensor]]] = {}
    sequences: dict[int, list[int]] = {}
    for rows, members in schedule(2, LLAMA, max_running=11):
        logits = executor.step(rows).clone()
        for index, n in enumerate(members):
            sequences.setdefault(n, []).extend(rows.tokens[rows.starts[index] : rows.starts[index + 1]])
            seen.setdefault(n, []).append((len(sequences[n]) - 1, logits[index]))
    assert recorder.replayed > 10
    for n, tokens in sequences.items():
        expected = alone.step(rows_of([(tokens, 0, [7, 2, 5][: -(-len(tokens) // 16)])], last_only=False))
        for position, logits in seen[n]:
            assert torch.equal(logits, expected[position])


@pytest.mark.parametrize("max_decoding", [0, 4])
def test_values_that_are_not_finite_stay_with_their_sequence(max_decoding: int) -> None:
    """Also in recorded steps, and if the padding token itself has states that are not finite."""
    executor, _ = in_place(LLAMA, max_decoding, blocks=8)
    clean, later = [rows_of([([token], 0, [block])]) for token, block in ((4, 3), (5, 6))]
    expected, expected_later = executor.step(clean).clone(), executor.step(later).clone()
    with torch.no_grad():
        executor.network.tokens.weight[7, 3] = executor.network.tokens.weight[0, 0] = float("nan")
    step = rows_of([([7], 0, [1]), ([4], 0, [2]), ([5], 0, [4])])  # padded with a fourth row
    logits = executor.step(step)
    assert not logits[0].isfinite().any()
    torch.testing.assert_close(logits[1:], torch.cat((expected, expected_later)))
    assert executor.nonfinite_blocks == {1}
    torch.testing.assert_close(executor.step(rows_of([([4], 0, [1])])), expected)  # the next sequence in its block
    assert not executor.nonfinite_blocks


def test_padding_writes_only_to_the_unused_block() -> None:
    executor, recorder = in_place(LLAMA, max_decoding=4, blocks=8)
    assert executor.cache is not None
    assert executor.block_count == 8
    assert executor.cache.count == 9
    before = [storage.clone() for storage in (*executor.cache.keys, *executor.cache.values)]
    executor.step(rows_of([([9], 0, [0]), ([8], 0, [2]), ([3], 0, [7])]))
    assert recorder.replayed == 1
    for storage, old in zip((*executor.cache.keys, *executor.cache.values), before, strict=True):
        changed = (storage != old).flatten(2).any(dim=2)  # [blocks, slots]
        assert changed.nonzero().tolist() == [[0, 0], [2, 0], [7, 0], [8, 0]]


class Ticket:
    def __init__(self, request: Generate) -> None:
        self.request, self.submitted, self.events, self.timing = request, 0.0, list[Any](), RequestTiming()

    def receive(self, event: Any) -> None:
        self.events.append(event)


def answers(executor: TorchExecutor) -> list[Any]:
    worker = GeneratorWorker(executor, model="chat", token_budget=24, prefill_chunk=7, sequence_budget=6)
    worker.warm_up()
    choice = random.Random(1)
    tickets = [
        Ticket(
            Generate(
                str(n),
                tuple(choice.randrange(77) for _ in range(choice.randint(1, 40))),
                max_tokens=12,
                sampling=Sampling(0.7 if n % 2 else 0.0, seed=n),
            )
        )
        for n in range(10)
    ]
    for ticket in tickets:
        worker.submit(ticket)
    while worker.has_work:
        for ticket, event in worker.step().events:
            ticket.receive(event)
    worker.check_invariants()
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)
    return [[event.id for event in ticket.events[:-1]] for ticket in tickets]


def test_a_worker_over_paged_attention_answers_the_same() -> None:
    """With sequences that stop, are preempted and find cached prefixes."""
    executor, recorder = in_place(LLAMA, max_decoding=6, blocks=14)
    assert answers(executor) == answers(TorchExecutor(network(LLAMA), head(LLAMA), block_count=14, block_size=16))
    assert recorder.replayed > 10


# The choice of a kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_correct_kernel_passes_the_check(dtype: torch.dtype) -> None:
    assert not wrong_result(attention, CPU, dtype)


Options = dict[str, Any]


def with_change(change: Callable[[Options], None]) -> Kernel:
    def kernel(query: Tensor, kept: KeysAndValues, spans: SequenceSpans, window: Window, scoring: Scoring) -> Tensor:
        options: Options = {"spans": spans, "window": window, "scoring": scoring}
        change(options)
        return attention(query, kept, **options)

    return kernel


def shuffled(options: Options) -> None:
    spans: SequenceSpans = options["spans"]
    if spans.block_table is not None:
        options["spans"] = replace(spans, block_table=spans.block_table.flip(1).contiguous())


def over_whole_blocks(query: Tensor, kept: KeysAndValues, spans: SequenceSpans, *given: Any) -> Tensor:
    """As attention that multiplies what lies behind a sequence's last key with a weight of 0."""
    mixed, table = attention(query, kept, spans, *given), spans.block_table
    if table is None or spans.key_counts is None:
        return mixed
    for n, (start, end) in enumerate(pairwise(spans.starts.tolist())):
        used = table[n, : -(-int(spans.key_counts[n]) // kept[1].size(1))].long()
        mixed[start:end] += 0 * kept[1][used].float().sum()
    return mixed


WRONG: dict[str, Kernel] = {
    "reads behind the last key": over_whole_blocks,
    "blind to windows": with_change(lambda options: options.update(window=(-1, options["window"][1]))),
    "not causal": with_change(lambda options: options.update(window=(options["window"][0], -1))),
    "another scale": with_change(lambda options: options.update(scoring=replace(options["scoring"], scale=0.5))),
    "no cap": with_change(lambda options: options.update(scoring=replace(options["scoring"], cap=0.0))),
    "no sinks": with_change(lambda options: options.update(scoring=replace(options["scoring"], sinks=None))),
    "other blocks": with_change(shuffled),
    "rows left out": lambda query, *given: torch.cat((attention(query, *given)[:1], query[1:] * float("nan"))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_the_check(name: str) -> None:
    assert "other numbers than plain attention" in wrong_result(WRONG[name], CPU, torch.float32)


def test_there_is_no_kernel_for_a_cpu() -> None:
    assert find_kernel(CPU, torch.bfloat16) is None


def test_the_reason_why_a_kernel_is_not_used_is_given() -> None:
    def broken(*given: Any) -> Tensor:
        raise RuntimeError("it needs another compiler\nmore of it")

    assert kernel_problem(broken, CPU, torch.float32) == "RuntimeError: it needs another compiler"
    assert not kernel_problem(attention, CPU, torch.float32)


def test_a_kernel_whose_rows_depend_on_others_is_refused() -> None:
    def batch_dependent(query: Tensor, *given: Any) -> Tensor:
        return attention(query, *given) * (1 + 1e-6 * (len(query) > 64))

    self_test_kernel(attention, LLAMA, torch.zeros(1))
    with pytest.raises(InvarianceError, match="attention kernel"):
        self_test_kernel(batch_dependent, LLAMA, torch.zeros(1))


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretends that there is a GPU with a kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(place, "find_kernel", lambda device, dtype, invariant: attention)
        yield


def test_a_gpu_attends_by_the_kernel_where_it_supports_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_placement(Settings(device="cpu", executor="torch")).kernel is None
    biased = replace(LLAMA, position="relative")
    with gpu(monkeypatch):
        for given, size in (({}, 16), ({"block_size": 256}, 256), ({"precision": "float32"}, 16)):
            chosen = choose_placement(Settings(**given))
            assert (chosen.block_size, executor_name(chosen, LLAMA)) == (size, "torch-triton")
        assert executor_name(choose_placement(Settings()), biased) == "torch"
        assert executor_name(choose_placement(Settings(device="cpu")), LLAMA) != "torch-triton"


def test_the_executor_is_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu(monkeypatch):
        loaded: Any = SimpleNamespace(
            network=network(LLAMA), head=head(LLAMA), decoder_config=LLAMA, default_precision=None, decoding=None
        )
        chosen = Settings(max_running=8)
        executor: Any = build_executor(loaded, chosen, choose_placement(chosen, config=LLAMA), cache=CacheSize(5))
        assert (executor.block_size, executor.block_count, executor.cache.count) == (16, 5, 6)
        headless: Any = SimpleNamespace(
            network=network(LLAMA), head=None, decoder_config=LLAMA, default_precision=None, decoding=None
        )
        encoder: Any = build_executor(headless, Settings(), choose_placement(Settings(), config=LLAMA))
        assert (encoder.block_size, encoder.cache, encoder.padding(rows_of([([1, 2], 0, [])]))) == (0, None, 0)


def test_recorded_steps_are_in_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size: Any = SimpleNamespace(weight_bytes=lambda dtype: 1000, temporary_bytes=lambda dtype: 0, tokenizer=0)
    chat = ModelSize(
        "chat", replace(LLAMA, vocab_size=50_000), "generate", 0, 1024, size, DefaultPrecision("float32", "")
    )
    with gpu(monkeypatch):
        few, many = (memory_need(chat, Settings(max_running=most, step_tokens=512), 40) for most in (4, 64))
        assert (few.block_size, few.cache_tokens) == (16, 40 * 16)
        assert few.cache == 40 * block_bytes(chat.config, 16, torch.bfloat16)
        logits = 50_000 * 4
        assert many.workspace - few.workspace > (2 * 60 + 3 * 60) * logits  # of recorded steps, and of sampling


# With a GPU


GPU = torch.device("cuda")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def on_gpu(config: ModelConfig, how: PagedAttention | None, dtype: torch.dtype = torch.float32) -> TorchExecutor:
    net, last = network(config).to(GPU, dtype), head(config).to(GPU, dtype)
    return TorchExecutor(net, last, block_count=BLOCKS, block_size=16, in_place=how)


def kernel(dtype: torch.dtype = torch.float32, invariant: bool = False) -> Kernel:
    found = find_kernel(GPU, dtype, invariant)
    assert found is not None
    return found


@cuda
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernel_gives_the_right_numbers(dtype: torch.dtype, invariant: bool) -> None:
    assert not wrong_result(kernel(dtype, invariant), GPU, dtype)


@cuda
@pytest.mark.parametrize("name", KERNEL_GENERATORS)
def test_the_kernel_equals_grouped_attention(name: str) -> None:
    config = GENERATORS[name]
    expected = all_logits(config, on_gpu(config, None))
    logits = all_logits(config, on_gpu(config, PagedAttention(kernel())))
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@cuda
@pytest.mark.parametrize("name", KERNEL_ENCODERS)
def test_an_encoder_by_the_kernel_equals_grouped_attention(name: str) -> None:
    config = ENCODERS[name]
    rows = rows_of([(tokens, 0, []) for tokens in texts(config)], last_only=False)
    if config.segments:
        rows = replace(rows, segments=[i % 2 for i in range(len(rows.tokens))])
    net = network(config).to(GPU)
    expected = TorchExecutor(net).step(rows)
    assert (TorchExecutor(net, in_place=PagedAttention(kernel())).step(rows) - expected).abs().max() < 1e-3


@cuda
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_graphs_equal_eager_steps(name: str) -> None:
    config = GENERATORS[name]
    recorded, eager = on_gpu(config, PagedAttention(kernel(), 11)), on_gpu(config, PagedAttention(kernel()))
    for rows, _ in schedule(1, config, max_running=11):
        expected = eager.step(rows)
        assert (recorded.step(rows) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not recorded.nonfinite_blocks


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_graphs_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    net, last, exact = network(LLAMA).to(GPU, dtype), head(LLAMA).to(GPU, dtype), kernel(dtype, invariant=True)
    make_invariant(net, last, kernel=exact)
    executor = TorchExecutor(net, last, block_count=BLOCKS, block_size=16, in_place=PagedAttention(exact, 11))
    alone = TorchExecutor(net, last, block_count=BLOCKS, block_size=16, in_place=PagedAttention(exact))
    sequences: dict[int, list[int]] = {}
    for rows, members in schedule(2, LLAMA, max_running=11):
        logits = executor.step(rows).clone()
        for index, n in enumerate(members):
            sequences.setdefault(n, []).extend(rows.tokens[rows.starts[index] : rows.starts[index + 1]])
            table = [7, 2, 5][: -(-len(sequences[n]) // 16)]
            assert torch.equal(logits[index], alone.step(rows_of([(sequences[n], 0, table)]))[0])
