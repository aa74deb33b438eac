"""Heads that compare a text with labels that the request names: spans of words with each label (GLiNER: Zaratiana et
al. 2024, arXiv:2311.08526), or the whole text (GLiClass: Stepanov et al. 2025, arXiv:2508.07662).

Each text is computed on its own, in pieces whose sizes follow from the text and its labels alone (work_pieces.py):
thousands of spans and many labels take seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .heads import HEAD_ACTIVATIONS, SCORE_ACTIVATIONS
from .model_config import ModelConfig
from .work_pieces import Pieces, finish, map_rows, rows_per_piece

PAIRS = 2048  # spans, or pairs of a word and a label, that are compared at a time
STEP_COST = 4  # a product with one row takes so many times longer than that of a row among others
EPSILON = 1e-8  # of a vector's length, when it is divided by it

TextScorer = Literal["dot", "mlp", "weighted"]
TEXT_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {  # [T, W] to [W]
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.amax(dim=0),
    "avg": lambda x: x.mean(dim=0),
    "sum": lambda x: x.sum(dim=0),
    "rms": lambda x: x.square().mean(dim=0).sqrt(),
    "abs_max": lambda x: x.abs().amax(dim=0),
    "abs_avg": lambda x: x.abs().mean(dim=0),
}


class Recurrence(nn.Module):
    """A bidirectional LSTM over the rows of one sequence, [T, W] to [T, W]. Parameters have the names of nn.LSTM, whose
    own list of weights would not follow when they are read one by one."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.memory_width, self.depth = width // 2, depth
        for layer in range(depth):
            for direction in ("", "_reverse"):
                for kind, columns in (
                    ("weight_ih", width),
                    ("weight_hh", self.memory_width),
                    ("bias_ih", 0),
                    ("bias_hh", 0),
                ):
                    shape = (4 * self.memory_width, columns) if columns else (4 * self.memory_width,)
                    self.register_parameter(f"{kind}_l{layer}{direction}", nn.Parameter(torch.empty(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return finish(self.read(x))

    def read(self, x: Tensor) -> Pieces[Tensor]:
        for layer in range(self.depth):
            ahead = yield from self._read_one_way(x, f"l{layer}")
            back = yield from self._read_one_way(x.flip(0), f"l{layer}_reverse")
            x = torch.cat((ahead, back.flip(0)), dim=1)
        return x

    def _read_one_way(self, x: Tensor, name: str) -> Pieces[Tensor]:
        """[T, W] to [T, W / 2], with the weights of this name."""
        weights = [getattr(self, f"{kind}_{name}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        state = memory = x.new_zeros(1, 1, self.memory_width)
        # On some devices only the training mode has gradients; without dropout the result is the same.
        train, parts = x.requires_grad, list[Tensor]()
        for some in torch.split(x, rows_per_piece(STEP_COST * sum(each.numel() for each in weights))):
            out, state, memory = torch.lstm(some[None], (state, memory), weights, True, 1, 0.0, train, False, True)
            parts.append(out[0])
            yield
        return torch.cat(parts)


class TwoLayers(nn.Module):
    """Rows [N, I] through a hidden layer to [N, O]."""

    def __init__(self, inputs: int, hidden: int, outputs: int, activation: str = "relu") -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.products = hidden * (inputs + outputs)  # of a row

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.out(self.activation(self.inner(rows)))
        return out

    def map(self, rows: Tensor) -> Pieces[Tensor]:
        """As the call, in pieces."""
        return map_rows(self, rows, self.products)


class PairFeatures(nn.Module):
    """Scores of pairs of a left and a right row, [P, W] each, to [P, O]: a hidden layer over both and their product."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.layers = TwoLayers(3 * width, 4 * width, outputs)

        self.products = 2 * width**2  # of a row that is projected

    def compare(self, left: Tensor, right: Tensor) -> Pieces[Tensor]:
        """Each row of [N, W] with each of [C, W], to [N * C, O]."""
        one, many = (yield from map_rows(self.left, left, self.products)).chunk(2, dim=-1)
        other, several = (yield from map_rows(self.right, right, self.products)).chunk(2, dim=-1)
        count, parts = len(right), list[Tensor]()
        size = min(rows_per_piece(self.layers.products), PAIRS)
        for pairs in torch.split(torch.arange(len(left) * count, device=left.device), size):
            row, column = pairs // count, pairs % count
            parts.append(self.layers(torch.cat((one[row], other[column], many[row] * several[column]), dim=-1)))
            yield
        return torch.cat(parts)


class LabelHead(nn.Module):
    """What heads with labels of the request have in common. `score` computes one text, and `score_in_pieces` with
    pauses; its rows are given by the request."""

    label_offset = 0  # from a label's token to the row of its state

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def score_in_pieces(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Pieces[Tensor]:
        """The states [T, W] of one text, the rows of its C labels' tokens and those of its text, to raw scores."""
        raise NotImplementedError

    def score(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Tensor:
        return finish(self.score_in_pieces(states, label_rows, text_rows))

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N texts (`starts` [N + 1]) to scores [N, ...] of the first row as a label and as a text, for
        a test without labels."""
        return torch.stack([self.score(states[start:end], (0,), (0,)) for start, end in pairwise(starts)])

    def postprocess(self, raw: Tensor) -> Tensor:
        """Raw scores to probabilities, each on its own."""
        return SCORE_ACTIVATIONS["sigmoid"](raw)

    def label_states(self, states: Tensor, label_rows: Sequence[int]) -> Tensor:
        """[T, W] to [C, W]."""
        last = len(states) - 1
        return states[torch.tensor([min(row + self.label_offset, last) for row in label_rows], device=states.device)]


@dataclass(frozen=True)
class SpanLabelSpec:
    """`width` of words and labels; with `projects` states are projected to it. `recurrences`: layers of the LSTM over
    the words. A span has at most `max_width` words; 0: words are scored, not spans. `label_offset`: from a label's
    token to the row of its state."""

    width: int
    projects: bool
    recurrences: int
    max_width: int
    label_offset: int = 0


class SpanLabelHead(LabelHead):
    """A score of each span of words for each label, or of each word as the start, end and inside of a label's span."""

    def __init__(self, config: ModelConfig, spec: SpanLabelSpec) -> None:
        super().__init__()
        width = spec.width
        self.width, self.max_width, self.label_offset = width, spec.max_width, spec.label_offset
        self.projection = nn.Linear(config.state_width, width) if spec.projects else nn.Identity()
        self.recurrence = Recurrence(width, spec.recurrences) if spec.recurrences else nn.Identity()
        if spec.max_width:
            self.start, self.end = TwoLayers(width, 4 * width, width), TwoLayers(width, 4 * width, width)
            self.span = TwoLayers(2 * width, 4 * width, width)
            self.label = TwoLayers(width, 4 * width, width)
        else:
            self.pairs = PairFeatures(width, 3)

    def score_in_pieces(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Pieces[Tensor]:
        """To [N, K * C] of N words, for spans of 1 to K words from each; a span beyond the last word has 0. For single
        words [N, C * 3]."""
        states = states.to(next(self.parameters()).dtype)
        words = yield from self._project(states[torch.tensor(text_rows, device=states.device)])  # [N, W]
        if isinstance(self.recurrence, Recurrence):
            words = yield from self.recurrence.read(words)
        labels = yield from self._project(self.label_states(states, label_rows))  # [C, W]
        return (yield from self._score_spans(words, labels) if self.max_width else self._score_words(words, labels))

    def _project(self, rows: Tensor) -> Pieces[Tensor]:
        return map_rows(self.projection, rows, rows.size(1) * self.width)

    def _score_spans(self, words: Tensor, labels: Tensor) -> Pieces[Tensor]:
        starts = yield from self.start.map(words)  # [N, W]
        ends = yield from self.end.map(words)  # [N, W]
        wanted = (yield from self.label.map(labels)).T  # [W, C]
        count, widths = len(words), torch.arange(self.max_width, device=words.device)
        last = torch.arange(count, device=words.device)[:, None] + widths  # [N, K]
        first, width = (last < count).nonzero(as_tuple=True)  # [P]
        scores = words.new_zeros(count, self.max_width, len(labels), dtype=torch.float32)
        for row, size in zip(torch.split(first, PAIRS), torch.split(width, PAIRS), strict=True):
            edges = torch.cat((starts[row], ends[row + size]), dim=-1).relu()
            spans = yield from self.span.map(edges)
            scores[row, size] = (spans @ wanted).float()
        return scores.flatten(1)

    def _score_words(self, words: Tensor, labels: Tensor) -> Pieces[Tensor]:
        scores = yield from self.pairs.compare(words, labels)  # [N * C, 3]
        return scores.float().view(len(words), -1)


@dataclass(frozen=True)
class TextLabelSpec:
    """How a text is compared with labels: `pooling` of its states (TEXT_POOLINGS), the inner `width` of the two
    projections and their `activation`, the `scorer`. With `fills_up` the states of the text are followed by zeros, as
    many as there are tokens before it. A label is the mean of its tokens with `averages`, else one of them. With
    `normalises` vectors have length one and scores are scaled. `recurrent`: an LSTM over the text's states."""

    pooling: str
    width: int
    activation: str
    scorer: TextScorer
    fills_up: bool = False
    averages: bool = False
    skips_label_token: bool = False
    normalises: bool = False
    recurrent: bool = False


class TextLabelHead(LabelHead):
    """A score of a text for each label."""

    def __init__(self, config: ModelConfig, spec: TextLabelSpec) -> None:
        super().__init__()
        width = config.state_width
        self.spec, self.label_offset = spec, int(spec.skips_label_token)
        self.text = TwoLayers(width, spec.width, width, spec.activation)
        self.label = TwoLayers(width, spec.width, width, spec.activation)
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.recurrence = Recurrence(width, 1) if spec.recurrent else nn.Identity()
        if spec.scorer == "mlp":
            self.scorer = ThreeLayers(2 * width)
        elif spec.scorer == "weighted":
            self.pairs = PairFeatures(width, 1)

    def score_in_pieces(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Pieces[Tensor]:
        """To [C]. The rows of the text are neighbours."""
        states = states.to(self.logit_scale.dtype)
        labels = yield from self.label.map(self._label_states(states, label_rows, text_rows[0]))  # [C, W]
        text = states[text_rows[0] : text_rows[-1] + 1]
        if isinstance(self.recurrence, Recurrence):
            text = yield from self.recurrence.read(text)
        elif self.spec.fills_up:
            text = F.pad(text, (0, 0, 0, len(states) - len(text)))
        pooled = self.text(TEXT_POOLINGS[self.spec.pooling](text)[None])  # [1, W]
        if self.spec.normalises:
            pooled, labels = (each / (each.norm(dim=-1, keepdim=True) + EPSILON) for each in (pooled, labels))
        scores = yield from self._compare(pooled, labels)
        return (scores * self.logit_scale if self.spec.normalises else scores).float()

    def _label_states(self, states: Tensor, label_rows: Sequence[int], text_start: int) -> Tensor:
        if not self.spec.averages:
            return self.label_states(states, label_rows)
        end = text_start if self.spec.fills_up and text_start > label_rows[-1] else len(states)
        return torch.stack(
            [
                states[row + self.label_offset : after].sum(dim=0) / max(after - row - self.label_offset, 1)
                for row, after in pairwise((*label_rows, end))
            ]
        )

    def _compare(self, text: Tensor, labels: Tensor) -> Pieces[Tensor]:
        """[1, W] and [C, W] to [C]."""
        match self.spec.scorer:
            case "dot":
                return labels @ text[0]
            case "mlp":
                scores = self.scorer(torch.cat((text.expand(len(labels), -1), labels), dim=-1))
            case "weighted":
                scores = yield from self.pairs.compare(text, labels)
        return scores[:, 0]  # type: ignore[no-any-return]


class ThreeLayers(nn.Module):
    """Rows [N, I] through two hidden layers to one score each, [N, 1]."""

    def __init__(self, inputs: int, hidden: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden // 2)
        self.out = nn.Linear(hidden // 2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.out(self.second(self.first(rows).relu()).relu())
        return out
