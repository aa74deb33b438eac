"""Dropout: a share of zeros, and the others scaled."""

import pytest
import torch

from polyhead.training.loop.dropout import apply_dropout


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_zeroes_a_share_and_scales_the_rest(share: float) -> None:
    x = torch.ones(333, 301, requires_grad=True)
    dropped = apply_dropout(x, share)
    assert set(dropped.flatten().tolist()) == {0.0, torch.tensor(1 / (1 - share)).item()}
    by_place = (dropped == 0).flatten()[:100_000].view(-1, 4).float().mean(dim=0)  # by position in a draw of four
    assert by_place.tolist() == pytest.approx([share] * 4, abs=0.02)
    assert not torch.equal(dropped, apply_dropout(x, share))
    dropped.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, dropped)
