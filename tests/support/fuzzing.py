"""Random input for the compiled step, under sanitizers: `python tests/support/fuzzing.py FOLDER NAME SECONDS FIRST
ROUNDS`.

It runs ROUNDS rounds from number FIRST on, and more until the time is over. A round makes one network, of a random
shape or of one of the tests, with random weights or outliers in one of the formats. Its steps are: valid rows, valid
rows in which some numbers were replaced before or after the check in Python, copies of cache blocks, and sampled
tokens. The round's number determines all of it and is printed first: `FOLDER NAME 0 NUMBER 1` repeats it.

Between other steps the same text is computed again and must have the same bits."""

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead.models.checkpoint.description import invalid_fields
from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.bounds import INT32_LIMIT, TABLE_POSITIONS, Bounds, StepArrays
from polyhead.models.executors.contract import StateUse, StepInput
from polyhead.models.native import library
from polyhead.models.native.block_weights import BlockWeights
from polyhead.models.native.packed_network import (
    COLUMNS,
    PRECISION_FORMATS,
    PackedNetwork,
    Precision,
    unsupported_reason,
)
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import (
    ExpertConfig,
    LayerShape,
    MixerConfig,
    MixerName,
    ModelConfig,
    RopeScaling,
)
from polyhead.models.network.transformer import Transformer
from polyhead.service.core.request import Sampling
from polyhead.service.engine.native_sampling import CompiledSampler
from polyhead.service.engine.sampler import SampleRow
from tests.models.executors.test_bounds import HUGE, disturbed
from tests.models.native.test_recurrent_layers import RECURRENT
from tests.models.native.test_step import ENCODERS, GENERATORS, head, network, rows_of
from tests.support import zoo
from tests.support.sanitized import Exact, adapters, exactly, narrow

