"""Heads: the same output from their needed rows only, and in half precision."""

from copy import deepcopy
from typing import Any, get_args

import pytest
import torch

from polyhead.models.network.heads import LabelScoring, MaskHead, Pooler, Pooling, SequenceHead, TokenHead
from tests.models.architectures.test_families import CONFIG


@pytest.mark.parametrize(
    "head",
    [
        *(SequenceHead(CONFIG, 3, LabelScoring(kind), "softmax") for kind in ("cls", "mean", "last")),
        TokenHead(CONFIG, 3, "softmax"),
        MaskHead(CONFIG, LabelScoring(activation="gelu", norm=True)),
        *(Pooler(kind, True) for kind in get_args(Pooling)),
    ],
)
@torch.no_grad()
def test_a_head_gives_the_same_output_from_its_needed_rows_only(head: Any) -> None:
    states, starts = torch.randn(10, CONFIG.width), [0, 4, 5, 10]
    rows, narrowed = head.needed_rows(starts)
    assert torch.equal(head(states[rows], narrowed), head(states, starts))


@pytest.mark.parametrize(
    "head",
    [
        SequenceHead(CONFIG, 3, LabelScoring(), "softmax"),
        TokenHead(CONFIG, 3, "softmax"),
        MaskHead(CONFIG, LabelScoring(activation="gelu", norm=True)),
        Pooler("mean", True),
    ],
)
@torch.no_grad()
def test_heads_in_half_precision(head: Any) -> None:
    """The executor's states are float32 whatever the network's precision is."""
    states = torch.randn(4, CONFIG.width)
    rows, starts = head.needed_rows([0, 3, 4])
    exact = head(states[rows], starts)
    half = deepcopy(head).to(torch.bfloat16)(states[rows], starts)
    assert half.dtype == torch.float32
    assert torch.allclose(half, exact, atol=0.05)
