"""SNAIL: outputs depend on all earlier inputs and on no later ones; it learns few-shot classification."""

import pytest
import torch
from torch.nn import functional as F

from polyhead.models.literature.snail import (
    AttentionBlock,
    CausalConvolution,
    DenseBlock,
    Snail,
    SnailConfig,
    TemporalBlock,
)
from polyhead.training.experiments.few_shot import (
    TEST_EPISODES,
    Episodes,
    accuracy,
    is_class_seen,
    nearest_accuracy,
    train_network,
)


def reach(network: torch.nn.Module, inputs: int, times: int) -> torch.Tensor:
    """[T, T]: whether the output at a time (row) depends on the input at another (column)."""
    x = torch.randn(times, inputs, requires_grad=True)
    outputs = network(x[None])[0]
    rows = [torch.autograd.grad(outputs[t].sum(), x, retain_graph=True)[0].abs().amax(1) > 0 for t in range(times)]
    return torch.stack(rows)


def test_a_causal_convolution_is_torch_s_shifted() -> None:
    ours = CausalConvolution(3, 5, dilation=4)
    x = torch.randn(2, 11, 3)
    weight = torch.stack((ours.then.weight, ours.now.weight), dim=2)
    theirs = F.conv1d(F.pad(x.mT, (4, 0)), weight, ours.now.bias, dilation=4).mT
    assert torch.allclose(ours(x), theirs, atol=1e-6)


def test_a_block_keeps_its_inputs() -> None:
    x = torch.randn(2, 7, 3)
    for block in (DenseBlock(3, 4, 1), TemporalBlock(3, 4, 7), AttentionBlock(3, 5, 6)):
        assert torch.equal(block(x)[..., :3], x)
    assert TemporalBlock(3, 4, 7).outputs == 15
    assert TemporalBlock(3, 4, 8)(torch.randn(8, 3)).size(-1) == TemporalBlock(3, 4, 8).outputs == 15
    assert TemporalBlock(3, 4, 9).outputs == 19


@pytest.mark.parametrize("times", [1, 2, 3, 8, 9, 13])
def test_convolutions_depend_on_all_earlier_times_and_no_later(times: int) -> None:
    assert torch.equal(reach(TemporalBlock(3, 4, times), 3, times), torch.ones(times, times).tril().bool())


@pytest.mark.parametrize("attention", [((8, 8),), ((8, 8), (4, 6))])
def test_outputs_do_not_depend_on_later_inputs(attention: tuple[tuple[int, int], ...]) -> None:
    network = Snail(SnailConfig(inputs=3, classes=4, times=9, filters=5, attention=attention))
    assert torch.equal(reach(network, 3, 9), torch.ones(9, 9).tril().bool())
    x = torch.randn(2, 9, 3)
    changed = torch.cat((x[:, :5], torch.randn(2, 4, 3)), dim=1)
    assert torch.equal(network(x)[:, :5], network(changed)[:, :5])
    assert torch.allclose(network(x)[:, :5], network(x[:, :5]), atol=1e-6)
    with pytest.raises(ValueError, match="10 times are more than the 9"):
        network(torch.randn(1, 10, 3))


def test_episodes_are_balanced_and_give_labels_one_time_later() -> None:
    episodes = Episodes(ways=4, shots=3)
    inputs, labels = episodes.sample_batch(50, torch.Generator().manual_seed(0))
    assert inputs.shape == (50, 13, episodes.inputs)
    assert (F.one_hot(labels[:, :-1]).sum(1) == 3).all()
    given_labels = inputs[..., episodes.points :]
    assert torch.equal(given_labels[:, 1:].argmax(-1), labels[:, :-1])
    assert (given_labels[:, 0] == 0).all()
    assert (given_labels[:, 1:].sum(-1) == 1).all()
    assert is_class_seen(torch.tensor([[1, 0, 1, 1, 0, 2]])).tolist() == [[False, False, True, True, True, False]]
    plain = Episodes(drift=0).sample_batch(200, torch.Generator().manual_seed(0))
    assert nearest_accuracy(plain, 16) > 0.9
    assert nearest_accuracy(Episodes(drift=3).sample_batch(200, torch.Generator().manual_seed(0)), 16) < 0.7, (
        "with drift, the nearest example is not of the class"
    )


def test_it_learns_few_shot_classification() -> None:
    torch.manual_seed(0)
    episodes = Episodes(drift=0.5)
    network = Snail(SnailConfig(inputs=episodes.inputs, classes=episodes.ways, times=episodes.length))
    test_episodes = episodes.sample_batch(TEST_EPISODES, torch.Generator().manual_seed(1))
    assert accuracy(network, test_episodes) < 0.3, "an untrained network is near chance, 0.2"
    train_network(episodes, network, steps=130)
    assert accuracy(network, test_episodes) > 0.45
    inputs, labels = test_episodes
    without_labels = torch.cat(
        (inputs[..., : episodes.points], torch.zeros(TEST_EPISODES, episodes.length, episodes.ways)), dim=-1
    )
    assert accuracy(network, (without_labels, labels)) < 0.3, "without labels, accuracy is near chance"
