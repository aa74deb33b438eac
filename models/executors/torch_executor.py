"""The reference executor: the network in torch, on any device, with its own paged cache.

Attention in groups multiplies masked slots, too, and 0 * NaN is NaN. So what an earlier sequence left in a block is
zeroed when another one begins it, whether it was found to be finite or not: an adapter may make keys infinite that have
no weight for its own rows, and then no later layer shows them.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.errors import StepInputError, UnsupportedError
from ..core.turns import YieldTurn, convert_by_parts, keep_turn
from ..network.attention import count_padding_rows
from ..network.cache import BlockCounts, CacheView, PagedCache
from ..network.encoder_decoder import SharedTextTransformer
from ..network.heads import LanguageHead
from ..network.lora import AdapterTiles, AdapterUpdates, Lora, LowRank, expand_adapters, name_linears
from ..network.ragged import RaggedBatch
from ..network.recurrent_state import RecurrentState, StateView
from ..network.transformer import Transformer
from ..network.work_pieces import in_turns
from .bounds import Bounds
from .contract import StepInput, copy_marks
from .cuda_graphs import DecodeGraphs, PagedAttention, StepOutput
from .step_buffer import StepBuffer


class TorchExecutor:
    """Runs `network` and, for a generator, `head` on a StepInput; see models.executors.contract.Executor.

    `block_count` 0 means no cache: every sequence comes whole. `state_count` are the slots for states of recurrent
    layers, if there are such layers and a cache; `window_blocks` the blocks of windowed layers, which have none of
    their own with `in_place`. The way of attention is chosen here, once.
    """

    def __init__(
        self,
        network: Transformer,
        head: LanguageHead | None = None,
        *,
        block_count: int = 0,
        block_size: int = 0,
        state_count: int = 0,
        window_blocks: int = 0,
        in_place: PagedAttention | None = None,
    ) -> None:
        assert not (in_place and window_blocks), "the kernel reads one table for all layers"
        self.network = network.eval() if network.training else network  # it may have thousands of experts
        self.head = head
        self.block_count, self.block_size = block_count, block_size
        self.window_blocks, self.window = window_blocks, network.config.window
        self._bounds = Bounds.of(network.config, block_count, block_size, state_count, window_blocks)
        if isinstance(network, SharedTextTransformer):
            self._bounds = self._bounds.within(Bounds.of(network.decoder.config, 0, 0))
        self.state_count = self._bounds.state_count
        weight, config = network.tokens.weight, network.config
        self.device, self.dtype = weight.device, weight.dtype
        self._nonfinite_blocks: set[int] = set()  # blocks with an infinite or NaN number
        self._kernel = None if in_place is None else in_place.kernel
        self._linear_names, self._loras, self._attached = name_linears(network, config), dict[int, Lora](), 0
        self.cache: PagedCache | None = None
        self._graphs: DecodeGraphs | None = None
        self.states = RecurrentState(config, self.state_count, weight) if self.state_count else None
        if block_count:
            # Scans take another course for each step, so they are not recorded.
            replays = in_place is not None and in_place.decode_sequences > 0 and not config.is_recurrent
            counts = BlockCounts(block_count + replays, window_blocks)
            self.cache = PagedCache(config, counts, block_size, weight, in_place is not None)
            if in_place is not None and replays:  # the cache has one more block, the spare one
                self._graphs = DecodeGraphs(self._compute, self.cache, in_place, config.max_positions)

    @property
    def argmax(self) -> None:
        return None

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self._nonfinite_blocks

    @torch.inference_mode()
    def step(self, rows: StepInput) -> Tensor:
        """The result is valid until the next step. Raises StepInputError before anything is computed."""
        self.check(rows)
        slots = self._slots(rows, rows.block_tables) if self.cache is not None else []
        own = [] if rows.window_tables is None else self._slots(rows, self._window_tables(rows))
        self._nonfinite_blocks -= self._blocks_of([slot for slot in slots + own if slot % self.block_size == 0])
        self._clear_begun_blocks(rows)
        if self._graphs is not None and self._graphs.padding(rows) >= 0:
            out, finite = self._graphs.step(rows, slots)
        else:
            out, finite = self._compute(self._batch(rows, slots))
        if finite is not None:
            good = finite.tolist()
            for each in filter(None, (slots, own)):
                self._record_nonfinite(good, each)
        return out

    @torch.inference_mode()
    def step_in_turns(self, rows: StepInput, turn_s: float) -> Iterator[Tensor | None]:
        """See models.executors.contract.TurnExecutor; a turn ends after a piece of a block."""
        assert self.cache is None, "a step with a cache is not interrupted: the next one would change its blocks"
        self.check(rows)
        for states in in_turns(self.network.forward_in_pieces(self._batch(rows, [])), turn_s):
            yield None if states is None else self._apply_head(states)

    def check(self, rows: StepInput) -> None:
        """StepInputError for a number that is out of range, which on a GPU would end the process's use of the
        device."""
        self._bounds.check(rows, self._loras)

    def step_with_states(self, rows: StepInput) -> tuple[Tensor, Tensor]:
        """The result of `step`, and the output of each layer for each row: [depth, T, W] float32, before the final
        norm.

        All rows must be output rows, since the last layer computes no others. No recorded graph is replayed.
        """
        if len(rows.output_rows) != len(rows.tokens):
            raise StepInputError(
                f"output_rows: there are {len(rows.output_rows)}, which should be {len(rows.tokens)}, all"
            )
        kept: list[Tensor] = []
        graphs, self._graphs = self._graphs, None
        hooks = [
            block.register_forward_hook(lambda *seen: kept.append(seen[-1].float())) for block in self.network.blocks
        ]
        try:
            return self.step(rows), torch.stack(kept)
        finally:
            self._graphs = graphs
            for hook in hooks:
                hook.remove()

    def _compute(self, batch: RaggedBatch) -> StepOutput:
        states = self.network(batch)  # [M, W]
        view = batch.cache
        finite = None if view is None else view.are_finite()
        if finite is not None and batch.states is not None:
            states_finite = batch.states.state.are_finite(batch.states.writes)  # [N]
            finite = finite & states_finite.repeat_interleave(torch.tensor(batch.lengths, device=self.device))
        return self._apply_head(states), finite

    def _apply_head(self, states: Tensor) -> Tensor:
        """[M, W] to the output of a step, as float32."""
        out: Tensor = states if self.head is None else self.head(states)
        return out.float()

    @torch.inference_mode()
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        if self.cache is not None:
            self._bounds.check_copies(blocks)
            first = self.block_count
            self.cache.copy([pair for pair in blocks if pair[0] < first])
            own = [(source - first, target - first) for source, target in blocks if source >= first]
            self.cache.copy(own, windowed=True)
            copy_marks(self._nonfinite_blocks, blocks)

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        if adapter.keys() - set(self._linear_names.values()):
            message = "products are exact to the bit here, and sums with an adapter's updates are not: load it merged"
            raise UnsupportedError(message)

        def convert(low: LowRank) -> LowRank:
            sides = (convert_by_parts(side, self.dtype, self.device, yield_turn) for side in (low.a, low.b))
            return LowRank(*sides)

        self._attached += 1
        number = self._attached  # others may be attached meanwhile
        self._loras[number] = {name: convert(adapter[name]) for name in adapter}
        return number

    def detach(self, number: int) -> None:
        del self._loras[number]

    def padding(self, rows: StepInput) -> int:
        if self._kernel is not None:
            return 0 if self._graphs is None else max(self._graphs.padding(rows), 0)
        lengths = [end - start for start, end in pairwise(rows.starts)]
        return count_padding_rows(lengths, self._key_counts(rows))

    def _batch(self, rows: StepInput, slots: list[int]) -> RaggedBatch:
        if self._kernel is not None:
            step_buffer = StepBuffer(rows, slots, max(map(len, rows.block_tables)))
            read = step_buffer.view_batch(
                step_buffer.copy_to(self.device), self._kernel, self.cache, self.network.config.max_positions
            )
            return replace(read, additions=self._adapter_updates(rows), states=self._state_view(rows))
        cache = None
        if self.cache is not None:
            places = self.cache.storage_rows(self._tensor(slots))
            cache = CacheView(self.cache, places, rows.block_tables, self._key_counts(rows))
            if rows.window_tables is not None:
                first, tables = self.block_count, self._window_tables(rows)
                own = self._tensor(self._slots(rows, tables)) - first * self.block_size
                tables = [[block - first for block in table] for table in tables]
                cache = replace(cache, window_rows=self.cache.storage_rows(own), window_tables=tables)
        return RaggedBatch(
            tokens=self._tensor(rows.tokens),
            positions=self._tensor(rows.positions),
            starts=tuple(rows.starts),
            segments=None if rows.segments is None else self._tensor(rows.segments),
            cache=cache,
            output_rows=self._tensor(rows.output_rows) if len(rows.output_rows) < len(rows.tokens) else None,
            additions=self._adapter_updates(rows),
            hidden=None if rows.hidden is None else tuple(rows.hidden),
            states=self._state_view(rows),
        )

    def _state_view(self, rows: StepInput) -> StateView | None:
        if rows.states is None or self.states is None:
            return None
        reads, writes, border_rows, borders = (list(column) for column in zip(*rows.states, strict=True))
        return StateView(self.states, self._tensor(reads), self._tensor(writes), border_rows, borders)

    def _adapter_updates(self, rows: StepInput) -> AdapterUpdates | None:
        if rows.adapters is None or not any(rows.adapters):
            return None
        each = expand_adapters(rows.adapters, rows.starts)
        output_adapters = [each[row] for row in rows.output_rows]
        return AdapterUpdates(
            self._linear_names,
            {number: self._loras[number] for number in {*rows.adapters} - {0}},  # it may be detached between turns
            AdapterTiles.of(each, self.device),
            AdapterTiles.of(output_adapters, self.device),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _slots(self, rows: StepInput, tables: Sequence[Sequence[int]]) -> list[int]:
        """The cache slot of each row's key and value."""
        size = self.block_size
        return [
            table[position // size] * size + position % size
            for table, (start, end) in zip(tables, pairwise(rows.starts), strict=True)
            for position in rows.positions[start:end]
        ]

    def _window_tables(self, rows: StepInput) -> list[list[int]]:
        """[N] the blocks of windowed layers from the first token on.

        In place of a missing block is the sequence's first one that is there. Keys before the window are masked, and
        still multiplied: another sequence's block could hold NaN.
        """
        counts = [-(-count // self.block_size) for count in self._key_counts(rows)]
        tables = zip(rows.window_tables or [], counts, strict=True)
        return [[table[0]] * (count - len(table)) + table for table, count in tables]

    def _key_counts(self, rows: StepInput) -> list[int]:
        return [rows.positions[end - 1] + 1 for end in rows.starts[1:]]

    def _record_nonfinite(self, finite: list[bool], slots: list[int]) -> None:
        bad = [slot for slot, good in zip(slots, finite, strict=True) if not good]
        self._nonfinite_blocks |= self._blocks_of(bad)

    def _clear_begun_blocks(self, rows: StepInput) -> None:
        """Zero the blocks that a sequence begins in this step and does not fill. The kernel reads no slots behind a
        sequence's last one."""
        if self.cache is None or self._kernel is not None:
            return
        self.cache.clear(self._begun_blocks(rows, rows.block_tables))
        if rows.window_tables is not None:
            begun = self._begun_blocks(rows, self._window_tables(rows))
            self.cache.clear([block - self.block_count for block in begun], windowed=True)

    def _begun_blocks(self, rows: StepInput, tables: Sequence[Sequence[int]]) -> list[int]:
        size, begun = self.block_size, []
        for table, (start, end) in zip(tables, pairwise(rows.starts), strict=True):
            last = rows.positions[end - 1]
            index, filled = divmod(last + 1, size)
            if filled and rows.positions[start] <= index * size:
                begun.append(table[index])
        return begun

    def _blocks_of(self, slots: list[int]) -> set[int]:
        return {slot // self.block_size for slot in slots}
