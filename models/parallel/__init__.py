"""One network computed by several processes, a share of every layer each: for what is larger than one device.

Knows checkpoints' names of nothing, and no requests.  The one idea is Megatron-LM's (Shoeybi et al. 2019,
arXiv:1909.08053): of two products in a row the first is split by what it gives and the second by what it takes, so what
is between them (heads of attention, features of an MLP) is never exchanged, and each pair costs one sum over all.  The
networks themselves don't know of it: it is put around them, as quantisation is.
"""

from .parallel_executor import Follower, Leader
from .process_group import Group, Way
from .share import Cut, Share, local, unsplit
from .split import cut, joined, shard
from .step_messages import Ask, Asked

__all__ = [
    "Ask",
    "Asked",
    "Cut",
    "Follower",
    "Group",
    "Leader",
    "Share",
    "Way",
    "cut",
    "joined",
    "local",
    "shard",
    "unsplit",
]
