"""The executor for CPUs: one compiled call a step, over packed weights and a cache that is read in place.

Its results do not depend on the other sequences of a step, to the last bit, in every precision. What a cache block held
before is never multiplied, so blocks are never cleared.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import StepInputError, UnsupportedError
from ..core.turns import YieldTurn, keep_turn
from ..executors.bounds import Bounds
from ..executors.contract import StepInput, copy_marks
from ..network.heads import LanguageHead
from ..network.lora import Lora, adaptable_shapes
from ..network.transformer import Transformer
from . import library as native
from .large_pages import map_pages
from .packed_lora import PackedLora
from .packed_network import (
    BLOCK_TOKENS,
    RUN_BLOCKS,
    LoadPart,
    PackedNetwork,
    Precision,
    pack_network,
    unsupported_reason,
)

NANOSECONDS = 1_000_000_000  # in a second


class PreparedStep(NamedTuple):
    """A compiled step, where it writes, and what it reads, which must exist until it is finished."""

    call: native.StepCall
    out: Tensor
    nonfinite: NDArray[np.uint8]
    argmax: NDArray[np.int32]
    read: tuple[object, ...]


class NativeExecutor:
    """Runs `network` and, for a generator, `head`; see models.executors.contract.Executor. Weights are copied in
    `precision`.

    `state_count` are the slots for states of recurrent layers, if there are such layers and a cache; `window_blocks`
    the blocks of windowed layers, 0: they use those of other layers.
    `instructions` names the library; the default is the fastest one for this processor. `threads` are its own. Each
    part of the network is packed inside `load_part(part)`; outside of it the part's own weights are not read;
    `yield_turn`: see PackHooks.
    UnsupportedError names the part of a network that the compiled step does not support.
    """

    block_size = 0

    def __init__(
        self,
        network: Transformer,
        head: LanguageHead | None = None,
        *,
        precision: Precision = "int8",
        block_count: int = 0,
        state_count: int = 0,
        window_blocks: int = 0,
        threads: int = 1,
        instructions: str = "",
        load_part: LoadPart = nullcontext,
        yield_turn: YieldTurn = keep_turn,
    ) -> None:
        if reason := unsupported_reason(network.config):
            raise UnsupportedError(f"the compiled step cannot compute this network: {reason}; torch can")
        self.instructions = instructions or native.runnable_targets()[0]
        self._library = native.load_library(self.instructions)
        self._config, self._loras, self._attached = network.config, dict[int, PackedLora](), 0
        self.block_count, self.block_size = block_count, BLOCK_TOKENS if block_count else 0
        self.window_blocks, self.window = window_blocks, network.config.window
        self._bounds = Bounds.of(network.config, block_count, self.block_size, state_count, window_blocks)
        self.state_count = self._bounds.state_count
        pack = PackedNetwork(self._library, network.config, precision, threads, yield_turn)
        pack.plan.block_count, pack.plan.window_blocks = block_count, window_blocks
        pack.plan.state_count = self.state_count
        self._packed = pack_network(pack, network, head, load_part)
        self.weight_bytes = self._packed.weight_bytes
        self._vocabulary, self._width = network.config.vocab_size, network.config.width
        self.threads = threads
        self._model = self._library.polyhead_open(ctypes.byref(self._packed.plan), threads)
        self._models = [self._model]  # with the same weights, each for one step at a time
        self._idle_models = [self._model]  # the first ones first: they have memory for long steps
        sizes = [self._library.polyhead_cache_bytes(self._model, which) for which in range(3)]
        self._cache = [map_pages(size) for size in sizes]  # keys, values, states
        self._library.polyhead_set_cache(self._model, *(kept.ctypes.data for kept in self._cache))
        self._runs = [
            layer
            for which, (kept, size) in enumerate(zip(self._cache[:2], sizes[:2], strict=True))
            if size
            for layer in self._layers_of(which, kept[:size])
        ]
        self._generates = head is not None
        self._stride = self._packed.plan.head.outputs if self._generates else self._width
        self._out = torch.empty(0)
        self._argmax = np.empty(0, np.int32)
        self._nonfinite_blocks: set[int] = set()

    def _layers_of(self, which: int, kept: NDArray[np.uint8]) -> Iterator[tuple[bool, NDArray[np.uint8]]]:
        """The keys (0) or values (1) of each layer that has its own, [runs, RUN_BLOCKS, bytes of a block], and whether
        its blocks are those of windowed layers.

        It is the step's layout: all layers of a run of blocks before the next run, and the blocks of windowed layers
        last.
        """
        windowed = {*self._config.windowed_layers} if self.window_blocks else set()
        start = 0
        for is_windowed, count in ((False, self.block_count), (True, self.window_blocks)):
            layers = [layer for layer in self._config.cached_layers if (layer in windowed) == is_windowed]
            sizes = [self._library.polyhead_layer_bytes(self._model, which, layer) for layer in layers]
            run_count, run_bytes, end = -(-count // RUN_BLOCKS), RUN_BLOCKS * sum(sizes), 0
            runs = kept[start : start + run_count * run_bytes].reshape(run_count, run_bytes)
            start += runs.size
            for size in sizes:
                begin, end = end, end + RUN_BLOCKS * size
                shape, strides = (run_count, RUN_BLOCKS, size), (runs.strides[0], size, 1)
                yield is_windowed, np.lib.stride_tricks.as_strided(runs[:, begin:end], shape, strides)

    def __del__(self) -> None:
        for model in getattr(self, "_models", ()):
            self._library.polyhead_close(model)

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self._nonfinite_blocks

    @property
    def argmax(self) -> list[int]:
        tokens: list[int] = self._argmax.tolist()
        return tokens

    @property
    def product_bytes(self) -> int:
        return self.weight_bytes - self._packed.token_table.nbytes

    @property
    def token_table(self) -> NDArray[np.generic]:
        """[V, W] the token embeddings as they are stored: float32, or bfloat16 as int16."""
        return self._packed.token_table.reshape(self._vocabulary, self._width)

    def step(self, rows: StepInput) -> Tensor:
        """The result is valid until the next step. Raises StepInputError before anything is computed."""
        return self._step(rows, 0)

    def step_with_states(self, rows: StepInput) -> tuple[Tensor, Tensor]:
        """The result of `step`, and the output of each layer for each row: [depth, T, W] float32, before the final
        norm.

        All rows must be output rows, since the last layer computes no others.
        """
        if len(rows.output_rows) != len(rows.tokens):
            raise StepInputError(
                f"output_rows: there are {len(rows.output_rows)}, which should be {len(rows.tokens)}, all"
            )
        states = torch.empty(self._config.depth, len(rows.tokens), self._width)
        return self._step(rows, states.data_ptr()), states

    def step_in_turns(self, rows: StepInput, turn_s: float) -> "StepInTurns":
        """See models.executors.contract.TurnExecutor."""
        assert not self.block_count, "a step with a cache is not interrupted: the next one would change its blocks"
        return StepInTurns(self, rows, round(turn_s * NANOSECONDS))

    def begin_together(self, steps: Sequence[Iterator[Tensor | None]]) -> None:
        """See models.executors.contract.JointExecutor."""
        begun = [step for step in steps if isinstance(step, StepInTurns) and step.prepare()]
        if begun:
            calls = (native.StepCall * len(begun))(*(step.call for step in begun))
            self._library.polyhead_step(calls, len(begun), begun[0].turn)
            for step, call in zip(begun, calls, strict=True):
                step.begin(call.result)

    @contextmanager
    def _take_model(self) -> Iterator[int]:
        """A model that computes no step; a new one if all do, which takes threads and the memory of its steps."""
        if not self._idle_models:
            model = self._library.polyhead_open(ctypes.byref(self._packed.plan), self.threads)
            self._models.append(model)
            self._idle_models.append(model)
        model = self._idle_models.pop(0)
        try:
            yield model
        finally:
            self._idle_models = [each for each in self._models if each == model or each in self._idle_models]

    def _step(self, rows: StepInput, states: int) -> Tensor:
        """`states` is the address of the states that `step_with_states` returns; 0: they are not written."""
        with self._take_model() as model:
            step = self._prepare(model, rows, self._output_buffer(len(rows.output_rows)), states)
            self._library.polyhead_step(ctypes.byref(step.call), 1, 0)
            return self._finish(rows, step, step.call.result)

    def _prepare(self, model: int, rows: StepInput, out: Tensor, states: int = 0) -> PreparedStep:
        arrays = self._bounds.check(rows, self._loras)
        count, output_count = len(rows.tokens), len(rows.output_rows)
        if self._nonfinite_blocks:
            self._nonfinite_blocks -= self._blocks(
                rows, [i for i in range(count) if rows.positions[i] % BLOCK_TOKENS == 0]
            )
        nonfinite, argmax = np.empty(count, np.uint8), np.empty(output_count if self._generates else 0, np.int32)
        kept = [
            arrays.tokens,
            arrays.positions,
            arrays.segments,
            arrays.starts,
            arrays.blocks,
            arrays.table_starts,
            arrays.window_blocks,
            arrays.window_starts,
            arrays.output_rows,
            None if rows.adapters is None else np.fromiter(map(self._address, rows.adapters), np.uint64),
            arrays.states,
        ]
        addresses = [0 if array is None else array.ctypes.data for array in kept]
        loras = [self._loras[number] for number in sorted({*(rows.adapters or ())} - {0})]
        rank = max((lora.rank for lora in loras), default=0)
        step = native.StepStruct(count, len(rows.block_tables), output_count, rank, *addresses, states)
        written = out.data_ptr(), nonfinite.ctypes.data, argmax.ctypes.data
        call = native.StepCall(model, ctypes.addressof(step), *written, self._stride)
        return PreparedStep(call, out, nonfinite, argmax, (step, *kept, *loras))

    def _finish(self, rows: StepInput, step: PreparedStep, error: int) -> Tensor:
        """The output of a finished step. Raises StepInputError if it was not computed."""
        if error:
            raise StepInputError(f"the compiled step refuses {native.STEP_ERRORS[error]}")
        self._argmax = step.argmax
        if self.block_count and step.nonfinite.any():
            self._nonfinite_blocks |= self._blocks(rows, np.flatnonzero(step.nonfinite).tolist())
        return step.out[:, : self._vocabulary] if self._generates else step.out

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._bounds.check_copies(blocks)
        copy_marks(self._nonfinite_blocks, blocks)
        for source, target in blocks:
            own = source >= self.block_count
            (from_run, from_block), (to_run, to_block) = (
                divmod(block - own * self.block_count, RUN_BLOCKS) for block in (source, target)
            )
            for is_windowed, runs in self._runs:
                if is_windowed == own:
                    runs[to_run, to_block] = runs[from_run, from_block]

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        if unknown := sorted(adapter.keys() - adaptable_shapes(self._config).keys()):
            raise UnsupportedError(
                f"{unknown[0]}: the compiled step adds no update of an adapter to it; load it merged"
            )
        self._attached += 1
        number = self._attached  # others may be attached meanwhile
        self._loras[number] = PackedLora(self._config, adapter, yield_turn)
        return number

    def detach(self, number: int) -> None:
        del self._loras[number]

    def _address(self, number: int) -> int:
        return self._loras[number].address if number else 0

    def padding(self, rows: StepInput) -> int:  # noqa: ARG002
        """Always 0: rows are not padded."""
        return 0

    def _output_buffer(self, rows: int) -> Tensor:
        if self._out.numel() < rows * self._stride:
            self._out = torch.empty(rows * self._stride * 5 // 4)
        return self._out[: rows * self._stride].view(rows, self._stride)

    def _blocks(self, rows: StepInput, members: Iterable[int]) -> set[int]:
        """The cache blocks in which these rows are stored, those of windowed layers too."""
        found, tables = set(), [rows.block_tables, *([] if rows.window_tables is None else [rows.window_tables])]
        for row in members:
            n = bisect_right(rows.starts, row) - 1
            last = rows.positions[rows.starts[n + 1] - 1] // BLOCK_TOKENS
            behind = last - rows.positions[row] // BLOCK_TOKENS  # blocks of the sequence behind that of the row
            found |= {table[n][last - behind if table is rows.block_tables else -1 - behind] for table in tables}
        return found


class StepInTurns(Iterator[Tensor | None]):
    """What NativeExecutor.step_in_turns returns.  From its first turn on it holds a model of the executor, until it is
    finished, closed or dropped.  A turn is so many nanoseconds.
    """

    def __init__(self, executor: NativeExecutor, rows: StepInput, turn: int) -> None:
        self.turn = turn
        self._result: int | None = None  # of the first turn, until it is read
        self._executor, self._rows = executor, rows
        self._step: PreparedStep | None = None
        self._held, self._has_begun, self._is_closed = ExitStack(), False, False

    def __next__(self) -> Tensor | None:
        if self._is_closed:
            raise StopIteration
        result, self._result = self._compute_turn() if self._result is None else self._result, None
        if result == native.UNFINISHED:
            return None
        self.close()
        return self._executor._finish(self._rows, self._prepared, result)

    def close(self) -> None:
        """Compute no further turn, and give the model back."""
        self._is_closed = True
        self._held.close()

    @property
    def call(self) -> native.StepCall:
        return self._prepared.call

    def prepare(self) -> bool:
        """Take a model for the first turn.  Returns False if the input is refused: `next` raises the error then."""
        with suppress(StepInputError):
            self._prepare()
        return self._step is not None

    def begin(self, result: int) -> None:
        """Take the result of the first turn, which was computed beside others."""
        self._has_begun, self._result = True, result

    def _prepare(self) -> None:
        executor = self._executor
        out = torch.empty(len(self._rows.output_rows), executor._stride)
        with ExitStack() as taken:
            self._step = executor._prepare(taken.enter_context(executor._take_model()), self._rows, out)
            self._held = taken.pop_all()

    @property
    def _prepared(self) -> PreparedStep:
        assert self._step is not None, "the first turn was not begun"
        return self._step

    def _compute_turn(self) -> int:
        library = self._executor._library
        if self._has_begun:
            return int(library.polyhead_resume(self.call.model, self.turn))
        if self._step is None:
            self._prepare()
        self._has_begun = True
        library.polyhead_step(ctypes.byref(self.call), 1, self.turn)
        return int(self.call.result)
