"""The compiled step equals the torch executor and itself in other batches, on every instruction set of this machine."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from polyhead.models.checkpoint.description import invalid_fields
from polyhead.models.executors.contract import Executor, StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import load_library, runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import PackedNetwork, Precision
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ExpertConfig, LayerShape, ModelConfig, RopeScaling
from polyhead.models.network.transformer import Transformer
from tests.support.spread import spread

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")

SETS = runnable_targets()
LLAMA = ModelConfig(
    vocab_size=77,
    width=48,
    depth=3,
    heads=6,
    kv_heads=2,
    head_width=16,
    mlp_width=100,
    max_positions=1024,
    causal=True,
    position="rotary",
    norm="rms",
    activation="silu",
    gated_mlp=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
BERT = ModelConfig(
    vocab_size=90,
    width=64,
    depth=2,
    heads=4,
    kv_heads=4,
    head_width=16,
    mlp_width=128,
    max_positions=600,
    causal=False,
    norm_order="post",
    embedding_norm=True,
    segments=2,
)
GENERATORS = {
    "llama": LLAMA,
    "one key head": replace(LLAMA, kv_heads=1, heads=14, head_width=32, width=96),
    "layers of several sizes": replace(
        LLAMA,
        depth=3,
        heads=4,
        kv_heads=2,
        head_width=64,
        mlp_width=100,
        layer_shapes=(
            LayerShape(kv_heads=2, head_width=16, mlp_width=50),
            LayerShape(kv_heads=1, head_width=64, mlp_width=50),
            LayerShape(kv_heads=2, head_width=16, mlp_width=100),
        ),
        key_layers=(0, 1, 0),
        tied_values=(False, True, False),
        value_norm=True,
        query_key_norm="shared",
        window=20,
        windowed=(True, False, True),
        window_rope_base=500.0,
        rope_scaling=RopeScaling(kind="share", factor=1.0, share=0.25),
        norm_order="sandwich",
        layer_embedding=24,
        layer_scale=True,
    ),
    "wide heads": replace(LLAMA, head_width=80, heads=2, kv_heads=1),
    "widest heads": replace(LLAMA, head_width=256, heads=2, kv_heads=2),
    "qwen": replace(LLAMA, qkv_bias=True, query_key_norm="shared", head_width=64),
    "gpt2": replace(
        LLAMA,
        position="learned",
        position_offset=2,
        norm="layer",
        activation="gelu_tanh",
        gated_mlp=False,
        kv_heads=6,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
    "norms behind": replace(BERT, causal=True, segments=0, embedding_norm=False, activation="gelu_tanh"),
    "gemma": replace(
        LLAMA,
        norm_order="sandwich",
        activation="gelu_tanh",
        window=20,
        windowed=(True, False, True),
        window_rope_base=1000.0,
        query_key_norm="shared",
        embedding_scale=6.9,
        score_scale=0.3,
    ),
    "partly rotated": replace(
        LLAMA,
        rotary_width=6,
        rotated=(True, False, True),
        rope_scaling=RopeScaling(kind="linear", factor=2.0, magnitude=1.3),
        activation="relu_squared",
    ),
    "the first layer not rotated": replace(
        LLAMA,
        rotated=(False, True, True),
        rope_scaling=RopeScaling(kind="linear", factor=2.0, magnitude=1.3),
        window=20,
        windowed=(True, False, True),
        window_rope_base=1000.0,
        activation="gelu_sigmoid",
    ),
    "norms of parts' outputs": replace(LLAMA, norm_order="inner", query_key_norm="joint", residual_scale=0.7),
    "parallel parts": replace(
        LLAMA,
        norm="layer",
        norm_bias=False,
        norm_order="parallel",
        query_key_norm="per_head",
        activation="gelu_sigmoid",
        gated_mlp=False,
        residual_scale=1.4,
        logit_scale=0.3,
        logit_bias=True,
    ),
    "capped": replace(
        LLAMA,
        norm_order="sandwich",
        residual_scale=0.6,
        score_cap=0.8,
        logit_cap=1.5,
        logit_scale=2.0,
        window=20,
        windowed=(True, False, True),
    ),
    "gated values": replace(LLAMA, attention_gate=True, query_key_norm="shared", rotary_width=6, head_width=10),
    "sinks": replace(LLAMA, sinks=True, window=20, windowed=(True, False, True), mlp_bias=True, residual_scale=0.8),
    "alibi": replace(
        LLAMA,
        position="alibi",
        norm="layer",
        norm_weight=False,
        norm_bias=False,
        score_cap=2.0,
        window=300,
        windowed=(True, False, False),
        embedding_norm=True,
    ),
    "sines": replace(
        LLAMA,
        position="sinusoidal",
        norm="layer",
        query_key_norm="shared",
        query_key_norm_bias=True,
        embedding_width=20,
        activation="relu",
        gated_mlp=False,
    ),
}
ENCODERS = {
    "bert": BERT,
    "causal": LLAMA,
    "gated, no biases": replace(
        BERT, gated_mlp=True, norm_bias=False, qkv_bias=False, output_bias=False, mlp_bias=False
    ),
    "windowed": replace(BERT, norm_order="pre", window=9, windowed=(False, True), position="rotary", segments=0),
    "no opening norm, no biases of norms": replace(
        BERT,
        norm_order="pre",
        opening_norm=False,
        norm_bias=False,
        position="rotary",
        segments=0,
        window=9,
        windowed=(False, True),
        window_rope_base=1000.0,
        gated_mlp=True,
    ),
    "relu": replace(
        BERT, activation="relu", heads=2, kv_heads=2, head_width=32, embedding_norm=False, residual_scale=0.8
    ),
    "albert": replace(BERT, embedding_width=40, shared=True, depth=3, activation="gelu_tanh"),
    "alibi": replace(
        BERT, position="alibi", window=100, windowed=(False, True), gated_mlp=True, query_key_norm="joint", sinks=True
    ),
    "sines before cosines, parallel parts": replace(
        BERT, position="sines-cosines", norm_order="parallel", score_cap=1.5, norm_weight=False, norm_bias=False
    ),
    "norms of parts' outputs": replace(BERT, norm_order="inner", query_key_norm="per_head", query_key_norm_bias=True),
    "the first token global": replace(BERT, window=9, global_tokens="first"),
    "a question global": replace(BERT, window=30, global_tokens="before_separator", separator=77, kv_heads=2),
    "an answer global": replace(
        BERT, window=30, windowed=(True, False), global_tokens="after_separator", separator=77, norm_order="pre"
    ),
}
MIXTURES = {
    "mixtral, experts": replace(LLAMA, experts=ExpertConfig(count=4, chosen=2, width=100)),
    "qwen, experts": replace(
        LLAMA,
        mlp_width=70,
        query_key_norm="shared",
        experts=ExpertConfig(
            count=6, chosen=3, width=24, layers=(True, False, True), normalised=False, shared_width=40, shared_gate=True
        ),
    ),
    "deepseek, experts": replace(
        LLAMA,
        experts=ExpertConfig(
            count=16,
            chosen=4,
            width=37,
            layers=(False, True, True),
            scoring="sigmoid",
            normalised_eps=1e-20,
            scale=2.5,
            groups=4,
            chosen_groups=2,
            choice_bias=True,
            shared_width=70,
        ),
    ),
    "groups without a bias": replace(
        LLAMA, norm_order="sandwich", experts=ExpertConfig(count=6, chosen=2, width=33, groups=3, chosen_groups=2)
    ),
    "gpt-oss, experts": replace(
        LLAMA,
        sinks=True,
        qkv_bias=True,
        experts=ExpertConfig(count=5, chosen=2, width=48, router_bias=True, bias=True, clamp=0.7),
    ),
    "all experts chosen, parallel parts": replace(
        LLAMA,
        norm_order="parallel",
        gated_mlp=False,
        mlp_bias=True,
        residual_scale=0.7,
        experts=ExpertConfig(count=3, chosen=3, width=20, shared_width=9, router_bias=True, shared_gate=True),
    ),
    "gemma, experts": replace(
        LLAMA,
        norm_order="sandwich",
        activation="gelu_tanh",
        layer_scale=True,
        layer_embedding=24,
        experts=ExpertConfig(
            count=6, chosen=2, width=33, shared_width=40, layers=(True, False, True), own_norms=True, output_scales=True
        ),
    ),
    "one expert of many": replace(
        LLAMA, norm_order="inner", gated_mlp=False, experts=ExpertConfig(count=40, chosen=1, width=70, clamp=0.5)
    ),
}
GENERATORS |= MIXTURES
ENCODERS["experts, norms behind"] = replace(
    BERT, gated_mlp=True, experts=ExpertConfig(count=4, chosen=2, width=64, layers=(False, True))
)
BLOCKS = 160
LENGTHS = (1, 5, 16, 17, 40, 65, 530)  # the last one spans three parts of attention


def network(config: ModelConfig) -> Transformer:
    torch.manual_seed(5)
    transformer = Transformer(config)
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.15)
    for name, parameter in transformer.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.normal_(parameter, 1.0, 0.1)
    return transformer


def head(config: ModelConfig) -> LanguageHead:
    torch.manual_seed(6)
    return LanguageHead(config)


def texts(config: ModelConfig, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    choice = random.Random(3)
    return [[choice.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def rows_of(
    parts: list[tuple[list[int], int, list[int]]], last_only: bool = True, states: list[StateUse] | None = None
) -> StepInput:
    """Each part: tokens, the position of the first, and the blocks of the whole sequence."""
    starts = list(accumulate((len(tokens) for tokens, _, _ in parts), initial=0))
    return StepInput(
        tokens=[token for tokens, _, _ in parts for token in tokens],
        positions=[first + i for tokens, first, _ in parts for i in range(len(tokens))],
        starts=starts,
        block_tables=[table for _, _, table in parts],
        output_rows=[end - 1 for end in starts[1:]] if last_only else list(range(starts[-1])),
        states=states,
    )


def tables(lengths: tuple[int, ...], choice: random.Random) -> list[list[int]]:
    free = list(range(BLOCKS))
    choice.shuffle(free)
    return [[free.pop() for _ in range(-(-length // 16))] for length in lengths]


def all_logits(config: ModelConfig, executor: Executor) -> Tensor:
    """The logits [T, V] of every token of all texts, computed in one step."""
    parts = list(zip(texts(config), [0] * len(LENGTHS), tables(LENGTHS, random.Random(1)), strict=True))
    return executor.step(rows_of(parts, last_only=False)).clone()


@pytest.mark.parametrize(("instructions", "name"), spread(SETS, GENERATORS))
def test_a_generator_equals_torch_in_float32(name: str, instructions: str) -> None:
    config = GENERATORS[name]
    net, last = network(config), head(config)
    expected = all_logits(config, TorchExecutor(net, last, block_count=BLOCKS, block_size=16))
    executor = NativeExecutor(net, last, precision="float32", block_count=BLOCKS, threads=2, instructions=instructions)
    torch.testing.assert_close(all_logits(config, executor), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("words", [3, 77, 300])
def test_argmax_is_the_first_of_equal_logits(words: int, instructions: str) -> None:
    config = replace(LLAMA, vocab_size=words)
    last = head(config)
    with torch.no_grad():
        last.output.weight[words // 2 :] = last.output.weight[
            : words - words // 2
        ].clone()  # the most likely token occurs twice
    executor = NativeExecutor(network(config), last, block_count=BLOCKS, threads=2, instructions=instructions)
    logits = all_logits(config, executor)
    assert executor.argmax == [int((row == row.max()).nonzero()[0]) for row in logits]
    executor.step(StepInput([1], [0], [0, 1], [[3]], []))
    assert executor.argmax == []


@pytest.mark.parametrize(("instructions", "name"), spread(SETS, ENCODERS))
def test_an_encoder_equals_torch_in_float32(name: str, instructions: str) -> None:
    config = ENCODERS[name]
    net, sequences = network(config), texts(config)
    rows = rows_of([(tokens, 0, []) for tokens in sequences], last_only=False)
    if config.segments:
        rows = replace(rows, segments=[i % 2 for i in range(len(rows.tokens))])
    for wanted in (rows.output_rows, rows.output_rows[::7]):
        some = replace(rows, output_rows=wanted)
        executor = NativeExecutor(net, precision="float32", threads=2, instructions=instructions)
        torch.testing.assert_close(executor.step(some), TorchExecutor(net).step(some), rtol=2e-4, atol=2e-4)


ODD_ENCODERS = {
    "the widest window": replace(ENCODERS["windowed"], window=2**31 - 1),
    "a window of one": replace(ENCODERS["windowed"], window=1),
    "post-norm, no opening norm": replace(BERT, opening_norm=False),
}


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", ODD_ENCODERS)
def test_extreme_configurations_equal_torch(name: str, instructions: str) -> None:
    """Extreme configurations that `invalid_fields` permits."""
    config = ODD_ENCODERS[name]
    assert not [*invalid_fields(config)]
    net, rows = network(config), rows_of([(tokens, 0, []) for tokens in texts(config)], last_only=False)
    executor = NativeExecutor(net, precision="float32", threads=2, instructions=instructions)
    torch.testing.assert_close(executor.step(rows), TorchExecutor(net).step(rows), rtol=2e-4, atol=2e-4)


def pieces(choice: random.Random, length: int) -> Iterator[int]:
    """Cuts a text into chunks of random size."""
    while length:
        count = min(choice.choice([1, 1, 2, 3, 7, 16, 64, 200]), length)
        yield count
        length -= count


@pytest.mark.parametrize(("instructions", "name", "precision"), spread(SETS, GENERATORS, ["float32", "int8"]))
def test_batch_chunks_and_threads_change_nothing(name: str, instructions: str, precision: Precision) -> None:
    """To the bit: texts alone in one chunk equal texts in random chunks, batches and blocks.

    Two and three threads take turns: every network has both, and every precision."""
    config = GENERATORS[name]
    net, last = network(config), head(config)

    def make_executor(threads: int) -> NativeExecutor:
        return NativeExecutor(
            net, last, precision=precision, block_count=BLOCKS, threads=threads, instructions=instructions
        )

    alone = make_executor(1)
    expected = [
        alone.step(rows_of([(tokens, 0, table)], last_only=False)).clone()
        for tokens, table in zip(texts(config), tables(LENGTHS, random.Random(1)), strict=True)
    ]
    threads, sequences = 2 + ([*GENERATORS].index(name) + (precision == "int8")) % 2, texts(config)
    choice, executor = random.Random(threads), make_executor(threads)
    block_tables = tables(LENGTHS, choice)
    cuts = [list(pieces(choice, length)) for length in LENGTHS]
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    while any(cuts):
        members = [n for n in range(len(LENGTHS)) if cuts[n] and choice.random() < 0.8]
        parts = []
        for n in members:
            count = cuts[n].pop(0)
            used = -(-(done[n] + count) // 16)
            parts.append((sequences[n][done[n] : done[n] + count], done[n], block_tables[n][:used]))
            done[n] += count
        if parts:
            rows = rows_of(parts, last_only=False)
            logits = executor.step(rows).clone()
            for n, start, end in zip(members, rows.starts, rows.starts[1:], strict=False):
                found[n].append(logits[start:end])
    for n in range(len(LENGTHS)):
        assert torch.equal(torch.cat(found[n]), expected[n]), f"text {n} of {LENGTHS[n]} tokens"


@pytest.mark.parametrize(("instructions", "name", "precision"), spread(SETS, ENCODERS, ["float32", "int8"]))
def test_the_batch_changes_no_text(name: str, instructions: str, precision: Precision) -> None:
    config = ENCODERS[name]
    net, sequences = network(config), texts(config)
    executor = NativeExecutor(net, precision=precision, threads=2, instructions=instructions)
    together = executor.step(rows_of([(tokens, 0, []) for tokens in sequences], last_only=False)).clone()
    starts = list(accumulate(LENGTHS, initial=0))
    single = NativeExecutor(net, precision=precision, threads=1, instructions=instructions)
    for n, tokens in enumerate(sequences):
        alone = single.step(rows_of([(tokens, 0, [])], last_only=False))
        assert torch.equal(alone, together[starts[n] : starts[n + 1]])


PORTION_LENGTHS = (200, 3, 130, 1, 90, 100, 60, 128, 5, 40)  # four portions of two threads


@pytest.mark.parametrize(("instructions", "name", "generates"), spread(SETS, ["bert", "causal"], [False, True]))
def test_portions_of_a_batch_read_and_write_their_own_rows(instructions: str, name: str, generates: bool) -> None:
    """Segments, output rows and the likeliest tokens of texts behind those of the first portion, in turns too."""
    config, choice = ENCODERS[name], random.Random(4)
    net, last = network(config), head(config) if generates else None
    batch = [[choice.randrange(config.vocab_size) for _ in range(length)] for length in PORTION_LENGTHS]
    whole = rows_of([(tokens, 0, []) for tokens in batch], last_only=False)
    segments = [choice.randrange(config.segments) for _ in whole.tokens] if config.segments else None
    wanted = [row for row in whole.output_rows if choice.random() < 0.3 and not 200 <= row < 203]  # none of the second
    executor = NativeExecutor(net, last, threads=2, instructions=instructions)
    rows = replace(whole, segments=segments, output_rows=wanted)
    found, argmax = executor.step(rows).clone(), executor.argmax
    *_, in_turns = executor.step_in_turns(rows, 1e-9)
    assert in_turns is not None
    assert torch.equal(in_turns, found)
    expected, likeliest = list[Tensor](), list[int]()
    single = NativeExecutor(net, last, threads=1, instructions=instructions)
    for start, tokens in zip(whole.starts, batch, strict=False):
        own = replace(
            rows_of([(tokens, 0, [])], last_only=False),
            segments=segments and segments[start : start + len(tokens)],
            output_rows=[row - start for row in wanted if start <= row < start + len(tokens)],
        )
        expected.append(single.step(own).clone())
        likeliest += single.argmax
    assert torch.equal(torch.cat(expected), found)
    assert likeliest == argmax


def multiplied(pack: PackedNetwork, linear: nn.Linear, x: Tensor) -> Tensor:
    packed = pack.pack_linear([linear])
    padded = torch.zeros(x.size(0), packed.inputs)
    padded[:, : x.size(1)] = x
    out = torch.empty(x.size(0), packed.outputs)
    pack.library.polyhead_multiply(packed, padded.data_ptr(), x.size(0), out.data_ptr())
    return out[:, : linear.out_features]


def whole_numbers(choice: torch.Generator, *shape: int) -> Tensor:
    """Integers from -127 to 127. Each group contains 127, so its scale is 1."""
    values = torch.randint(-127, 128, shape, generator=choice).float()
    values[:, ::16] = 127
    return values


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (192, 77), (100, 33)])
def test_integers_are_multiplied_exactly(instructions: str, inputs: int, outputs: int) -> None:
    """The same bits as plain torch for the same integers, the extremes of both bytes included."""
    choice = torch.Generator().manual_seed(2)
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(whole_numbers(choice, outputs, inputs))
    pack = PackedNetwork(load_library(instructions), LLAMA, "int8")
    for rows in (1, 2, 3, 4, 7, 11, 12, 13, 40):
        x = whole_numbers(choice, rows, inputs)
        assert torch.equal(multiplied(pack, linear, x), (x.double() @ linear.weight.double().T).float())


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", ["llama", "deepseek, experts"])
def test_values_that_are_not_finite_stay_with_their_sequence(
    name: str, instructions: str, bad_value: float, precision: Precision
) -> None:
    """Rounding keeps NaN and infinity, their blocks are reported, and the next sequence in a block is not affected."""
    net, last = network(GENERATORS[name]), head(LLAMA)
    with torch.no_grad():
        net.tokens.weight[7, 3] = bad_value
    executor = NativeExecutor(net, last, precision=precision, block_count=8, threads=2, instructions=instructions)
    clean = [1, 2, 3, 4]
    expected = executor.step(rows_of([(clean, 0, [3])])).clone()
    logits = executor.step(rows_of([([5, 7, 5], 0, [1]), (clean, 0, [2])])).clone()
    assert not logits[0].isfinite().any()
    assert executor.argmax == [-1, int(expected.argmax())]
    assert torch.equal(logits[1:], expected)
    assert executor.nonfinite_blocks == {1}
    assert torch.equal(executor.step(rows_of([(clean, 0, [1])])), expected)
    assert not executor.nonfinite_blocks