BLOCK = 16  # tokens
SLOTS = 40  # of states
OWN = 290  # blocks of windowed layers, enough for seven sequences
STEPS = 24  # of a round
SHORTEST_TURN_S = 1e-9  # each thread computes one piece of a step
SIZES = (1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200, 257, 300)  # tokens of a chunk
WIDTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 130)
ODD_NUMBERS = (
    -HUGE,
    -INT32_LIMIT,
    -17,
    -1,
    0,
    1,
    2,
    15,
    16,
    17,
    31,
    39,
    40,
    63,
    64,
    77,
    90,
    255,
    256,
    HUGE,
    INT32_LIMIT - 1,
)
WINDOWS = (0, 0, 0, 1, 2, 15, 16, 17, 100, 2**30, INT32_LIMIT - 2, INT32_LIMIT - 1)
OUTLIERS = (0.0, -0.0, 1e-45, 1e-38, -1e20, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
KINDS = (("float32", 0.0, 0), ("int8", 0.0, 0), ("int4", 0.0, 16), ("int4", -3.5, 16), ("int8", -3.5, 32))
COUNTS: Counter[str] = Counter()


def drawn_config(choice: random.Random) -> ModelConfig:
    """A random shape that a checkpoint may have."""
    kv_heads, causal = choice.choice((1, 1, 2, 3)), choice.random() < 0.6
    rotary, depth, window = choice.random() < 0.6, choice.randint(1, 3), choice.choice(WINDOWS)
    flag = lambda: choice.random() < 0.5  # noqa: E731
    seldom = lambda: choice.random() < 0.2  # noqa: E731
    head_width = choice.choice((2, 4, 10, 16, 32, 64, 80, 128, 256) if rotary else (1, 3, 8, 16, 33, 64, 100))
    shared, has_bias, scaling = (
        seldom(),
        flag(),
        RopeScaling(kind="linear", factor=2.0, magnitude=choice.choice((1.0, 1.3))),
    )
    position = choice.choice(("learned", "learned", "alibi", "none", "sinusoidal", "sines-cosines"))
    width = choice.choice(WIDTHS)
    embedding_width = choice.choice(WIDTHS) if seldom() else 0
    if "sin" in position and (embedding_width or width) % 2:
        position = "alibi"
    return ModelConfig(
        vocab_size=choice.choice((1, 2, *WIDTHS, 257)),
        width=width,
        embedding_width=embedding_width,
        depth=depth,
        heads=kv_heads * choice.choice((1, 1, 2, 3, 5, 7, 14)),
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=choice.choice(WIDTHS),
        max_positions=choice.choice((1, 16, 40, 300, 600)),
        causal=causal,
        position="rotary" if rotary else position,  # type: ignore[arg-type]
        position_offset=0 if rotary else choice.choice((0, 0, 2, 5)),
        window=window,
        windowed=tuple(flag() for _ in range(depth)) if window and flag() else (),
        window_rope_base=1000.0 if rotary and window and flag() else 0.0,
        rope_scaling=scaling if rotary and seldom() else None,
        rotary_width=choice.choice((2, head_width // 4 * 2, head_width)) if rotary and flag() else 0,
        rotated=tuple(flag() for _ in range(depth)) if seldom() else (),
        norm=choice.choice(("layer", "rms")),
        norm_eps=choice.choice((1e-5, 1e-12, 0.0, 1.0)),
        norm_bias=has_bias,
        norm_weight=has_bias or not seldom(),
        norm_order=choice.choice(("pre", "post", "sandwich", "inner", "parallel")),
        opening_norm=shared or flag(),
        embedding_norm=flag(),
        embedding_scale=choice.choice((1.0, 7.0, 0.0)),
        query_key_norm=choice.choice(("", "", "shared", "per_head", "joint")),
        query_key_norm_bias=flag(),
        score_scale=choice.choice((0.0, 0.3)),
        score_cap=choice.choice((0.0, 0.0, 1e-30, 0.5, 50.0)),
        attention_gate=seldom(),
        sinks=seldom(),
        residual_scale=choice.choice((1.0, 1.0, 0.22, 0.0)),
        logit_scale=choice.choice((1.0, 1.0, 0.06, 0.0)),
        logit_cap=choice.choice((0.0, 0.0, 30.0)),
        logit_bias=seldom(),
        shared=shared,
        activation=choice.choice(("gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu", "relu_squared")),
        gated_mlp=flag(),
        qkv_bias=flag(),
        output_bias=flag(),
        mlp_bias=flag(),
        segments=choice.choice((0, 0, 1, 2, 5)),
        experts=drawn_experts(choice, 0 if shared else depth) if seldom() else None,
    )


def drawn_experts(choice: random.Random, depth: int) -> ExpertConfig:
    """A random mixture of experts; `depth`: of the layers, each of which may have one, 0: all have."""
    flag = lambda: choice.random() < 0.5  # noqa: E731
    groups, size = choice.choice((0, 0, 1, 2, 3)), choice.choice((2, 3, 8))
    count = groups * size if groups else choice.choice((1, 2, 5, 31, 32, 33, 40))
    chosen_groups = choice.randint(1, groups) if groups else 0
    shared_width = choice.choice(WIDTHS) if flag() else 0
    return ExpertConfig(
        count=count,
        chosen=choice.randint(1, min(chosen_groups * size if groups else count, 9)),
        width=choice.choice(WIDTHS),
        layers=tuple(flag() for _ in range(depth)) if depth and flag() else (),
        scoring=choice.choice(("softmax", "sigmoid")),
        normalised=flag(),
        normalised_eps=choice.choice((0.0, 1e-20)),
        scale=choice.choice((1.0, 2.5, 0.0)),
        groups=groups,
        chosen_groups=chosen_groups,
        choice_bias=flag(),
        router_bias=flag(),
        bias=flag(),
        clamp=choice.choice((0.0, 0.0, 7.0, 1e-30)),
        shared_width=shared_width,
        shared_gate=bool(shared_width) and flag(),
        output_scales=flag(),
    )


def with_own_norms(config: ModelConfig, choice: random.Random) -> ModelConfig:
    """The configuration with norms of the parts of its mixture, where it may have them."""
    mixture = config.experts
    if mixture is None or not mixture.shared_width or mixture.shared_gate or choice.random() < 0.3:
        return config
    return replace(config, norm="rms", norm_order="sandwich", experts=replace(mixture, own_norms=True))


def with_recurrent_layers(config: ModelConfig, choice: random.Random) -> ModelConfig:
    """The configuration with random mixers, and layers without an MLP."""
    flag = lambda: choice.random() < 0.5  # noqa: E731
    kinds: tuple[MixerName, ...] = ("attention", "convolution", "state_space", "delta", "none")
    mixers = tuple(choice.choice(kinds) for _ in range(config.depth))
    key_heads, groups = choice.choice((1, 1, 2, 3)), choice.choice((1, 1, 2, 5))
    recurrent = MixerConfig(
        kernel=choice.choice((1, 2, 3, 4, 4, 7)),
        kernel_bias=flag(),
        heads=key_heads * groups * choice.choice((1, 1, 2, 3)),
        head_width=choice.choice((1, 5, 16, 31, 32, 33, 64)),
        key_heads=key_heads,
        key_width=choice.choice((1, 3, 16, 32, 33, 64)),
        input_bias=flag(),
        output_bias=flag(),
        norm_groups=groups,
        gate_first=flag(),
        gated_norm=flag(),
        norm_eps=choice.choice((1e-5, 1e-12, 1.0)),
        step_limits=choice.choice(((0.0, float("inf")), (0.001, 0.1), (0.5, 0.5))),
        update_scale=choice.choice((1.0, 2.0)),
        is_pre_norm=flag(),
    )
    return replace(
        config,
        causal=True,
        shared=False,
        norm_order=choice.choice(("pre", "inner")),
        recurrent=recurrent if {*mixers} - {"attention", "none"} else None,
        mixers=mixers,
        mlps=tuple(mixer == "none" or choice.random() < 0.7 for mixer in mixers),
    )


def with_layer_sizes(config: ModelConfig, choice: random.Random) -> ModelConfig:
    """The configuration with heads and MLPs whose sizes differ from layer to layer, keys and values that later layers
    read, values that are keys, and embeddings and scales of each layer."""
    flag = lambda: choice.random() < 0.5  # noqa: E731
    widths = [max(config.rotary_width, 2), config.head_width] if config.position == "rotary" else [1, config.head_width]
    by_window = {False: choice.choice(widths), True: config.head_width}
    if not config.window_rope_base:
        by_window[True] = by_window[False]
    shapes, reads = list[LayerShape](), list[int]()
    for layer in range(config.depth):
        width = by_window[config.is_windowed(layer)] if config.position == "rotary" else choice.choice(widths)
        shapes.append(
            LayerShape(
                kv_heads=choice.choice((1, config.kv_heads)),
                head_width=width,
                mlp_width=choice.randint(1, config.mlp_width),
            )
        )
        heads = [(each.kv_heads, each.head_width) for each in shapes]
        known = [
            source
            for source in range(layer + 1)
            if heads[source] == heads[layer] and reads[source : source + 1] in ([], [source])
        ]
        reads.append(choice.choice(known))
    is_embedded = flag()
    return replace(
        config,
        shared=False,
        layer_shapes=tuple(shapes),
        key_layers=tuple(reads) if flag() else (),
        tied_values=tuple(flag() for _ in shapes) if flag() else (),
        value_norm=flag(),
        layer_embedding=choice.choice((1, 8, 31, 64)) if is_embedded else 0,
        layer_scale=is_embedded and flag(),
        norm_order="sandwich" if is_embedded else config.norm_order,
    )


def made_network(choice: random.Random) -> tuple[Transformer, LanguageHead | None]:
    """A random shape, a shape of the tests, or one of the zoo with its outliers."""
    source = choice.random()
    if source < 0.15:
        grown = zoo.grown(choice.choice([*zoo.GENERATORS, *zoo.ENCODERS]))
        return grown.network, grown.head
    known = [*GENERATORS.values(), *ENCODERS.values(), *RECURRENT.values()]
    config = drawn_config(choice) if source < 0.8 else choice.choice(known)
    if source < 0.4:
        config = with_recurrent_layers(config, choice)
    elif source < 0.55:
        config = with_layer_sizes(config, choice)
    if not config.is_recurrent and not config.mlps:
        config = with_own_norms(config, choice)
    assert not unsupported_reason(config)
    assert not [*invalid_fields(config)]
    net = network(config)
    return net, head(config) if config.causal and choice.random() < 0.9 else None


def corrupt_weights(net: nn.Module, choice: random.Random) -> None:
    """Replace some weights by outliers or NaN."""
    for parameter in choice.sample([*net.parameters()], 2):
        flat = parameter.data.reshape(-1)
        for _ in range(3):
            flat[choice.randrange(len(flat))] = choice.choice(OUTLIERS)


class Replacing(Bounds):
    """Replaces numbers of valid rows after the check in Python: the compiled step itself must reject them."""

    choice: random.Random | None = None  # None: nothing is replaced

    def check(self, rows: StepInput, attached: Any) -> StepArrays:
        arrays = super().check(rows, attached)
        if self.choice is None:
            return arrays
        unchecked = ("table_starts", "window_starts")  # whose length the step cannot check
        names = [f.name for f in fields(arrays) if f.name not in unchecked]
        lists = {name: values for name in names if (values := getattr(arrays, name)) is not None and values.size}
        changed = {name: lists[name].copy() for name in self.choice.sample(sorted(lists), min(2, len(lists)))}
        for values in changed.values():
            values.reshape(-1)[self.choice.randrange(values.size)] = self.choice.choice(ODD_NUMBERS)
        return replace(arrays, **changed)


@dataclass
class Round:
    """One network and its steps."""

    choice: random.Random
    config: ModelConfig
    executor: Any
    numbers: list[int]  # of its adapters
    blocks: int
    again: StepInput | None = None
    expected: Tensor | None = None

    @classmethod
    def made(cls, number: int, instructions: str) -> "Round":
        choice = random.Random(number)
        torch.manual_seed(number)
        net, last = made_network(choice)
        config = net.config
        precision, least, steps = choice.choice(KINDS)
        narrowest = min(linear.in_features for linear in net.modules() if isinstance(linear, nn.Linear))
        if steps and narrowest > 1 and choice.random() < 0.7:
            for module in (net, last) if last else (net,):
                module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
                narrow(module, least, steps)
        elif choice.random() < 0.2:
            corrupt_weights(net, choice)
        blocks = choice.choice((1, 3, 15, 16, 17, 40)) if config.causal and choice.random() < 0.9 else 0
        threads = choice.choice((1,) * 6 + (2, 3))
        own = OWN if blocks and config.window and choice.random() < 0.7 else 0
        sys.stderr.write(
            f"round {number}: {precision}, {blocks} blocks, {own} of windows, {threads} threads, {config}\n"
        )
        executor = Exact(
            net,
            last,
            precision=precision,
            block_count=blocks,
            state_count=SLOTS,
            window_blocks=own,
            threads=threads,
            instructions=instructions,
        )
        executor._bounds = Replacing(**vars(executor._bounds))
        numbers = adapters(config, executor) if choice.random() < 0.4 else [0]
        return cls(choice, config, executor, numbers, blocks)

    def valid(self) -> StepInput:
        """Sequences of random lengths; with a cache some continue blocks that they share with others."""
        choice, parts = self.choice, []
        free = choice.sample(range(self.blocks), self.blocks)
        kept = free[: len(free) // 3]  # read, not written
        del free[: len(free) // 3]
        most = self.config.max_positions if self.config.position in TABLE_POSITIONS else 600
        for _ in range(choice.choice((1, 1, 2, 3, 7))):
            size, shared = min(choice.choice(SIZES), most), []
            if self.blocks:
                shared = choice.sample(kept, choice.randint(0, min(len(kept), (most - 1) // BLOCK)))
                own = choice.randint(0, BLOCK - 1)  # positions before the first, in a block that it writes to
                first = min(len(shared) * BLOCK + own, most - 1)
                size = min(size, most - first, len(shared) * BLOCK + len(free) * BLOCK - first)
                if size < 1:
                    break
                count = -(-(first + size) // BLOCK) - len(shared)
                table = shared + [free.pop() for _ in range(count)]
                table += free[: choice.choice((0, 0, 1))]  # which has no token yet
            else:
                first, table = 0, []
            parts.append((self.tokens(size), first, table))
        parts = parts or [(self.tokens(1), 0, [0] if self.blocks else [])]
        return self.with_options(rows_of(parts, last_only=choice.random() < 0.5))

    def with_options(self, rows: StepInput) -> StepInput:
        """With segments, adapters and requested rows."""
        choice, count = self.choice, len(rows.tokens)
        if self.config.segments and choice.random() < 0.7:
            rows = replace(rows, segments=[choice.randrange(self.config.segments) for _ in range(count)])
        if self.executor.state_count:
            rows = replace(rows, states=self.uses(rows))
        if self.executor.window_blocks:
            rows = replace(rows, window_tables=self.windows(rows))
        if len(self.numbers) > 1 and choice.random() < 0.7:
            rows = replace(rows, adapters=[choice.choice(self.numbers) for _ in rows.block_tables])
        if choice.random() < 0.3:
            rows = replace(rows, output_rows=sorted(choice.sample(range(count), choice.randint(0, count))))
        return rows

    def uses(self, rows: StepInput) -> list[StateUse]:
        """Random slots; those that are read may never have been written."""
        choice, free = self.choice, self.choice.sample(range(SLOTS), SLOTS)
        readable, found = [free.pop() for _ in range(5)], []
        for start, end in pairwise(rows.starts):
            read = choice.choice(readable) if rows.positions[start] else -1
            border_rows = choice.choice((0, 0, 1, end - start, choice.randint(1, end - start)))
            found.append(StateUse(read, free.pop(), border_rows, free.pop() if border_rows else -1))
        return found

    def windows(self, rows: StepInput) -> list[list[int]]:
        """Tables of blocks that were never written, or by other sequences; some have blocks that no row sees."""
        free, tables = self.choice.sample(range(self.blocks, self.blocks + OWN), OWN), []
        for start, end in pairwise(rows.starts):
            most = rows.positions[end - 1] // BLOCK + 1
            least = most - max(rows.positions[start] - self.config.window + 1, 0) // BLOCK
            tables.append([free.pop() for _ in range(self.choice.choice((least, self.choice.randint(least, most))))])
        return tables

    def tokens(self, count: int) -> list[int]:
        most = self.config.vocab_size - 1
        return [self.choice.choice((0, most, self.choice.randint(0, most))) for _ in range(count)]

    def run(self) -> None:
        self.again = self.valid()
        self.expected = self.executor.step(self.again).clone() if self.fresh(self.again) else None
        for _ in range(STEPS):
            self.choice.choices(ACTIONS, WEIGHTS)[0](self)
        self.repeat()

    def fresh(self, rows: StepInput) -> bool:
        """Whether the result does not depend on the cache."""
        return not any(rows.positions[start] for start in rows.starts[:-1])

    def step(self) -> None:
        """Valid rows: answered."""
        rows = self.valid()
        if len(rows.output_rows) == len(rows.tokens) and self.choice.random() < 0.5:
            self.executor.step_with_states(rows)
        elif not self.executor.block_count and self.choice.random() < 0.5:
            for _ in self.executor.step_in_turns(rows, SHORTEST_TURN_S):
                if self.choice.random() < 0.1:
                    break  # as if its texts were cancelled
        else:
            self.executor.step(rows)
        COUNTS["answered"] += 1

    def refusal(self, rows: StepInput) -> str:
        """The error message with which rows are rejected; empty if they are answered."""
        try:
            self.executor.step(rows)
        except StepInputError as error:
            return str(error)
        return ""

    def disturb(self) -> None:
        """Rows with other numbers or lengths: answered, or rejected in Python."""
        rows = disturbed(self.valid(), self.choice)
        refusal = self.refusal(rows)
        assert "the compiled step" not in refusal, "Python and C++ check differently"
        COUNTS["refused in Python" if refusal else "answered"] += 1

    def replace(self) -> None:
        """Other numbers after the check in Python: answered, or rejected by the step."""
        bounds = self.executor._bounds
        object.__setattr__(bounds, "choice", self.choice)
        refusal = self.refusal(self.valid())
        object.__setattr__(bounds, "choice", None)
        assert not refusal or "the compiled step refuses" in refusal, refusal
        COUNTS["refused by the step" if refusal else "answered"] += 1

    def copy(self) -> None:
        """Copy blocks of the cache, some of which do not exist."""
        most = self.blocks + self.executor.window_blocks
        numbers = (*range(self.blocks), -1, most - 1, most, HUGE)
        pairs = [(self.choice.choice(numbers), self.choice.choice(numbers)) for _ in range(self.choice.randint(0, 3))]
        try:
            self.executor.copy(pairs)
        except StepInputError:
            kinds = [{number // self.blocks > 0 for number in pair} for pair in pairs if self.blocks]
            assert any(not 0 <= number < most for pair in pairs for number in pair) or {True, False} in kinds

    def repeat(self) -> None:
        """Compute the first rows again."""
        if self.expected is not None and self.again is not None:
            if self.executor.block_count:
                found = self.executor.step(self.again)
            else:
                [*_, last] = self.executor.step_in_turns(self.again, SHORTEST_TURN_S)
                assert last is not None
                found = last
            assert np.array_equal(found.numpy(), self.expected.numpy(), equal_nan=True), (
                "the bits differ from the first time"
            )
            COUNTS["repeated"] += 1


ACTIONS: list[Callable[[Round], None]] = [Round.step, Round.disturb, Round.replace, Round.copy, Round.repeat]
WEIGHTS = (10, 4, 6, 1, 1)


def draw(number: int, instructions: str) -> None:
    """Sample tokens with random settings from rows of finite numbers, of any size."""
    choice = random.Random(number)
    words = choice.choice((1, 2, 31, 32, 33, 64, 257, 1000))
    logits = torch.randn(5, words) * choice.choice((0.0, 1.0, 1e-30, 1e30, 1e37))
    edges = (0, 1, 2, words - 1, words, words + 1, INT32_LIMIT - 1)
    asks = []
    for row in range(5):
        sampling = Sampling(
            temperature=choice.choice((0.0, 1e-30, 0.7, 1.0, 1e30)),
            top_k=choice.choice(edges),
            top_p=choice.choice((1.0, 0.5, 1e-30)),
            min_p=choice.choice((0.0, 0.5, 1.0)),
            typical_p=choice.choice((1.0, 0.5, 1e-30)),
        )
        bits: NDArray[Any] | None = None
        if choice.random() < 0.4:
            bits = np.array([choice.choice((0, -1, -INT32_LIMIT, 5)) for _ in range(-(-words // 32))], np.int32)
        uniform = choice.choice((0.0, 1 - 2**-53, choice.random()))
        asks.append(SampleRow(row, sampling, uniform, None, bits, choice.choice((-1, *edges[:-1]))))
    for token, _ in CompiledSampler(instructions, choice.choice((1, 2))).sample(logits, asks):
        assert -1 <= token < words
    COUNTS["drawn"] += len(asks)


def decode(number: int, instructions: str) -> None:
    """Decode blocks of GGUF files with random bytes."""
    choice = random.Random(number)
    kind, count = choice.choice(list(library.BLOCK_KINDS.values())), choice.choice((1, 2, 7, 100))
    raw = np.frombuffer(choice.randbytes(count * kind.size), np.uint8).copy()
    out = np.empty(count * kind.numbers, np.float32)
    compiled, blocks = library.load_library(instructions), (kind.code, raw.ctypes.data, count)
    compiled.polyhead_decode(*blocks, out.ctypes.data)
    assert bool(compiled.polyhead_are_finite(*blocks)) == bool(np.isfinite(out).all())
    compiled.polyhead_largest(*blocks)
    pack_blocks(raw.reshape(1, -1).repeat(COLUMNS, 0), kind, choice.choice(tuple(PRECISION_FORMATS)), instructions)


def pack_blocks(raw: NDArray[np.uint8], kind: library.BlockKind, precision: Precision, instructions: str) -> None:
    """Pack rows of blocks [N, bytes], whatever is in them."""
    [name] = [name for name, each in library.BLOCK_KINDS.items() if each == kind]
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = BlockWeights(torch.from_numpy(raw), name)
    sizes = dict.fromkeys(("vocab_size", "width", "depth", "heads", "kv_heads", "head_width", "mlp_width"), 1)
    config = ModelConfig(**sizes, max_positions=1, causal=True)
    PackedNetwork(library.load_library(instructions), config, precision).pack_linear([linear])


def drive(instructions: str, first: int, seconds: float, rounds: int = 1) -> str:
    """Run so many rounds, then more until the time is over; return one line with the counts."""
    number, end = first, time.monotonic() + seconds
    while number < first + rounds or time.monotonic() < end:
        Round.made(number, instructions).run()
        draw(number, instructions)
        decode(number, instructions)
        number += 1
    done = ", ".join(f"{count} {what}" for what, count in sorted(COUNTS.items()))
    return f"{number - first} networks from round {first} on: {done}"


def main(folder: Path, instructions: str, seconds: float, first: int, rounds: int = 1) -> None:
    exactly(folder)
    sys.stdout.write(drive(instructions, first, seconds, rounds) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), *map(int, sys.argv[4:]))
