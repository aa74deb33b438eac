"""Executors of a share: a leader, which is called like any executor, and its followers. Before each step the leader
sends its input to the followers, and all compute it at the same time."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.turns import YieldTurn, keep_turn
from ..executors.contract import StepInput
from ..executors.cuda_graphs import PagedAttention, StepOutput
from ..executors.torch_executor import TorchExecutor
from ..network.heads import LanguageHead
from ..network.lora import Lora
from ..network.ragged import RaggedBatch
from ..network.transformer import Transformer
from .process_group import ProcessGroup
from .step_messages import StepCommand, encode_pairs, encode_step

OnFailure = Callable[[], object]


class FollowerExecutor(TorchExecutor):
    """Computes this process's share of each step; a generator's logits are complete on the first process only."""

    def __init__(
        self,
        group: ProcessGroup,
        network: Transformer,
        head: LanguageHead | None = None,
        *,
        blocks: tuple[int, int] = (0, 0),
        in_place: PagedAttention | None = None,
    ) -> None:
        """`blocks`: how many, and of how many tokens."""
        count, size = blocks
        super().__init__(network, head, block_count=count, block_size=size, in_place=in_place)
        self.group = group

    def _compute(self, batch: RaggedBatch) -> StepOutput:
        """A row is finite only if it is finite in every process's share."""
        out, finite = super()._compute(batch)
        return out, None if finite is None else self.group.all_true(finite)

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:  # noqa: ARG002
        raise UnsupportedError(
            "an adapter cannot be attached to a network that several processes compute: load it merged"
        )


class LeaderExecutor:
    """The executor on the first process, for the model with this `number`; the followers compute the same steps.

    A step that fails in the middle leaves the followers in another state. Then no step can be computed any more, and
    `lost` is called.
    """

    argmax = None

    def __init__(self, own: FollowerExecutor, number: int, lost: OnFailure) -> None:
        self._executor, self._number, self._on_failure = own, number, lost
        self.block_size, self.block_count, self.state_count = own.block_size, own.block_count, 0
        self.window_blocks, self.window = own.window_blocks, own.window

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self._executor.nonfinite_blocks

    def step(self, rows: StepInput) -> Tensor:
        self._executor.check(rows)  # before the followers get it
        with ExitStack() as undo:
            undo.callback(self._on_failure)
            self._executor.group.broadcast_message([StepCommand.STEP, self._number, *encode_step(rows)])
            out = self._executor.step(rows)
            undo.pop_all()
        return out

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        if not blocks:
            return
        with ExitStack() as undo:
            undo.callback(self._on_failure)
            self._executor.group.broadcast_message([StepCommand.COPY, self._number, *encode_pairs(blocks)])
            self._executor.copy(blocks)
            undo.pop_all()

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        return self._executor.attach(adapter, yield_turn)

    def detach(self, number: int) -> None:
        self._executor.detach(number)

    def padding(self, rows: StepInput) -> int:
        return self._executor.padding(rows)
