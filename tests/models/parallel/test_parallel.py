"""Tensor parallelism over two processes: the same answers as one process, half the weights each, and a common end."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers as tf

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint, description
from polyhead.models.checkpoint import tensor_files as tensors
from polyhead.models.checkpoint.source_policy import ANY_SOURCE
from polyhead.models.checkpoint.tensor_slices import EntryReader, locate_pieces, read_cut_pieces
from polyhead.models.core.errors import ModelError, StepInputError, UnsupportedError
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.parallel import LeaderExecutor, Share, StepCommand, cut_parameters, share_config, split_problem
from polyhead.models.parallel.step_messages import decode_step, encode_step
from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.runtime.memory_budget import MemoryNeed, measure_model
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.rank_processes import RankProcesses, check_adapter_allowed
from tests.families.conformance import save_checkpoint
from tests.families.modern_decoders import ROWS as DECODERS
from tests.models.native.test_recurrent_layers import RECURRENT
from tests.support import checkpoints, translators
from tests.support.edits import edited, with_tensors
from tests.support.engine_fakes import ask, finish, generate
from tests.support.processes import PATIENCE, Process

SHAPE = dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=checkpoints.POSITIONS)
BERT = dict(SHAPE, hidden_size=32, intermediate_size=48)
LLAMA = dict(BERT, num_key_value_heads=2)
GPT2 = dict(n_layer=2, n_head=4, n_embd=32, n_positions=checkpoints.POSITIONS)
ODD_SIZES = dict(LLAMA, num_attention_heads=6, num_key_value_heads=3, hidden_size=48, intermediate_size=51)
GEMMA = dict(LLAMA, num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=24, sliding_window=4)
DEBERTA = BERT | checkpoints.DISENTANGLED
GENERATORS: dict[str, tuple[Any, Any]] = {
    "fused and transposed": (partial(tf.GPT2Config, **GPT2), tf.GPT2LMHeadModel),
    "grouped, with biases": (
        partial(tf.LlamaConfig, **LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        tf.LlamaForCausalLM,
    ),
    "three key heads": (partial(tf.Qwen2Config, **ODD_SIZES, tie_word_embeddings=True), tf.Qwen2ForCausalLM),
    "norms of heads": (partial(tf.Qwen3Config, **LLAMA, head_dim=16), tf.Qwen3ForCausalLM),
    "one key head": (partial(tf.Gemma3TextConfig, **GEMMA), tf.Gemma3ForCausalLM),
}
ENCODERS: dict[str, tuple[Any, Any]] = {
    "post-norm": (partial(tf.BertConfig, **BERT), tf.BertModel),
    "shared layers": (partial(tf.AlbertConfig, **BERT, embedding_size=16), tf.AlbertModel),
    "vectors of distances": (partial(tf.DebertaV2Config, **DEBERTA), tf.DebertaV2Model),
    "a bias by distance": (partial(tf.MPNetConfig, **BERT), tf.MPNetModel),
}
SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
BLOCK = 4


def checkpoint_folder(kinds: dict[str, tuple[Any, Any]], name: str, folder: Path) -> Path:
    config, kind = kinds[name]
    tokenizer = checkpoints.byte_level_bpe() if kinds is GENERATORS else checkpoints.word_piece()
    torch.manual_seed(7)
    model = kind(config(vocab_size=len(tokenizer) + 1, pad_token_id=tokenizer.pad_token_id))  # an odd vocabulary size
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return checkpoints.save(model, tokenizer, folder)


class Pair:
    """This process as rank 0 and a child process as rank 1."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        settings = Settings(tensor_parallel=2, hang_seconds=20)
        self.place = choose_placement(settings)
        self.ranks = RankProcesses(settings, self.place, self.lost.append)

    def shared(self, source: Path, blocks: int = 0) -> tuple[Checkpoint, LeaderExecutor]:
        need = MemoryNeed("chat", 0, 0, 0, 0, blocks, BLOCK)
        part = self.ranks.new_model(str(source), ANY_SOURCE, need, self.place, in_place=False)
        loaded = part.read(checkpoint.describe_source(str(source)), checkpoint.ignore_progress)
        return loaded, part.build_executor(loaded)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    both.ranks.close()


