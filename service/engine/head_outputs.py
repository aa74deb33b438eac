"""Reads the outputs of heads from a step's states, as events: one row of numbers for a text, or one for each token.

Each request gets only what it asks for, computed for it alone: the other texts of the step change nothing.

A head may take seconds for one text: scores of all spans for all labels, weights of the whole vocabulary for each
token. So answers are read in pieces of bounded work, between which the engine's thread can do other work, and no piece
is begun whose texts nobody waits for any more.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from polyhead.models.core.decision_prompt import PROMPT_KINDS
from polyhead.models.network.decision_heads import DecisionHead
from polyhead.models.network.embedding_head import TokenTableHead, TokenVectorHead, TokenWeightHead
from polyhead.models.network.heads import SparsePooling
from polyhead.models.network.label_heads import LabelHead
from polyhead.models.network.work_pieces import PIECE_PRODUCTS, Pieces

from ..concurrency.time_slices import SLICE_SIZE
from ..core.request import Encode, HeadOutput, OutputForm, Task, TokenCandidates, TokenOutputs

VOCABULARY_ROWS = 32  # rows of vocabulary width that exist at a time
LEAST_VOCABULARY_ROWS = 8  # the same, where the matrix is so large that reading it takes most of the time
TABLE_ROWS = 256  # rows of a table that are computed at a time
FLOAT_BYTES = 4

HeadEvent = HeadOutput | TokenOutputs | TokenCandidates
TextAnswer = tuple[int, HeadEvent | None]  # the number of a text and its answer; None: not finite
Answers = Iterator[TextAnswer | None]  # None: between two pieces of work
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


@dataclass(frozen=True)
class TextRows:
    """The states [M, W] that a head reads of N requests, `starts` [N + 1] among them. `is_wanted` says of the number of
    a request whether somebody still waits for its answer."""

    states: Tensor
    starts: list[int]
    requests: Sequence[Encode]
    is_wanted: Callable[[int], bool] = lambda number: True  # noqa: ARG005

    def wanted(self) -> Iterator[tuple[int, Encode, slice]]:
        """The number of each request that is wanted, when its turn comes, the request and its rows."""
        for number, (request, (start, end)) in enumerate(zip(self.requests, pairwise(self.starts), strict=True)):
            if self.is_wanted(number):
                yield number, request, slice(start, end)


def read_outputs(reading: Task | OutputForm, head: OutputHead, texts: TextRows) -> Answers:
    """The answers to the requests that are wanted, in order, with None between pieces of work."""
    return READERS.get(reading, read_vectors)(head, texts)


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


def read_vectors(head: OutputHead, texts: TextRows) -> Answers:
    """A row of numbers for each text, SLICE_SIZE texts at a time."""
    for first in range(0, len(texts.requests), SLICE_SIZE):
        some = range(first, min(first + SLICE_SIZE, len(texts.requests)))
        if any(map(texts.is_wanted, some)):
            starts = texts.starts[some.start : some.stop + 1]
            states, own = texts.states[starts[0] : starts[-1]], [start - starts[0] for start in starts]
            values = vectors_of(head, states, own, texts.requests[some.start : some.stop])
            yield from zip(some, values, strict=True)
            yield None


def vectors_of(
    head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]
) -> list[HeadOutput | None]:
    """The rows of numbers of N texts, `starts` [N + 1]."""
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


def read_tables(head: OutputHead, texts: TextRows) -> Answers:
    """A row of scores for each token.  Postprocessed text by text, so that only one text's copy exists at a time."""
    parts = list[Tensor]()
    for some in torch.split(texts.states, TABLE_ROWS):
        if not any(map(texts.is_wanted, range(len(texts.requests)))):
            return
        parts.append(head(some, [0, len(some)]).cpu())
        yield None
    scores = parts[0] if len(parts) == 1 else torch.cat(parts)  # [M, C]
    parts.clear()
    for number, request, rows in texts.wanted():
        own = scores[rows]
        finite = bool(own.isfinite().all())
        yield number, copy_scores(own if request.raw else head.postprocess(own)) if finite else None
        yield None


def copy_scores(scores: Tensor) -> TokenOutputs:
    """[T, C] float32, copied: a slice would keep the scores of the other texts in memory."""
    return TokenOutputs(memoryview(scores.numpy().tobytes()).cast("f", scores.shape))


def read_candidates(head: OutputHead, texts: TextRows) -> Answers:
    """The likeliest tokens for each position.  Only VOCABULARY_ROWS rows as wide as the vocabulary exist at a time."""
    owners = [number for number, (start, end) in enumerate(pairwise(texts.starts)) for _ in range(start, end)]
    found: list[list[Candidates]] = [[] for _ in texts.requests]
    first, count = 0, vocabulary_rows(head)
    for part in torch.split(texts.states, count):
        some = owners[first : first + count]
        if any(map(texts.is_wanted, {*some})):
            requests = [texts.requests[number] for number in some]
            for number, candidates in zip(
                some, top_candidates(head, head(part, [0, len(part)]), requests), strict=True
            ):
                found[number].append(candidates)
            yield None
        first += len(some)
    for number, _, _ in texts.wanted():
        yield number, TokenCandidates(tuple(found[number])) if all(found[number]) else None


