"""Heads on a transformer's states: next-token logits, scores of a text or of its tokens, one vector a text.

A head lists the rows that it needs, so that the network need not compute the others (`RaggedBatch.output_rows`). It
gives the same result for those rows alone, with the start of each sequence among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .mlp import MLP_ACTIVATIONS as INNER
from .model_config import ModelConfig

ScoreActivation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["mean", "mean_sqrt", "weighted", "cls", "max", "last"]

SCORE_ACTIVATIONS: dict[ScoreActivation, Callable[[Tensor], Tensor]] = {
    "softmax": lambda raw: raw.softmax(dim=-1),
    "sigmoid": lambda raw: 1 / (1 + (-raw).exp()),  # torch.sigmoid rounds the last elements of a batch differently
    "none": lambda raw: raw,
}
HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**INNER, "tanh": torch.tanh, "none": lambda raw: raw}


class LanguageHead(nn.Module):
    """States to logits over the vocabulary; `tied` shares the token embedding's matrix (Press and Wolf 2017). Some
    networks transform states before it (ModelConfig.logit_dense)."""

    def __init__(self, config: ModelConfig, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.dense, self.norm = None, None
        if config.logit_dense:
            self.dense = nn.Linear(config.state_width, config.state_width, bias=config.logit_dense_bias)
            self.activation = INNER[config.logit_dense]
            self.norm = nn.LayerNorm(config.state_width, config.norm_eps, bias=config.norm_bias)
        self.output = nn.Linear(config.state_width, config.vocab_size, bias=config.logit_bias)
        self.logit_scale, self.logit_cap = config.logit_scale, config.logit_cap
        if tied is not None:
            self.output.weight = tied.weight

    def forward(self, states: Tensor) -> Tensor:
        """[M, W] to [M, V]."""
        return self.scale(self.output(self.transform(states)))

    def transform(self, states: Tensor) -> Tensor:
        """[..., W] states to the input of the output matrix, [..., W]."""
        if self.dense is None or self.norm is None:
            return states
        return self.norm(self.activation(self.dense(states)))  # type: ignore[no-any-return]

    def scale(self, logits: Tensor) -> Tensor:
        """Products of states and the output matrix as logits: scaled, then capped."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits


@dataclass(frozen=True)
class LabelScoring:
    """How scores follow from states: the pooling (of the scores of a text), and the layers after it.

    `activation` follows a dense layer, and a norm follows it; "none": there is no dense layer. `width`: outputs of the
    dense layer; 0: as many as inputs. With `returns` a second dense layer, with the same activation, leads from there
    back to the width of states; with `adds` there is no second activation, and the state is added. `bias` is that of
    the scores. With `pools_last` these layers come before the pooling. `padding` is the token that is not read at the
    end of a text, also if a client wrote it; None: there is none. `two_labels` are those of a token whose one score is
    for the second of them; the first one's is zero.
    """

    pooling: Literal["cls", "mean", "last"] = "cls"
    activation: Literal["tanh", "relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu_squared", "none"] = "tanh"
    dense_bias: bool = True
    norm: bool = False
    bias: bool = True
    width: int = 0
    returns: bool = False
    adds: bool = False
    pools_last: bool = False
    two_labels: tuple[str, str] | None = None
    padding: int | None = None


DIRECT_SCORING = LabelScoring(activation="none")


class ScoredStates(nn.Module):
    """The layers between states and scores that all scoring heads have; see LabelScoring."""

    def __init__(self, config: ModelConfig, scoring: LabelScoring) -> None:
        super().__init__()
        width = scoring.width or config.state_width
        self.inner_width = config.state_width if scoring.returns else width
        dense = scoring.activation != "none"
        self.dense = nn.Linear(config.state_width, width, scoring.dense_bias) if dense else nn.Identity()
        self.second = nn.Linear(width, config.state_width, scoring.dense_bias) if scoring.returns else None
        self.activation, self.adds = HEAD_ACTIVATIONS[scoring.activation], scoring.adds
        has_norm, bias = scoring.norm, config.norm_bias
        self.norm = nn.LayerNorm(self.inner_width, config.norm_eps, bias=bias) if has_norm else nn.Identity()

    def transform(self, states: Tensor) -> Tensor:
        """[M, W] states to the input of the scores' matrix, [M, W]."""
        inner: Tensor = self.activation(self.dense(states))
        if self.second is not None:
            inner = self.second(inner) + states if self.adds else self.activation(self.second(inner))
        return self.norm(inner)  # type: ignore[no-any-return]


class TokenHead(ScoredStates):
    """A score per label for every token's state: its class, or whether an answer starts or ends there."""

    def __init__(
        self, config: ModelConfig, labels: int, closing: ScoreActivation, scoring: LabelScoring = DIRECT_SCORING
    ) -> None:
        super().__init__(config, scoring)
        self.has_one_score = scoring.two_labels is not None
        self.out = nn.Linear(self.inner_width, 1 if self.has_one_score else labels, bias=scoring.bias)
        self.score_activation = closing

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:  # noqa: ARG002 - each row is on its own
        """[T, W] to [T, labels] scores."""
        raw: Tensor = self.out(self.hidden_states(states)).float()
        return F.pad(raw, (1, 0)) if self.has_one_score else raw

    def hidden_states(self, states: Tensor) -> Tensor:
        """[M, W] states to the input of `out`, [M, W]."""
        return self.transform(states.to(self.out.weight.dtype))

    def postprocess(self, raw: Tensor) -> Tensor:
        """[T, labels] scores to probabilities."""
        return SCORE_ACTIVATIONS[self.score_activation](raw)


