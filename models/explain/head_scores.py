"""Raw scores of a head: all, or a few cells of the table.

The last operation of every head is a product; a cell needs one row of states and one of the matrix. So logits over the
whole vocabulary are never computed, or differentiated, for one token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..network.encoder_decoder import EncoderDecoder
from ..network.heads import LanguageHead, MaskHead, Pooler, SequenceHead, TokenHead
from ..recurrent.recurrent_network import RecurrentTranslator
from .explain_types import Goal

FinalProduct = tuple[Tensor, Tensor, Tensor | None]  # the last product: its input rows, matrix and bias


class GoalReader:
    """Computes the goals' values of texts from their states."""

    def __init__(self, head: nn.Module, goals: Sequence[Goal], compared: Tensor | None = None) -> None:
        """`compared` [1, W]: of an embedder, the vector of the other text."""
        self.head, self.compared_vector, self.sizes = head, compared, [len(goal) for goal in goals]
        self.rows = [row for goal in goals for row, _ in goal]
        self.columns = [column for goal in goals for _, column in goal]

    def __call__(self, states: Tensor) -> Tensor:
        """[N, T, W] states of N texts to [N, G]."""
        cells = self.read_cells(states)
        return torch.stack([some.sum(dim=1) for some in torch.split(cells, self.sizes, dim=1)], dim=1)

    def read_cells(self, states: Tensor) -> Tensor:
        """As the call, for each cell: [N, C]."""
        if isinstance(self.head, Pooler):
            assert self.compared_vector is not None
            return similarity(self.head, states, self.compared_vector).expand(-1, len(self.rows))
        rows, matrix, bias = final_product(self.head, states, self.rows)  # [N, C, W]
        values = (rows * matrix[self.columns]).sum(dim=-1)
        values = values if bias is None else values + bias[self.columns]
        if isinstance(self.head, EncoderDecoder):
            return self.head.limit(values)
        return self.head.scale(values) if isinstance(self.head, LanguageHead) else values


def final_product(head: nn.Module, states: Tensor, rows: list[int]) -> FinalProduct:
    """The input of the last product for `rows` of each text [N, R, W], from states [N, T, W]; and the product's matrix
    and bias."""
    match head:
        case SequenceHead():
            pooled = head.hidden_states(states.flatten(0, 1), text_starts(states))
            return pooled[:, None].expand(-1, len(rows), -1), head.out.weight, head.out.bias
        case TokenHead():
            return head.hidden_states(states[:, rows]), head.out.weight, head.out.bias
        case MaskHead():
            return head.hidden_states(states[:, rows]), head.output.weight, head.output.bias
        case LanguageHead():
            return head.transform(states[:, rows]), head.output.weight, head.output.bias
        case EncoderDecoder() | RecurrentTranslator():
            return states[:, rows], *head.output_layer
    raise AssertionError(f"no raw scores are defined for {type(head).__name__}")


def similarity(head: Pooler, states: Tensor, compared: Tensor) -> Tensor:
    """[N, 1] the cosine of the vectors of N texts, from states [N, T, W], with another vector."""
    return F.cosine_similarity(pooled_vectors(head, states), compared, dim=-1)[:, None]


def pooled_vectors(head: Pooler, states: Tensor) -> Tensor:
    """[N, T, W] to [N, W]."""
    pooled: Tensor = head(states.flatten(0, 1), text_starts(states))
    return pooled


def text_starts(states: Tensor) -> list[int]:
    """The start row of each of N texts of T rows, and the end of the last."""
    count, rows, _ = states.shape
    return [rows * n for n in range(count + 1)]
