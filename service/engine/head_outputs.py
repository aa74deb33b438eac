"""Reads the outputs of heads from a step's states, as events: one row of numbers for a text, or one for each token.

Each request gets only what it asks for, computed for it alone: the other texts of the step change nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from polyhead.models.core.decision_prompt import PROMPT_KINDS
from polyhead.models.network.decision_heads import DecisionHead
from polyhead.models.network.embedding_head import TokenTableHead, TokenVectorHead, TokenWeightHead
from polyhead.models.network.heads import SparsePooling
from polyhead.models.network.label_heads import LabelHead

from ..core.request import Encode, HeadOutput, OutputForm, Task, TokenCandidates, TokenOutputs

VOCABULARY_ROWS = 32  # rows of vocabulary width that exist at a time
FLOAT_BYTES = 4

HeadEvent = HeadOutput | TokenOutputs | TokenCandidates
HeadEvents = Sequence[HeadEvent | None]  # None: not finite
Candidates = tuple[tuple[int, float], ...]


class OutputHead(Protocol):
    """A head of an encoder: see models.network.heads."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows it reads of N texts, `starts` [N + 1], and where each text starts among those rows."""

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:
        """[M, W] states of those rows to raw scores: [N, C], or [M, C] where each row is answered."""

    def postprocess(self, raw: Tensor) -> Tensor:
        """Raw scores [N or M, C] to probabilities, or embeddings to unit length."""


@dataclass(frozen=True)
class HeadSet:
    """What is read of a network's states: by the form of the output, of texts and of queries. A form that is not among
    those of queries is read alike."""

    task: Task
    texts: Mapping[OutputForm, OutputHead]
    queries: Mapping[OutputForm, OutputHead] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task, head: OutputHead) -> "HeadSet":
        """A network's head, with those that it has beside it as modules of these names."""
        beside = {"words": getattr(head, "words", None), "tokens": getattr(head, "tokens", None)}
        forms: dict[OutputForm, OutputHead] = {"": head}
        if isinstance(head, TokenVectorHead):
            forms = {"tokens": head}
        elif task == "embed":
            forms["tokens"] = STATE_HEAD
        elif task == "fill":
            forms["words"] = head
        forms |= {cast(OutputForm, form): each for form, each in beside.items() if each is not None}
        asked = {"": getattr(head, "query_vector", None), "words": getattr(head, "query_words", None)}
        return cls(task, forms, {cast(OutputForm, form): each for form, each in asked.items() if each is not None})

    def choose(self, form: OutputForm, *, is_query: bool) -> OutputHead:
        return self.queries[form] if is_query and form in self.queries else self.texts[form]

    @property
    def default_form(self) -> OutputForm:
        """The form of a network's own output."""
        return next(iter(self.texts))

    def reads_no_states(self, request: Encode) -> bool:
        """Whether the answer follows from the tokens alone."""
        heads = [self.choose(form, is_query=request.is_query) for form in request.forms]
        return all(isinstance(head, TokenTableHead) for head in heads)