@dataclass(frozen=True)
class SparsePooling:
    """How the weight of a vocabulary entry for a text follows from its logits at the text's tokens: log(1 + relu), of
    the sum or of the largest; `log_twice` takes log(1 + x) again (SPLADE, Formal et al. 2021, arXiv:2109.10086)."""

    sums: bool = False
    log_twice: bool = False


class MaskHead(ScoredStates):
    """Logits over the vocabulary for every token: its state, transformed (Devlin et al. 2019).

    `tied` shares the token embedding's matrix. `sparse`: how the weights of words follow from logits.
    """

    sparse = SparsePooling()

    def __init__(self, config: ModelConfig, scoring: LabelScoring, tied: nn.Embedding | None = None) -> None:
        super().__init__(config, scoring)
        self.output = nn.Linear(self.inner_width, config.vocab_size, bias=scoring.bias)
        if tied is not None:
            self.output.weight = tied.weight

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:  # noqa: ARG002 - each row is on its own
        """[M, W] to [M, V] logits."""
        raw: Tensor = self.output(self.hidden_states(states))
        return raw.float()

    def hidden_states(self, states: Tensor) -> Tensor:
        """[M, W] states to the input of `output`, [M, W]."""
        return self.transform(states.to(self.output.weight.dtype))

    def postprocess(self, raw: Tensor) -> Tensor:
        """[M, V] logits to probabilities."""
        return raw.softmax(dim=-1)


class Pooler(nn.Module):
    """One vector a text: the mean, the maximum, the first or the last of its states.

    "weighted" is a mean in which the n-th state counts n times: in causal networks later states have seen more
    (Muennighoff 2022, arXiv:2202.08904). "mean_sqrt" is the sum divided by the square root of the number of states.
    """

    def __init__(self, pooling: Pooling, normalise: bool) -> None:
        super().__init__()
        self.pooling, self.normalise = pooling, normalise

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows that are read, and the start of each sequence among them."""
        if self.pooling == "cls":
            return starts[:-1], list(range(len(starts)))
        if self.pooling == "last":
            return [end - 1 for end in starts[1:]], list(range(len(starts)))
        return list(range(starts[-1])), starts

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N sequences (`starts` [N + 1]) to [N, W]."""
        if self.pooling in ("cls", "last"):
            rows = starts[:-1] if self.pooling == "cls" else [end - 1 for end in starts[1:]]
            return states[torch.tensor(rows, device=states.device)]
        counts = [end - start for start, end in pairwise(starts)]
        lengths, how = torch.tensor(counts, device=states.device), self.pooling
        if how == "weighted":
            weights = [2 * n / (count + 1) for count in counts for n in range(1, count + 1)]
            states, how = states * torch.tensor(weights, device=states.device)[:, None], "mean"
        if how == "mean_sqrt":
            means = torch.segment_reduce(states, "mean", lengths=lengths, axis=0, unsafe=True)
            return means * lengths.sqrt()[:, None]
        # A row's sum must not depend on the rows beside it: each sequence is reduced on its own.
        return torch.segment_reduce(states, how, lengths=lengths, axis=0, unsafe=True)

    def postprocess(self, raw: Tensor) -> Tensor:
        """[N, W] to unit length if the checkpoint sets it."""
        return F.normalize(raw, dim=-1) if self.normalise else raw


def count_read_tokens(head: object, tokens: Sequence[int]) -> int:
    """How many tokens of a text a head reads: those up to the last that is not its padding. One at least, as in
    transformers' classifiers on causal networks."""
    padding, count = getattr(head, "padding", None), len(tokens)
    if padding is None:
        return count
    while count and tokens[count - 1] == padding:
        count -= 1
    return max(count, 1)


def read_rows(head: object, texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The rows that a head reads of concatenated texts, and the start of each text among them."""
    rows, starts, first = list[int](), [0], 0
    for tokens in texts:
        rows += range(first, first + count_read_tokens(head, tokens))
        starts.append(len(rows))
        first += len(tokens)
    return rows, starts


class SequenceHead(ScoredStates):
    """A score per label from a text's pooled state, through a dense layer (Devlin et al. 2019) or directly."""

    def __init__(self, config: ModelConfig, labels: int, scoring: LabelScoring, closing: ScoreActivation) -> None:
        super().__init__(config, scoring)
        self.pooler, self.pools_last = Pooler(scoring.pooling, normalise=False), scoring.pools_last
        self.padding = scoring.padding
        self.out = nn.Linear(self.inner_width, labels, bias=scoring.bias)
        self.score_activation = closing

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows that are read, and the start of each sequence among them."""
        return self.pooler.needed_rows(starts)

    def forward(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """[T, W] states of N sequences (`starts` [N + 1]) to [N, labels] scores."""
        raw: Tensor = self.out(self.hidden_states(states, starts))
        return raw.float()

    def hidden_states(self, states: Tensor, starts: Sequence[int]) -> Tensor:
        """As `forward`, to the input of `out`: [N, W]."""
        if self.pools_last:
            return self.pooler(self.transform(states.to(self.out.weight.dtype)), starts)  # type: ignore[no-any-return]
        return self.transform(self.pooler(states, starts).to(self.out.weight.dtype))

    def postprocess(self, raw: Tensor) -> Tensor:
        """[N, labels] scores to probabilities."""
        return SCORE_ACTIVATIONS[self.score_activation](raw)
