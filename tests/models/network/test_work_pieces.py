"""Heads that are computed in pieces: no piece is large, and the pieces change no bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from polyhead.models.network import decision_heads, work_pieces
from polyhead.models.network.decision_heads import LabelSchemaHead, OptionMarkHead, attend_in_pieces
from polyhead.models.network.label_heads import SpanLabelHead, SpanLabelSpec, TextLabelHead, TextLabelSpec
from polyhead.models.network.work_pieces import LEAST_ROWS, PIECE_PRODUCTS, PIECE_ROWS, Pieces, finish, rows_per_piece

WIDTH, WORDS, LABELS = 64, 90, 40
CONFIG = cast(Any, SimpleNamespace(state_width=WIDTH))
LABEL_ROWS, TEXT_ROWS = tuple(range(LABELS)), tuple(range(LABELS, LABELS + WORDS))
HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, Any], int]] = {  # with the least number of pieces
    "spans": (lambda: SpanLabelHead(CONFIG, SpanLabelSpec(32, True, 2, 12)), (LABEL_ROWS, TEXT_ROWS), 60),
    "words": (lambda: SpanLabelHead(CONFIG, SpanLabelSpec(WIDTH, False, 1, 0)), (LABEL_ROWS, TEXT_ROWS), 200),
    "texts": (
        lambda: TextLabelHead(CONFIG, TextLabelSpec("avg", 32, "gelu", "weighted", recurrent=True)),
        (LABEL_ROWS, TEXT_ROWS),
        15,
    ),
    "marks": (lambda: OptionMarkHead(CONFIG, 2), (LABEL_ROWS, 1), 30),
    "schema": (lambda: LabelSchemaHead(CONFIG), (LABEL_ROWS, 0), 3),
}


def count_pieces(pieces: Pieces[Tensor]) -> tuple[int, Tensor]:
    count = 0
    while True:
        try:
            next(pieces)
        except StopIteration as over:
            return count, over.value
        count += 1


@pytest.mark.parametrize("kind", HEADS)
def test_a_text_of_much_work_is_many_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, rows, least = HEADS[kind]
    head = cast(Any, build())
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    states = torch.randn(LABELS + WORDS, WIDTH, generator=generator)
    with torch.inference_mode():
        whole = head.score(states, *rows)
        few, _ = count_pieces(head.score_in_pieces(states, *rows))
        for module in (work_pieces, decision_heads):
            monkeypatch.setattr(module, "PIECE_PRODUCTS", 1 << 10)
        many, scores = count_pieces(head.score_in_pieces(states, *rows))
    assert few < 40
    assert many >= max(least, few)
    torch.testing.assert_close(scores, whole, rtol=1e-4, atol=1e-5)


def test_rows_of_a_piece() -> None:
    assert rows_per_piece(1) == PIECE_ROWS
    assert rows_per_piece(PIECE_PRODUCTS) == LEAST_ROWS, "however large a row is"
    assert rows_per_piece(PIECE_PRODUCTS // 100) == 64


def test_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 3, 70, 8, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
    torch.testing.assert_close(finish(attend_in_pieces(query, key, value)), expected)
    monkeypatch.setattr(decision_heads, "PIECE_PRODUCTS", 1)
    monkeypatch.setattr(decision_heads, "ATTENDING_ROWS", 16)
    count, mixed = count_pieces(attend_in_pieces(query, key, value))
    assert count == 12, "each head in four parts of 16 rows and more"
    torch.testing.assert_close(mixed, expected)
