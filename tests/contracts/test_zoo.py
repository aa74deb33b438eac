"""Low precision compared with float32 on networks with the outliers of real ones; see tests/support/zoo.py.

Each test runs one network, most on all instruction sets of this machine. It compares what users notice: the change of
the distribution of the next token, or of the states of an encoder."""

import random
from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate, cycle, pairwise
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.default_precision import kind_precision
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.ragged import RaggedBatch
from tests.models.native.test_step import pieces, rows_of
from tests.support import zoo
from tests.support.zoo import ENCODERS, GENERATORS, LENGTHS, RECIPES, Grown, grown

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="no compiler was there when polyhead was installed")

SETS = runnable_targets()
BLOCKS = 16


def native(of: Grown, precision: Precision, instructions: str, threads: int = 1) -> NativeExecutor:
    count = BLOCKS if of.head else 0
    return NativeExecutor(
        of.network, of.head, precision=precision, block_count=count, threads=threads, instructions=instructions
    )


def tables(choice: random.Random) -> list[list[int]]:
    """Blocks of the cache for each text, in random order."""
    free = choice.sample(range(BLOCKS), BLOCKS)
    return [[free.pop() for _ in range(-(-length // 16))] for length in LENGTHS]


def all_rows(of: Grown) -> StepInput:
    """Every token of all texts, in one step."""
    asked = zip(zoo.texts(of.network.config), tables(random.Random(1)), strict=True)
    return rows_of([(tokens, 0, table if of.head else []) for tokens, table in asked], last_only=False)


def answers(of: Grown, executor: Executor) -> Tensor:
    """[T, V] log-probabilities, or [T, W] states."""
    out = executor.step(all_rows(of)).clone()
    return out.log_softmax(-1) if of.head else out


def divergences(of: Grown, expected: Tensor, found: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats of the distributions behind all but first tokens; of an encoder 1 -
    mean cosine of the states, each feature scaled to mean 0 and variance 1, so that a few large features do not
    dominate."""
    later = [row for row in range(len(expected)) if row not in zoo.first_rows()]
    a, b = expected[later], found[later]
    if of.head:
        return float((a.exp() * (a - b)).sum(-1).mean())
    mean, spread = a.mean(0), a.std(0)
    return 1 - float(torch.cosine_similarity((a - mean) / spread, (b - mean) / spread).mean())


def divergence_of(of: Grown, precision: Precision, sets: Sequence[str]) -> dict[str, float]:
    """Divergence of `precision` from float32, by instruction set."""
    expected = answers(of, native(of, "float32", SETS[0]))  # torch is as near, see test_float32_equals_torch
    return {name: divergences(of, expected, answers(of, native(of, precision, name))) for name in sets}


def excess(of: Grown, precision: Precision, bound: float, sets: Sequence[str] = SETS) -> dict[str, float]:
    """Instruction sets whose divergence is not below the bound; NaN is included."""
    return {name: value for name, value in divergence_of(of, precision, sets).items() if not value < bound}


@pytest.mark.parametrize("name", RECIPES)
def test_float32_equals_torch(name: str) -> None:
    of = grown(name)
    size = {"block_count": BLOCKS, "block_size": 16} if of.head else {}
    expected = answers(of, TorchExecutor(of.network, of.head, **size))
    for instructions in SETS:
        found = answers(of, native(of, "float32", instructions))
        if of.head:
            torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=1e-4)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_int8_is_near_float32(name: str) -> None:
    assert not excess(grown(name), "int8", RECIPES[name].bound)


@pytest.mark.parametrize("name", RECIPES)
def test_int4_is_near_float32_of_the_same_weights(name: str) -> None:
    of = deepcopy(grown(name))
    zoo.round_to_four_bits(of)
    assert not excess(of, "int4", RECIPES[name].bound)


FILES = [(name, kind) for name in RECIPES for kind in zoo.kinds_of(name)]


@pytest.mark.parametrize(
    ("name", "kind", "instructions"),
    [(*file, instructions) for file, instructions in zip(FILES, cycle(SETS), strict=False)],
)
def test_answers_of_a_file_are_near_float32_of_the_same_file(
    name: str, kind: str, instructions: str, tmp_path: Path
) -> None:
    """In the precision that suits the file, compared with float32 of the same file. The instruction sets take turns:
    the tests above compute each precision with all of them."""
    checkpoint = load(str(zoo.gguf_file(tmp_path / "network.gguf", name, kind)))
    of = Grown(checkpoint.network, checkpoint.head if RECIPES[name].config.causal else None)
    recipe = RECIPES[name]
    assert not excess(of, kind_precision(kind), recipe.bounds.get(kind, recipe.bound), [instructions])


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].files])
def test_an_unrounded_file_gives_the_same_network(name: str, tmp_path: Path) -> None:
    """Without rounding: what the other files lose is precision."""
    checkpoint = load(str(zoo.gguf_file(tmp_path / "network.gguf", name, "F32")))
    of = Grown(checkpoint.network, checkpoint.head if RECIPES[name].config.causal else None)
    expected, found = (answers(one, native(one, "float32", SETS[0])) for one in (grown(name), of))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", GENERATORS)
def test_batches_chunks_and_the_cache_change_no_bit(name: str, precision: Precision) -> None:
    """To the bit: all texts in one step, each alone, and in chunks over the cache beside chunks of others."""
    of = deepcopy(grown(name)) if precision == "int4" else grown(name)
    if precision == "int4":
        zoo.round_to_four_bits(of)
    asked, starts = zoo.texts(of.network.config), list(accumulate(LENGTHS, initial=0))
    for instructions in SETS:
        executor = native(of, precision, instructions, threads=2)
        together = executor.step(all_rows(of)).clone()
        expected = [together[a:b] for a, b in pairwise(starts)]
        choice = random.Random(4)
        places = tables(choice)
        for tokens, table, rows in zip(asked, places, expected, strict=True):
            alone = executor.step(rows_of([(tokens, 0, table)], last_only=False))
            assert torch.equal(alone, rows), f"alone, {len(tokens)} tokens, {instructions}"
        cuts = [list(pieces(choice, length)) for length in LENGTHS]
        done = [0] * len(LENGTHS)
        while any(cuts):
            members = [n for n in range(len(LENGTHS)) if cuts[n]]
            ends = [done[n] + cuts[n].pop(0) for n in members]
            step = rows_of(
                [
                    (asked[n][done[n] : end], done[n], places[n][: -(-end // 16)])
                    for n, end in zip(members, ends, strict=True)
                ],
                last_only=False,
            )
            out = executor.step(step)
            for n, end, start in zip(members, ends, step.starts, strict=False):
                piece = expected[n][done[n] : end]
                assert torch.equal(out[start : start + len(piece)], piece), f"chunks, text {n}, {instructions}"
                done[n] = end


@pytest.mark.parametrize("name", ENCODERS)
def test_the_batch_changes_no_states(name: str) -> None:
    of = grown(name)
    starts = list(accumulate(LENGTHS, initial=0))
    for instructions in SETS:
        together = native(of, "int8", instructions, threads=2).step(all_rows(of)).clone()
        single = native(of, "int8", instructions)
        for n, tokens in enumerate(zoo.texts(of.network.config)):
            alone = single.step(rows_of([(tokens, 0, [])], last_only=False))
            assert torch.equal(alone, together[starts[n] : starts[n + 1]])


@pytest.mark.parametrize("name", GENERATORS)
@torch.no_grad()
def test_the_next_token_depends_on_the_context(name: str) -> None:
    """Otherwise a divergence of 0 would mean nothing: the distributions have a peak, and the words before change
    them."""
    of = grown(name)
    assert of.head
    text = zoo.texts(of.network.config)[-1]
    other = [*text[:1], *zoo.texts(of.network.config)[-2][1:17], *text[17:]]
    a, b = (of.head(of.network(RaggedBatch.of([tokens]))).log_softmax(-1)[40:] for tokens in (text, other))
    entropy = float(-(a.exp() * a).sum(-1).mean())
    assert 1 < entropy < 4.5
    assert float((a.exp() * (a - b)).sum(-1).mean()) > 0.1


@pytest.mark.parametrize("name", ["massive first token", "attention sinks"])
def test_sinks_have_nearly_all_weight(name: str) -> None:
    net = grown(name).network
    shares = zoo.weights_of_first(net, net.config.depth - 1)[3:].mean(0)  # [H]
    assert float(shares[:2].min()) > 0.95
    assert float(shares[2:].max()) < 0.3


def test_outliers_have_the_size_of_the_recipe() -> None:
    def largest(name: str, part: str) -> float:
        net = grown(name).network
        return float(zoo.inputs_of(net, net.get_submodule(part)).abs().max())

    def largest_key(name: str) -> float:
        net = grown(name).network
        key = net.get_submodule("blocks.1.attention.key")
        return float(key(zoo.inputs_of(net, key)).detach().abs().max())

    assert largest_key("key biases") > 190
    assert largest_key("key biases everywhere") > 190
    assert largest("massive first token", "blocks.2") > 300
    assert largest("large neurons", "blocks.1.mlp.down") > 200
    assert largest("bert", "blocks.1") > 8
    weights = grown("tiny weights").network.get_submodule("blocks.0.mlp.up").weight
    assert float(weights.detach().abs().max()) < 1e-5  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "most"), [("Q6_K", 0.025), ("Q4_K", 0.09)])
def test_blocks_of_256_hold_the_weights(kind: str, most: float) -> None:
    """Formats that the gguf package cannot write are made here."""
    weights = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)).numpy()
    found = dequantize(zoo.K_QUANTIZERS[kind](weights), GGMLQuantizationType[kind])
    assert float(((found - weights) ** 2).mean() ** 0.5) < most
