"""Heads that compare a text with labels that the request names: spans of words with each label (GLiNER: Zaratiana et
al. 2024, arXiv:2311.08526), or the whole text (GLiClass: Stepanov et al. 2025, arXiv:2508.07662).

Each text is computed on its own, in pieces whose sizes follow from the text and its labels alone.
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

PAIRS = 2048  # spans, or pairs of a word and a label, whose features exist at a time
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of an LSTM's parameters
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
        self.parameter_names: list[str] = []
        for layer in range(depth):
            for direction in ("", "_reverse"):
                for kind, columns in (
                    ("weight_ih", width),
                    ("weight_hh", self.memory_width),
                    ("bias_ih", 0),
                    ("bias_hh", 0),
                ):
                    shape = (4 * self.memory_width, columns) if columns else (4 * self.memory_width,)
                    name = f"{kind}_l{layer}{direction}"
                    self.register_parameter(name, nn.Parameter(torch.empty(shape)))
                    self.parameter_names.append(name)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.new_zeros(2 * self.depth, 1, self.memory_width)
        weights = [getattr(self, name) for name in self.parameter_names]
        # On some devices only the training mode has gradients; without dropout the result is the same.
        train = x.requires_grad
        out: Tensor = torch.lstm(x[None], (memory, memory), weights, True, self.depth, 0.0, train, True, True)[0]
        return out[0]


class TwoLayers(nn.Module):
    """Rows [N, I] through a hidden layer to [N, O]."""

    def __init__(self, inputs: int, hidden: int, outputs: int, activation: str = "relu") -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.activation = HEAD_ACTIVATIONS[activation]

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.out(self.activation(self.inner(rows)))
        return out


class PairFeatures(nn.Module):
    """Scores of pairs of a left and a right row, [P, W] each, to [P, O]: a hidden layer over both and their product."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.layers = TwoLayers(3 * width, 4 * width, outputs)

    def project(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """[N, W] and [C, W] to [N, 2 W] and [C, 2 W]."""
        return self.left(left), self.right(right)

    def score(self, left: Tensor, right: Tensor) -> Tensor:
        """Projected rows [P, 2 W] of each side to [P, O]."""
        (one, many), (other, several) = left.chunk(2, dim=-1), right.chunk(2, dim=-1)
        scores: Tensor = self.layers(torch.cat((one, other, many * several), dim=-1))
        return scores


class LabelHead(nn.Module):
    """What heads with labels of the request have in common. `score` computes one text; its rows are given by the
    request."""

    label_offset = 0  # from a label's token to the row of its state

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def score(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Tensor:
        """The states [T, W] of one text, the rows of its C labels' tokens and those of its text, to raw scores."""
        raise NotImplementedError

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
        self.max_width, self.label_offset = spec.max_width, spec.label_offset
        self.projection = nn.Linear(config.state_width, width) if spec.projects else nn.Identity()
        self.recurrence = Recurrence(width, spec.recurrences) if spec.recurrences else nn.Identity()
        if spec.max_width:
            self.start, self.end = TwoLayers(width, 4 * width, width), TwoLayers(width, 4 * width, width)
            self.span = TwoLayers(2 * width, 4 * width, width)
            self.label = TwoLayers(width, 4 * width, width)
        else:
            self.pairs = PairFeatures(width, 3)

    def score(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Tensor:
        """To [N, K * C] of N words, for spans of 1 to K words from each; a span beyond the last word has 0. For single
        words [N, C * 3]."""
        states = states.to(next(self.parameters()).dtype)
        words = self.projection(states[torch.tensor(text_rows, device=states.device)])  # [N, W]
        words = self.recurrence(words)
        labels = self.projection(self.label_states(states, label_rows))  # [C, W]
        return self._score_spans(words, labels) if self.max_width else self._score_words(words, labels)

    def _score_spans(self, words: Tensor, labels: Tensor) -> Tensor:
        starts, ends, wanted = self.start(words), self.end(words), self.label(labels).T  # [N, W], [N, W], [W, C]
        count, widths = len(words), torch.arange(self.max_width, device=words.device)
        last = torch.arange(count, device=words.device)[:, None] + widths  # [N, K]
        first, width = (last < count).nonzero(as_tuple=True)  # [P]
        scores = words.new_zeros(count, self.max_width, len(labels), dtype=torch.float32)
        for row, size in zip(torch.split(first, PAIRS), torch.split(width, PAIRS), strict=True):
            spans = self.span(torch.cat((starts[row], ends[row + size]), dim=-1).relu())
            scores[row, size] = (spans @ wanted).float()
        return scores.flatten(1)

    def _score_words(self, words: Tensor, labels: Tensor) -> Tensor:
        left, right = self.pairs.project(words, labels)  # [N, 2 W], [C, 2 W]
        count = len(labels)
        pieces = [
            self.pairs.score(some.repeat_interleave(count, dim=0), right.repeat(len(some), 1))
            for some in torch.split(left, max(PAIRS // count, 1))
        ]
        return torch.cat(pieces).float().view(len(words), -1)


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

    def score(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Tensor:
        """To [C]. The rows of the text are neighbours."""
        states = states.to(self.logit_scale.dtype)
        labels = self.label(self._label_states(states, label_rows, text_rows[0]))  # [C, W]
        text = self.recurrence(states[text_rows[0] : text_rows[-1] + 1])
        if self.spec.fills_up and not self.spec.recurrent:
            text = F.pad(text, (0, 0, 0, len(states) - len(text)))
        pooled = self.text(TEXT_POOLINGS[self.spec.pooling](text)[None])  # [1, W]
        if self.spec.normalises:
            pooled, labels = (each / (each.norm(dim=-1, keepdim=True) + EPSILON) for each in (pooled, labels))
        scores = self._compare(pooled, labels)
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

    def _compare(self, text: Tensor, labels: Tensor) -> Tensor:
        """[1, W] and [C, W] to [C]."""
        count = len(labels)
        match self.spec.scorer:
            case "dot":
                return labels @ text[0]
            case "mlp":
                scores = self.scorer(torch.cat((text.expand(count, -1), labels), dim=-1))
            case "weighted":
                left, right = self.pairs.project(text, labels)
                scores = self.pairs.score(left.expand(count, -1), right)
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
