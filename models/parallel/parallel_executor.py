"""Executors of a share: one that leads, and those that follow it.

Knows no processes.  The one idea: whoever leads is an executor like any other, to whoever calls it; before it computes
a step it tells the others of it, and all compute the same at the same time.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from torch import Tensor

from ..core.errors import UnsupportedError
from ..executors.contract import Rows
from ..executors.cuda_graphs import Computed, InPlace
from ..executors.torch_executor import TorchExecutor
from ..network.heads import LanguageHead
from ..network.lora import Lora
from ..network.ragged import Ragged
from ..network.transformer import Transformer
from .process_group import Group
from .step_messages import Ask, flat, packed

Lost = Callable[[], object]


class Follower(TorchExecutor):
    """Computes the share of `group` of each step; a generator's logits come to the first alone."""

    def __init__(
        self,
        group: Group,
        network: Transformer,
        head: LanguageHead | None = None,
        *,
        blocks: tuple[int, int] = (0, 0),
        in_place: InPlace | None = None,
    ) -> None:
        """`blocks`: how many, and of how many tokens."""
        count, size = blocks
        super().__init__(network, head, block_count=count, block_size=size, in_place=in_place)
        self.group = group

    def _compute(self, batch: Ragged) -> Computed:
        """A block holds no numbers where anybody's part of it holds none."""
        out, finite = super()._compute(batch)
        return out, None if finite is None else self.group.agree(finite)

    def attach(self, adapter: Lora) -> int:  # noqa: ARG002
        raise UnsupportedError("an adapter is not laid over a network that several compute together: load it merged")


class Leader:
    """An executor over that of the first, of model `number`; the others follow what it computes.

    A step that fails in the middle leaves the others in another place than itself: nothing can be computed together
    any more, which `lost` is told.
    """

    likeliest = None

    def __init__(self, own: Follower, number: int, lost: Lost) -> None:
        self._own, self._number, self._lost = own, number, lost
        self.block_size, self.block_count = own.block_size, own.block_count

    @property
    def poisoned(self) -> AbstractSet[int]:
        return self._own.poisoned

    def step(self, rows: Rows) -> Tensor:
        self._own.check(rows)  # before it is sent to the others
        with ExitStack() as undo:
            undo.callback(self._lost)
            self._own.group.tell([Ask.STEP, self._number, *packed(rows)])
            out = self._own.step(rows)
            undo.pop_all()
        return out

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        if not blocks:
            return
        with ExitStack() as undo:
            undo.callback(self._lost)
            self._own.group.tell([Ask.COPY, self._number, *flat(blocks)])
            self._own.copy(blocks)
            undo.pop_all()

    def attach(self, adapter: Lora) -> int:
        return self._own.attach(adapter)

    def detach(self, number: int) -> None:
        self._own.detach(number)

    def padding(self, rows: Rows) -> int:
        return self._own.padding(rows)
