"""Raw scores of a head: all, or a few cells of the table.

The last operation of most heads is a product; a cell needs one row of states and one of the matrix. So logits over the
whole vocabulary are never computed, or differentiated, for one token. Heads that read labels or options beside the text
score all of them, in one row of the table.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.decision_prompt import PROMPT_KINDS
from ..network.decision_heads import DecisionHead
from ..network.encoder_decoder import EncoderDecoder
from ..network.heads import LanguageHead, MaskHead, Pooler, SequenceHead, TokenHead, count_read_tokens
from ..network.label_heads import TextLabelHead
from ..recurrent.recurrent_network import RecurrentTranslator
from .explain_types import ExplanationRequest, InputTokens

RowReadingHead = TextLabelHead | DecisionHead  # the request says which rows are labels or options
FinalProduct = tuple[Tensor, Tensor, Tensor | None]  # the last product: its input rows, matrix and bias


class GoalReader:
    """Computes the goals' values of texts from their states."""

    def __init__(self, head: nn.Module, request: ExplanationRequest, compared: Tensor | None = None) -> None:
        """`compared` [1, W]: of an embedder, the vector of the other text."""
        self.head, self.text, self.compared_vector = head, request.text, compared
        self.sizes = [len(goal) for goal in request.goals]
        self.rows = [row for goal in request.goals for row, _ in goal]
        self.columns = [column for goal in request.goals for _, column in goal]

    def __call__(self, states: Tensor) -> Tensor:
        """[N, T, W] states of N texts to [N, G]."""
        cells = self.read_cells(states)
        return torch.stack([some.sum(dim=1) for some in torch.split(cells, self.sizes, dim=1)], dim=1)

    def read_cells(self, states: Tensor) -> Tensor:
        """As the call, for each cell: [N, C]."""
        if isinstance(self.head, Pooler):
            assert self.compared_vector is not None
            return similarity(self.head, states, self.compared_vector).expand(-1, len(self.rows))
        if isinstance(self.head, RowReadingHead):
            return label_scores(self.head, states, self.text)[:, self.columns]
        states = states[:, : count_read_tokens(self.head, self.text.tokens)]
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


def label_scores(head: RowReadingHead, states: Tensor, text: InputTokens) -> Tensor:
    """[N, C] the scores of the C labels or options beside each of N texts, from states [N, T, W]. The rows of labels,
    and what is asked, are those of `text`."""
    match head:
        case TextLabelHead():
            return torch.stack([head.score(each, text.label_rows, text.text_rows) for each in states])
        case DecisionHead():
            kind = PROMPT_KINDS.index(text.question)
            return torch.stack([head.score(each, text.label_rows, kind) for each in states])


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
