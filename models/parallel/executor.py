"""Executors of a share: one that leads, and those that follow it.

Knows no processes.  The one idea: whoever leads is an executor like any other, to whoever calls it; before it computes
a step it tells the others of it, and all compute the same at the same time.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack

from torch import Tensor

from models.errors import UnsupportedError
from models.executor import Rows
from models.graphs import Computed, InPlace
from models.heads import LanguageHead
from models.lora import Lora
from models.parallel.group import Group
from models.parallel.messages import Ask, flat, packed
from models.ragged import Ragged
from models.torch_executor import TorchExecutor
from models.transformer import Transformer

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
