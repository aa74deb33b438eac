"""What computes a checkpoint: the compiled step or torch, as the settings and this machine have it.

Knows no requests.  Whoever calls is on the thread that will compute.
"""

from collections.abc import Callable
from typing import cast

from torch import nn

from models.checkpoint import Checkpoint
from models.executor import Executor
from models.heads import LanguageHead
from models.invariant import make_head_invariant, make_invariant
from models.native.executor import NativeExecutor
from models.native.plan import Precision, ignore
from models.torch_executor import TorchExecutor
from service.place import placed
from service.settings import Settings


def prepare(loaded: Checkpoint, settings: Settings, breathe: Callable[[], None] = lambda: None) -> None:
    """Before its executor is made: see to it that answers depend on nothing else, where that takes anything."""
    if placed(settings).instructions:
        make_head_invariant(loaded.head)  # the rest is by construction
    elif settings.deterministic:
        make_invariant(loaded.network, loaded.head, breathe)


def executor_of(
    loaded: Checkpoint, settings: Settings, blocks: int = 0, packed: Callable[[nn.Module], None] = ignore
) -> Executor:
    """`blocks` of the cache of a generator.

    The compiled step has packed weights of its own; `packed` hears of each part of the network that it needs no more.
    """
    place = placed(settings)
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    if not place.instructions:
        size = settings.block_size if blocks else 0
        return TorchExecutor(loaded.network, head, block_count=blocks, block_size=size)
    return NativeExecutor(
        loaded.network,
        head,
        precision=cast(Precision, place.precision),
        block_count=blocks,
        threads=place.threads,
        instructions=place.instructions,
        done=packed,
    )
