"""Narrow arithmetic against float32 on networks with the outliers of real ones; see tests/zoo.py.

Each test is one network on all instruction sets of this machine.  What is compared is what users notice: by how much
the distribution of the next token changes, or the states of an encoder.
"""

import random
from copy import deepcopy
from itertools import accumulate
from pathlib import Path

import gguf_files
import pytest
import torch
import zoo
from test_native import pieces, rows_of
from test_native_int4 import snap
from torch import Tensor
from zoo import ENCODERS, GENERATORS, LENGTHS, RECIPES, Grown, grown

from models.checkpoint import load
from models.checkpoint.precision import precision_of
from models.executor import Executor, Rows
from models.native.executor import NativeExecutor
from models.native.library import runnable
from models.native.plan import Precision
from models.ragged import Ragged
from models.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(not runnable(), reason="no compiler was there when polyhead was installed")

SETS = runnable()
BLOCKS = 16
KINDS = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")


def native(of: Grown, precision: Precision, instructions: str, threads: int = 1) -> NativeExecutor:
    count = BLOCKS if of.head else 0
    return NativeExecutor(
        of.network, of.head, precision=precision, block_count=count, threads=threads, instructions=instructions
    )


def tables(choice: random.Random) -> list[list[int]]:
    """Blocks of the cache for each text, in any order."""
    free = choice.sample(range(BLOCKS), BLOCKS)
    return [[free.pop() for _ in range(-(-length // 16))] for length in LENGTHS]


def all_rows(of: Grown) -> Rows:
    """Every token of all texts, in one step."""
    asked = zip(zoo.texts(of.network.config), tables(random.Random(1)), strict=True)
    return rows_of([(tokens, 0, table if of.head else []) for tokens, table in asked], last_only=False)


def answers(of: Grown, executor: Executor) -> Tensor:
    """[T, V] logarithms of chances, or [T, W] states."""
    out = executor.step(all_rows(of)).clone()
    return out.log_softmax(-1) if of.head else out
