"""Mixtures of experts in the compiled step: ties, scores that are not finite, adapters beside them, and packing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision, free_weights
from polyhead.models.network.experts import MixtureOfExperts
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.model_config import ExpertConfig
from tests.models.native.test_step import (
    BLOCKS,
    LLAMA,
    MIXTURES,
    SETS,
    all_logits,
    head,
    network,
    pytestmark,
    rows_of,
)
from tests.support.spread import spread

__all__ = ["pytestmark"]


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("groups", [0, 2])
def test_of_equal_scores_the_lowest_numbers_are_chosen(instructions: str, groups: int) -> None:
    experts = ExpertConfig(count=6, chosen=2, width=40)
    several = replace(experts, groups=groups, chosen_groups=min(groups, 1))
    net, last = network(replace(LLAMA, depth=1, experts=several)), head(LLAMA)
    mixture = net.blocks[0].mlp
    assert isinstance(mixture, MixtureOfExperts)
    nn.init.zeros_(mixture.router.weight)
    executor = NativeExecutor(net, last, precision="float32", block_count=BLOCKS, instructions=instructions)
    alone = network(replace(LLAMA, depth=1, experts=replace(experts, count=2)))  # half of the weight on each
    names = alone.state_dict()
    alone.load_state_dict(
        {name: value[: len(names[name])] for name, value in net.state_dict().items() if name in names}
    )
    expected = all_logits(LLAMA, TorchExecutor(alone, last, block_count=BLOCKS, block_size=16))
    torch.testing.assert_close(all_logits(LLAMA, executor), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("instructions", "name", "wrong"), spread(SETS, MIXTURES, [float("nan"), float("inf"), float("-inf")])
)
def test_routers_that_are_not_finite_choose_experts_that_exist(name: str, wrong: float, instructions: str) -> None:
    """As the sanitized step proves; here a row either has no finite output or has that of other experts."""
    config = MIXTURES[name]
    net, last = network(config), head(config)
    for module in net.modules():
        if isinstance(module, MixtureOfExperts):
            with torch.no_grad():
                module.router.weight[0] = wrong
    executor = NativeExecutor(net, last, block_count=BLOCKS, threads=2, instructions=instructions)
    logits = all_logits(config, executor)
    assert torch.equal(logits.isfinite().all(-1), logits.isfinite().any(-1))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", ["qwen, experts", "all experts chosen, parallel parts"])
def test_adapters_of_attention_and_of_plain_layers_equal_torch(name: str, instructions: str) -> None:
    config = MIXTURES[name]
    net, last = network(config), head(config)
    shapes = adaptable_shapes(config)
    assert "blocks.0.mlp.up" not in shapes
    torch.manual_seed(7)
    lora = {
        name: LowRank(torch.randn(3, inputs) / 8, torch.randn(outputs, 3) / 8)
        for name, (inputs, outputs) in shapes.items()
    }
    found = []
    for executor in (
        TorchExecutor(net, last, block_count=BLOCKS, block_size=16),
        NativeExecutor(net, last, precision="float32", block_count=BLOCKS, threads=2, instructions=instructions),
    ):
        number = executor.attach(lora)
        rows = rows_of([([5, 6, 7, 8], 0, [3]), ([9] * 150, 0, list(range(10, 20))), ([1], 0, [2])], last_only=False)
        found.append(executor.step(replace(rows, adapters=[number, number, 0])).clone())
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_experts_are_packed_and_freed_one_by_one(precision: Precision) -> None:
    config = MIXTURES["qwen, experts"]
    expected = all_logits(
        config, NativeExecutor(network(config), head(config), precision=precision, block_count=BLOCKS)
    )
    sizes = dict[nn.Module, int]()

    @contextmanager
    def load_part(part: nn.Module) -> Iterator[None]:
        sizes[part] = sum(parameter.numel() for parameter in part.parameters())
        yield
        free_weights(part)

    net = network(config)
    executor = NativeExecutor(net, head(config), precision=precision, block_count=BLOCKS, load_part=load_part)
    assert torch.equal(all_logits(config, executor), expected)
    mixture = net.blocks[0].mlp
    assert isinstance(mixture, MixtureOfExperts)
    assert {*mixture.experts, mixture.shared} <= sizes.keys()
    attention = sum(a * b for name, (a, b) in adaptable_shapes(config).items() if name.startswith("blocks.0"))
    routers = 7 * config.width
    assert sizes[net.blocks[0]] == attention + routers + 2 * config.width + 2 * config.head_width