def read_outputs(
    reading: Task | OutputForm,
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """The answers to N requests, from the states [M, W] of their needed rows, `starts` [N + 1]."""
    return READERS.get(reading, read_vectors)(head, states, starts, requests)


def reading_bytes(task: Task, rows: int, columns: int) -> int:
    """Upper bound of the memory in use while `rows` are read with `columns` scores each, and until the answers are
    fetched.
    """
    match task:
        case "tag" | "span" | "embed" | "label_spans" | "decide":
            return 2 * FLOAT_BYTES * columns * rows  # scores, or states, and answers
        case "fill":
            return 3 * FLOAT_BYTES * columns * min(rows, VOCABULARY_ROWS)  # logits, those of a group, probabilities
        case _:
            return 0  # a few labels for each text


def read_vectors(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """A row of numbers for each text."""
    scores = head(states, starts)  # [N, C]
    finite = scores.isfinite().all(dim=1).tolist()
    groups: defaultdict[tuple[bool, bool, int], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        if finite[index]:
            groups[request.raw, request.unit, request.dimensions].append(index)
    answers: list[HeadOutput | None] = [None] * len(finite)
    for (raw, unit, dimensions), members in groups.items():
        part = scores if len(members) == len(finite) else scores[torch.tensor(members, device=scores.device)]
        part = part[:, :dimensions] if dimensions else part
        outputs = part if raw else head.postprocess(part)
        outputs = normalize(outputs, dim=-1) if unit else outputs
        for index, value in zip(members, outputs.tolist(), strict=True):
            answers[index] = HeadOutput(value)
    return answers


def read_tables(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """A row of scores for each token.  Postprocessed text by text, so that only one text's copy exists at a time."""
    scores = head(states, starts).cpu()  # [M, C]
    answers: list[TokenOutputs | None] = []
    for request, (start, end) in zip(requests, pairwise(starts), strict=True):
        own = scores[start:end]
        finite = bool(own.isfinite().all())
        answers.append(copy_scores(own if request.raw else head.postprocess(own)) if finite else None)
    return answers


def copy_scores(scores: Tensor) -> TokenOutputs:
    """[T, C] float32, copied: a slice would keep the scores of the other texts in memory."""
    return TokenOutputs(memoryview(scores.numpy().tobytes()).cast("f", scores.shape))


def read_candidates(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """The likeliest tokens for each position.  Only VOCABULARY_ROWS rows as wide as the vocabulary exist at a time."""
    counts = (end - start for start, end in pairwise(starts))
    row_requests = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
    found: list[Candidates] = []
    for first in range(0, len(states), VOCABULARY_ROWS):
        part = states[first : first + VOCABULARY_ROWS]
        found += top_candidates(head, head(part, [0, len(part)]), row_requests[first : first + VOCABULARY_ROWS])
    return [
        TokenCandidates(tuple(found[start:end])) if all(found[start:end]) else None for start, end in pairwise(starts)
    ]


def top_candidates(head: OutputHead, logits: Tensor, requests: Sequence[Encode]) -> list[Candidates]:
    """The `top_k` candidates of each row [R, V], all or among the request's targets; empty for a row that is not
    finite.
    """
    finite = logits.isfinite().all(dim=1).tolist()
    groups: defaultdict[tuple[bool, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        if finite[row]:
            groups[request.raw, request.top_k, request.targets].append(row)
    found: list[Candidates] = [()] * len(requests)
    for (raw, count, targets), members in groups.items():
        part = logits if len(members) == len(requests) else logits[torch.tensor(members, device=logits.device)]
        scores = part if raw else head.postprocess(part)
        target_tokens = torch.tensor(targets, device=scores.device) if targets else None
        scores = scores if target_tokens is None else scores[:, target_tokens]
        values, columns = scores.topk(min(count, scores.size(1)))
        columns = columns if target_tokens is None else target_tokens[columns]
        for row, ids, numbers in zip(members, columns.tolist(), values.tolist(), strict=True):
            found[row] = tuple(zip(ids, numbers, strict=True))
    return found


def read_vocabulary_weights(
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """The weight of each vocabulary entry for a text, if not zero; see models.network.heads.SparsePooling."""
    if isinstance(head, TokenWeightHead | TokenTableHead):
        return read_token_weights(head, states, starts, requests)
    pooling: SparsePooling = getattr(head, "sparse", SparsePooling())
    answers: list[TokenCandidates | None] = []
    for start, end in pairwise(starts):
        pieces = [states[first : min(first + VOCABULARY_ROWS, end)] for first in range(start, end, VOCABULARY_ROWS)]
        logits = (head(piece, [0, len(piece)]) for piece in pieces)
        if pooling.sums:
            # Row by row: a sum must not depend on how rows are cut into pieces.
            pooled = reduce(torch.add, (row for piece in logits for row in weigh_words(piece, pooling)))  # [V]
        else:
            pooled = weigh_words(reduce(torch.maximum, (piece.amax(dim=0) for piece in logits)), pooling)  # [V]
        tokens = pooled.nonzero()[:, 0]
        candidates = tuple(zip(tokens.tolist(), pooled[tokens].tolist(), strict=True))
        answers.append(TokenCandidates((candidates,)) if bool(pooled.isfinite().all()) else None)
    return answers


def read_token_weights(
    head: TokenWeightHead | TokenTableHead, states: Tensor, starts: list[int], requests: Sequence[Encode]
) -> HeadEvents:
    """The largest weight of each token of a text, if not zero."""
    answers: list[TokenCandidates | None] = []
    weights = None if isinstance(head, TokenTableHead) else head(states, starts)[:, 0].cpu()  # [M]
    for request, (start, end) in zip(requests, pairwise(starts), strict=True):
        tokens = [request.tokens[row] for row in request.rows] or request.tokens
        if weights is None:
            device = next(head.parameters()).device
            own = head(torch.tensor(tokens, device=device), [0, len(tokens)]).cpu()
        else:
            own = weights[start:end]
        found = dict[int, float]()
        for token, weight in zip(tokens, own.tolist(), strict=True):
            if weight and token not in head.skipped:
                found[token] = max(weight, found.get(token, weight))
        finite = bool(own.isfinite().all())
        answers.append(TokenCandidates((tuple(sorted(found.items())),)) if finite else None)
    return answers


def weigh_words(logits: Tensor, pooling: SparsePooling) -> Tensor:
    """Logits to weights of words, element by element."""
    weights = logits.relu().log1p()
    return weights.log1p() if pooling.log_twice else weights


def read_label_spans(
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """A row of probabilities for each word: of its spans, or of itself, for each label."""
    answers: list[TokenOutputs | None] = []
    for raw in score_labels(head, states, starts, requests):
        scores = raw.cpu()
        answers.append(copy_scores(head.postprocess(scores)) if bool(scores.isfinite().all()) else None)
    return answers


def read_label_texts(
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """A raw score for each label of each text."""
    found = score_labels(head, states, starts, requests)
    return [HeadOutput(raw.tolist()) if bool(raw.isfinite().all()) else None for raw in found]


def read_decisions(
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """A raw score for each option of the questions about each text. Without options, in a test, the first row is
    one."""
    answers: list[HeadOutput | None] = []
    for request, (start, end) in zip(requests, pairwise(starts), strict=True):
        kind = PROMPT_KINDS.index(request.question)
        raw = cast(DecisionHead, head).score(states[start:end], request.label_rows or (0,), kind)
        answers.append(HeadOutput(raw.tolist()) if bool(raw.isfinite().all()) else None)
    return answers


def score_labels(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> Iterator[Tensor]:
    """The raw scores of each text for its labels. Without labels, in a test, the first row is one."""
    for request, (start, end) in zip(requests, pairwise(starts), strict=True):
        yield cast(LabelHead, head).score(states[start:end], request.label_rows or (0,), request.text_rows or (0,))


class StateHead:
    """A head that returns the states themselves."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """All rows."""
        return list(range(starts[-1])), starts

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:  # noqa: ARG002 - each row is on its own
        return states

    def postprocess(self, raw: Tensor) -> Tensor:
        return raw


STATE_HEAD = StateHead()
READERS: dict[Task | OutputForm, Callable[[OutputHead, Tensor, list[int], Sequence[Encode]], HeadEvents]] = {
    "tag": read_tables,
    "span": read_tables,
    "fill": read_candidates,
    "tokens": read_tables,
    "words": read_vocabulary_weights,
    "label_spans": read_label_spans,
    "label_texts": read_label_texts,
    "decide": read_decisions,
}