def vocabulary_rows(head: OutputHead) -> int:
    """How many rows of vocabulary width are one piece of work."""
    products = sum(each.numel() for each in head.parameters()) if isinstance(head, nn.Module) else 1
    return max(min(PIECE_PRODUCTS // products, VOCABULARY_ROWS), LEAST_VOCABULARY_ROWS)


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


def read_vocabulary_weights(head: OutputHead, texts: TextRows) -> Answers:
    """The weight of each vocabulary entry for a text, if not zero; see models.network.heads.SparsePooling."""
    if isinstance(head, TokenWeightHead | TokenTableHead):
        yield from read_token_weights(head, texts)
        return
    pooling: SparsePooling = getattr(head, "sparse", SparsePooling())
    count = vocabulary_rows(head)
    for number, _, rows in texts.wanted():
        pooled: Tensor | None = None  # [V]
        for piece in torch.split(texts.states[rows], count):
            if not texts.is_wanted(number):
                break
            pooled = pool_words(pooled, head(piece, [0, len(piece)]), pooling)
            yield None
        else:
            assert pooled is not None, "a text has rows"
            yield number, list_words(pooled if pooling.sums else weigh_words(pooled, pooling))


def pool_words(before: Tensor | None, logits: Tensor, pooling: SparsePooling) -> Tensor:
    """What is known of earlier rows of a text, and the logits [R, V] of more, to [V]: the sum of their weights or the
    largest logits."""
    # Row by row: a sum must not depend on how rows are cut into pieces.
    rows = iter(weigh_words(logits, pooling)) if pooling.sums else iter([logits.amax(dim=0)])
    add = torch.add if pooling.sums else torch.maximum
    pooled = next(rows) if before is None else before
    for row in rows:
        pooled = add(pooled, row)
    return pooled


def list_words(pooled: Tensor) -> TokenCandidates | None:
    """The words with a weight; None if one of them is not finite."""
    tokens = pooled.nonzero()[:, 0]
    candidates = tuple(zip(tokens.tolist(), pooled[tokens].tolist(), strict=True))
    return TokenCandidates((candidates,)) if bool(pooled.isfinite().all()) else None


def read_token_weights(head: TokenWeightHead | TokenTableHead, texts: TextRows) -> Answers:
    """The largest weight of each token of a text, if not zero."""
    weights = None if isinstance(head, TokenTableHead) else head(texts.states, texts.starts)[:, 0].cpu()  # [M]
    for number, request, rows in texts.wanted():
        tokens = [request.tokens[row] for row in request.rows] or request.tokens
        if weights is None:
            device = next(head.parameters()).device
            own = head(torch.tensor(tokens, device=device), [0, len(tokens)]).cpu()
        else:
            own = weights[rows]
        found = dict[int, float]()
        for token, weight in zip(tokens, own.tolist(), strict=True):
            if weight and token not in head.skipped:
                found[token] = max(weight, found.get(token, weight))
        finite = bool(own.isfinite().all())
        yield number, TokenCandidates((tuple(sorted(found.items())),)) if finite else None
        yield None


def weigh_words(logits: Tensor, pooling: SparsePooling) -> Tensor:
    """Logits to weights of words, element by element."""
    weights = logits.relu().log1p()
    return weights.log1p() if pooling.log_twice else weights


def read_label_spans(head: OutputHead, texts: TextRows) -> Answers:
    """A row of probabilities for each word: of its spans, or of itself, for each label."""
    return read_scorings(texts, partial(score_labels, head), lambda raw: copy_scores(head.postprocess(raw.cpu())))


def read_label_texts(head: OutputHead, texts: TextRows) -> Answers:
    """A raw score for each label of each text."""
    return read_scorings(texts, partial(score_labels, head), list_scores)


def read_decisions(head: OutputHead, texts: TextRows) -> Answers:
    """A raw score for each option of the questions about each text."""
    return read_scorings(texts, partial(score_options, head), list_scores)


def read_scorings(
    texts: TextRows, begin: Callable[[Tensor, Encode], Pieces[Tensor]], write: Callable[[Tensor], HeadEvent]
) -> Answers:
    """What `write` makes of the scores of each text, whose computation `begin` returns."""
    for number, request, rows in texts.wanted():
        raw = yield from compute_wanted(begin(texts.states[rows], request), partial(texts.is_wanted, number))
        if raw is not None:
            yield number, write(raw) if bool(raw.isfinite().all()) else None
            yield None


def compute_wanted(pieces: Pieces[Tensor], is_wanted: Callable[[], bool]) -> Generator[None, None, Tensor | None]:
    """The result of `pieces`; None if it is not wanted any more."""
    while is_wanted():
        try:
            next(pieces)
        except StopIteration as over:
            return cast(Tensor, over.value)
        yield
    return None


def score_labels(head: OutputHead, states: Tensor, request: Encode) -> Pieces[Tensor]:
    """The raw scores of a text [T, W] for its labels. Without labels, in a test, the first row is one."""
    return cast(LabelHead, head).score_in_pieces(states, request.label_rows or (0,), request.text_rows or (0,))


def score_options(head: OutputHead, states: Tensor, request: Encode) -> Pieces[Tensor]:
    """The raw scores of the options of a text's questions. Without options, in a test, the first row is one."""
    kind = PROMPT_KINDS.index(request.question)
    return cast(DecisionHead, head).score_in_pieces(states, request.label_rows or (0,), kind)


def list_scores(raw: Tensor) -> HeadOutput:
    return HeadOutput(raw.tolist())


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
READERS: dict[Task | OutputForm, Callable[[OutputHead, TextRows], Answers]] = {
    "tag": read_tables,
    "span": read_tables,
    "fill": read_candidates,
    "tokens": read_tables,
    "words": read_vocabulary_weights,
    "label_spans": read_label_spans,
    "label_texts": read_label_texts,
    "decide": read_decisions,
}
