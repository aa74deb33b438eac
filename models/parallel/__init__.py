"""Tensor parallelism: one network computed by several processes, for networks larger than one device.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), of two consecutive products the first is split by its outputs
and the second by its inputs. What is between them (attention heads, features of an MLP) is never exchanged, and each
pair of products needs one sum over all processes. The networks are wrapped from outside.
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
