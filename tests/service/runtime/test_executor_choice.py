"""What follows from a model's placement: how much the attention of a token costs."""

from dataclasses import replace

import pytest
import torch

from polyhead.service.runtime.executor_choice import NARROW_ATTENTION, context_cost
from polyhead.service.runtime.placement import Placement, Precision
from tests.models.native.test_step import LLAMA

SMALL = replace(
    LLAMA, width=576, heads=9, kv_heads=3, head_width=64, mlp_width=1536, depth=30, gated_mlp=True, window=0
)


def placed(precision: Precision, instructions: str) -> Placement:
    return Placement(torch.device("cpu"), precision, threads=1, block_size=16, instructions=instructions)


def test_the_cost_of_a_context_is_that_of_its_multiplications() -> None:
    products = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536
    assert context_cost(placed("float32", ""), SMALL) == pytest.approx(2 * 576 / products)
    assert context_cost(placed("int8", "avx2"), SMALL) == pytest.approx(NARROW_ATTENTION * 2 * 576 / products)


def test_a_gpu_has_no_cost_of_a_context() -> None:
    assert context_cost(replace(placed("bfloat16", ""), device=torch.device("cuda")), SMALL) == 0


def test_windowed_layers_do_not_count() -> None:
    every = context_cost(placed("int8", "avx2"), SMALL)
    half = replace(SMALL, window=512, windowed=tuple(layer % 2 == 0 for layer in range(30)))
    assert context_cost(placed("int8", "avx2"), half) == pytest.approx(every / 2)
    assert context_cost(placed("int8", "avx2"), replace(SMALL, window=512)) == 0