def unshared(source: Path, blocks: int = 0) -> tuple[Checkpoint, TorchExecutor]:
    loaded = checkpoint.load(str(source))
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    return loaded, TorchExecutor(loaded.network, head, block_count=blocks, block_size=BLOCK if blocks else 0)


def rows_of(first: int, last: int, *, cached: bool = True) -> StepInput:
    """The tokens at positions `first` to `last` of all sequences that are long enough."""
    pieces = [(number, tokens[first:last]) for number, tokens in enumerate(SEQUENCES) if len(tokens) > first]
    tokens = [token for _, piece in pieces for token in piece]
    positions = [first + place for _, piece in pieces for place in range(len(piece))]
    starts = [0, *accumulate(len(piece) for _, piece in pieces)]
    tables = [[3 * number + n for n in range(-(-(first + len(piece)) // BLOCK))] for number, piece in pieces]
    return StepInput(tokens, positions, starts, tables if cached else [[] for _ in pieces], list(range(len(tokens))))


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Asserts equality up to the rounding of sums in another order."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-5 * max(float(theirs.abs().max()), 1.0)


def greedy_answers(executor: Executor) -> tuple[list[list[int]], int, int]:
    """Greedy answers to five requests with a common prefix, the number of preemptions and of cached tokens."""
    worker = GeneratorWorker(executor, model="chat", token_budget=24, sequence_budget=4, prefill_chunk=8)
    common = list(range(100, 112))
    first = ask(worker, generate(common, 1))
    reports = finish(worker)
    tickets = [*first, *ask(worker, *(generate([*common, *[n + 3] * (n + 1)], 9) for n in range(4)))]
    reports += finish(worker)
    found = sum(report.cached_tokens for report in reports)
    return [ticket.tokens for ticket in tickets], sum(report.preemptions for report in reports), found


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_equals_one_process(name: str, pair: Pair, tmp_path: Path) -> None:
    """For chunks over the cache."""
    folder = checkpoint_folder(GENERATORS, name, tmp_path)
    loaded, together = pair.shared(folder, blocks=12)
    full, one = unshared(folder, blocks=12)
    for chunk in (rows_of(0, 3), rows_of(3, 8), rows_of(8, 9)):
        assert_near(together.step(chunk), one.step(chunk))
    assert loaded.weight_bytes < 0.7 * full.weight_bytes
    assert loaded.network.config.kv_heads == -(-full.config.kv_heads // 2)


@pytest.mark.parametrize("name", ["fused and transposed", "three key heads"])
def test_greedy_answers_equal_one_process(name: str, pair: Pair, tmp_path: Path) -> None:
    """With prompts in chunks, a common prefix, and a cache that is too small for all."""
    folder = checkpoint_folder(GENERATORS, name, tmp_path)
    (_, together), (_, one) = pair.shared(folder, blocks=13), unshared(folder, blocks=13)
    answers, preempted, found = greedy_answers(together)
    assert (answers, preempted, found) == greedy_answers(one)
    assert preempted
    assert found
    assert len({tuple(each) for each in answers}) > 3


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_equals_one_process(name: str, pair: Pair, tmp_path: Path) -> None:
    folder = checkpoint_folder(ENCODERS, name, tmp_path)
    (_, together), (_, one) = pair.shared(folder), unshared(folder)
    texts = rows_of(0, 9, cached=False)
    assert_near(together.step(texts), one.step(texts))


def test_blocks_that_are_not_finite_are_reported_by_any_process(
    pair: Pair, tiny_generator: Path, tmp_path: Path
) -> None:
    """Only the other process computes it: the last key head of the last layer overflows."""

    def corrupt(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.1.self_attn.k_proj.weight"][-8:] = 3e38

    folder = with_tensors(tiny_generator, tmp_path / "spoilt", corrupt)
    (loaded, together), (_, one) = pair.shared(folder, blocks=12), unshared(folder, blocks=12)
    for executor in (together, one):
        executor.step(rows_of(0, 3))
    assert loaded.network.blocks[1].attention.key.weight.abs().max() < 10  # not in the share of this process
    assert together.nonfinite_blocks == one.nonfinite_blocks != set()


def test_steps_of_any_size_are_sent(pair: Pair, tiny_generator: Path) -> None:
    tokens = [n % 300 for n in range(250)] * 3
    rows = StepInput(
        tokens, [*range(250)] * 3, [0, 250, 500, 750], [[*range(n, n + 63)] for n in (0, 63, 126)], [0, 749]
    )
    assert len(encode_step(rows)) > 1024
    assert decode_step(encode_step(rows)) == rows
    (_, together), (_, one) = pair.shared(tiny_generator, blocks=189), unshared(tiny_generator, blocks=189)
    assert_near(together.step(rows), one.step(rows))
    for executor in (together, one):
        executor.copy([(0, 5), (5, 7)])
    again = StepInput([9], [4], [0, 1], [[7, 8]], [0])
    assert_near(together.step(again), one.step(again))


def test_a_model_that_one_process_cannot_read_is_refused(pair: Pair, tiny_generator: Path, tmp_path: Path) -> None:
    """Other models are still served."""
    folder = edited(tiny_generator, tmp_path)
    need = MemoryNeed("chat", 0, 0, 0, 0, 4, BLOCK)
    part = pair.ranks.new_model(str(folder / "nowhere"), ANY_SOURCE, need, pair.place, in_place=False)
    loaded = part.read(checkpoint.describe_source(str(folder)), checkpoint.ignore_progress)
    with pytest.raises(ModelError, match="another process could not read its share of it; the log says why"):
        part.build_executor(loaded)
    part.drop()
    _, together = pair.shared(tiny_generator, blocks=12)
    assert together.step(rows_of(0, 3)).isfinite().all()


def test_a_step_ends_if_the_other_process_is_killed(pair: Pair, tiny_generator: Path) -> None:
    """The last test of this pair: it kills the other process."""
    _, together = pair.shared(tiny_generator, blocks=12)
    [child] = pair.ranks.children
    child.kill()
    with pytest.raises(RuntimeError):
        together.step(rows_of(0, 3))
    assert pair.lost[0] == "rank 1 of those that compute together was ended by signal 9"
    assert not Path(pair.ranks.rank_config.at.removeprefix("file://")).parent.exists()


def test_an_error_within_a_step_ends_the_other_processes() -> None:
    """Whatever the error was, the other processes are out of step after it."""

    class FailingExecutor:
        block_size = block_count = state_count = 4
        window_blocks = window = 0
        group = SimpleNamespace(broadcast_message=lambda words: sent.append(words[:2]))

        def check(self, rows: StepInput) -> None:
            if rows.tokens[0] < 0:
                raise StepInputError("tokens")

        def step(self, rows: StepInput) -> torch.Tensor:
            raise MemoryError

        def copy(self, blocks: object) -> None:
            raise MemoryError

    sent: list[list[int]] = []
    lost: list[int] = []
    leader = LeaderExecutor(FailingExecutor(), 3, lambda: lost.append(len(sent)))  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        leader.step(rows_of(0, 3))
    with pytest.raises(MemoryError):
        leader.copy([(0, 1)])
    leader.copy([])
    with pytest.raises(StepInputError):  # before the step is sent
        leader.step(replace(rows_of(0, 3), tokens=[-1, 0, 0]))
    assert (sent, lost) == ([[StepCommand.STEP, 3], [StepCommand.COPY, 3]], [1, 2])


# ---- shares, in one process


def test_shares_cover_everything_and_the_first_is_never_smaller() -> None:
    for count in range(1, 40):
        for world in range(1, min(count, 9) + 1):
            ranges = [Share(rank, world).range_of(count) for rank in range(world)]
            assert [n for each in ranges for n in each] == list(range(count))
            assert len(ranges[0]) == max(map(len, ranges)) <= min(map(len, ranges)) + 1


def test_key_heads_are_split_or_replicated(tiny_generator: Path) -> None:
    config = replace(checkpoint.describe_source(str(tiny_generator)).config, heads=12, kv_heads=3)
    heads = {world: [Share(rank, world).heads(config) for rank in range(world)] for world in (2, 3, 6)}
    assert heads[2] == [(range(8), range(2)), (range(8, 12), range(2, 3))]
    assert heads[3] == [(range(4 * n, 4 * n + 4), range(n, n + 1)) for n in range(3)]
    assert heads[6] == [(range(2 * n, 2 * n + 2), range(n // 2, n // 2 + 1)) for n in range(6)]
    assert split_problem(config, 5) == (
        "its 12 query heads over 3 key heads cannot be shared out among 5; right for tensor_parallel would be 1, 2, 3, "
        "6, 9, 12"
    )
    with pytest.raises(UnsupportedError, match="among 5"):
        share_config(config, Share(0, 5))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks_are_refused(name: str) -> None:
    """Their states are not split: each process would need the whole network."""
    config = replace(RECURRENT[name], experts=None)
    assert split_problem(config, 1) == ""
    with pytest.raises(UnsupportedError, match="it has recurrent layers, which are not split"):
        share_config(config, Share(0, 2))


@pytest.mark.parametrize("name", ["fused and transposed", "one key head"])
def test_each_process_reads_only_its_share(name: str, tmp_path: Path) -> None:
    """Of matrices that are split by outputs, half the bytes are read; of the others, a few rows at a time."""
    folder = str(checkpoint_folder(GENERATORS, name, tmp_path))
    what = checkpoint.describe_source(folder)
    network, head = description.build_on_meta(what)
    cuts = cut_parameters(network, head, Share(1, 2))
    assert len(cuts) > 12
    read: list[tuple[int, ...]] = []

    class Recorder(EntryReader):
        def __call__(self, entry: tensors.TensorEntry) -> torch.Tensor:
            read.append(entry.shape)
            return super().__call__(entry)

    for entry_name, entry in what.entries.items():
        read.clear()
        full = what.translate(entry_name, entry.read(torch.float32, torch.device("cpu")))
        pieces = read_cut_pieces(what, entry_name, entry, cuts, Recorder(torch.float32, torch.device("cpu")))
        for (ours, piece), (same, matrix) in zip(pieces, full, strict=True):
            assert ours == same
            assert torch.equal(piece, cuts[ours](matrix) if ours in cuts else matrix)
        rows = [ours for ours, _ in pieces if ours in cuts and cuts[ours].dim == 0]
        if len(pieces) == len(rows) == 1 and len(full[0][1].shape) > 0 and entry.shape == tuple(full[0][1].shape):
            assert read == [tuple(pieces[0][1].shape)]
        assert (locate_pieces(what, entry_name, entry, cuts) is None) == (not any(ours in cuts for ours, _ in full))


def test_rows_that_are_reordered_are_cut_after_they_are_read(tmp_path: Path) -> None:
    """GLM's files have the features of a pair side by side: a range of the file's rows is not one of the network's."""
    what = checkpoint.describe_source(str(save_checkpoint(DECODERS["glm"], tmp_path)))
    network, head = description.build_on_meta(what)
    cuts = cut_parameters(network, head, Share(1, 2))
    entries = {name: entry for name, entry in what.entries.items() if ".q_proj." in name or ".k_proj." in name}
    assert entries
    for name, entry in entries.items():
        whole = entry.read(torch.float32, torch.device("cpu"))
        pieces = read_cut_pieces(what, name, entry, cuts, EntryReader(torch.float32, torch.device("cpu")))
        for (ours, piece), (_, full) in zip(pieces, what.translate(name, whole), strict=True):
            assert torch.equal(piece, cuts[ours](full))


def test_alibi_slopes_are_split_with_their_heads() -> None:
    config = ModelConfig(
        vocab_size=50, width=16, depth=1, heads=4, kv_heads=4, head_width=4, mlp_width=8, max_positions=9, causal=True,
        position="alibi",
    )  # fmt: skip
    rates = []
    for rank in (0, 1):
        network = Transformer(config)
        full = network.distances.rates
        cut_parameters(network, torch.nn.Identity(), Share(rank, 2))
        rates.append(network.distances.rates)
    assert torch.equal(torch.cat(rates), full)


def test_the_memory_plan_is_for_one_share(tiny_generator: Path) -> None:
    what = checkpoint.describe_source(str(tiny_generator))
    full, share = measure_model("chat", what), measure_model("chat", what, world=2)
    assert 0.4 < share.checkpoint_size.parameters / full.checkpoint_size.parameters < 0.6
    assert (share.config.heads, share.config.kv_heads, share.config.mlp_width) == (2, 1, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executor": "native"}, "executor: native is asked for and .* tensor_parallel is 2"),
        ({"precision": "int8"}, "precision: int8 is asked for and .* tensor_parallel is 2"),
        ({"precision": "int4"}, "precision: int4 is asked for and .* tensor_parallel is 2"),
        ({"deterministic": True}, "deterministic: .* tensor_parallel must be 1"),
    ],
)
def test_settings_without_tensor_parallelism_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        choose_placement(Settings(tensor_parallel=2, **changes))


def test_unmerged_adapters_are_refused() -> None:
    check_adapter_allowed("chat:tone", Settings())
    with pytest.raises(UnsupportedError, match=r"chat takes no adapter, since 2 processes .*: tone=BASE\+ADAPTER"):
        check_adapter_allowed("chat:tone", Settings(tensor_parallel=2))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "translator"
    translators.translator(folder, "marian")
    with pytest.raises(UnsupportedError, match="serve it with tensor_parallel 1"):
        measure_model("translator", checkpoint.describe_source(str(folder)), world=2)


# ---- a server


def complete(server: Process, **fields: Any) -> httpx.Response:
    body = {"prompt": "The fox", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "model": "chat"} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)


def followers(server: Process) -> list[int]:
    tasks = Path(f"/proc/{server.child.pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]


@pytest.fixture
def served(tiny_generator: Path, tiny_classifier: Path) -> Iterator[Process]:
    models = f"chat={tiny_generator}", f"judge={tiny_classifier}"
    server = Process(*models, "--tensor-parallel", "2", "--cache-tokens", "512", "--threads", "1")
    server.ready()
    yield server
    server.child.kill()
    server.child.wait()


def test_a_server_of_two_processes_answers_and_ends_as_one(served: Process, exact: Process) -> None:
    expected = complete(exact).json()["choices"][0]["text"]
    assert complete(served).json()["choices"][0]["text"] == expected
    ours, theirs = (
        httpx.post(f"{server.url}/models/judge/predict", json={"inputs": "a good film"}, timeout=PATIENCE).json()
        for server in (served, exact)
    )
    assert [label["label"] for label in ours] == [label["label"] for label in theirs]
    assert [label["score"] for label in ours] == pytest.approx([label["score"] for label in theirs], abs=1e-5)
    [follower] = followers(served)
    served.child.kill()  # without a shutdown message
    served.child.wait()
    while Path(f"/proc/{follower}/stat").exists() and " Z " not in Path(f"/proc/{follower}/stat").read_text():
        time.sleep(0.01)  # bounded by the timeout of the test


def test_a_lost_process_ends_every_request_with_one_error(served: Process) -> None:
    [follower] = followers(served)
    message = "rank 1 of those that compute together was ended by signal 9: the server must be restarted"
    body = {"model": "chat", "prompt": "The fox", "max_tokens": 240, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        os.kill(follower, signal.SIGKILL)
        rest = list(lines)
    errors = [line for line in rest if '"error"' in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert served.get("/livez").status_code == 503
    late = complete(served)
    assert (late.status_code, message in late.text) == (503, True)
