"""One network computed by several processes, a share of every layer each: for what is larger than one device.

Knows checkpoints' names of nothing, and no requests.  The one idea is Megatron-LM's (Shoeybi et al. 2019,
arXiv:1909.08053): of two products in a row the first is split by what it gives and the second by what it takes, so what
is between them (heads of attention, features of an MLP) is never exchanged, and each pair costs one sum over all.  The
networks themselves don't know of it: it is put around them, as quantisation is.
"""

from .parallel_executor import FollowerExecutor, LeaderExecutor
from .process_group import Collectives, ProcessGroup
from .share import Cut, Share, share_config, split_problem
from .split import cut_parameters, insert_collectives, shard_network
from .step_messages import ShareRequest, StepCommand

__all__ = [
    "Collectives",
    "Cut",
    "FollowerExecutor",
    "LeaderExecutor",
    "ProcessGroup",
    "Share",
    "ShareRequest",
    "StepCommand",
    "cut_parameters",
    "insert_collectives",
    "shard_network",
    "share_config",
    "split_problem",
]
