"""What a head makes of a step's states, as the events that answer: one row of numbers a text, or one for each token.

Knows tensors and requests, no queue and no step.  The one idea: whatever leaves is as small as what was asked for, and
is computed so for each request alone: the rows beside it, and what their requests want, change nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..core.request import Encode, HeadOutput, OutputForm, Task, TokenCandidates, TokenOutputs

VOCABULARY_ROWS = 32  # rows that are a whole vocabulary wide at a time
FLOAT_BYTES = 4

HeadEvents = Sequence[HeadOutput | TokenOutputs | TokenCandidates | None]  # None: it would not be finite
Candidates = tuple[tuple[int, float], ...]


class OutputHead(Protocol):
    """What is made of the states: see models.network.heads."""

    def needed_rows(self, starts: list[int]) -> tuple[list[int], list[int]]:
        """The rows it reads of N texts, `starts` [N + 1], and where each text starts among those rows."""

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:
        """[M, W] states of those rows to [N, C], or to [M, C] where each row is answered for."""

    def postprocess(self, raw: Tensor) -> Tensor:
        """[N or M, C] to probabilities, or to unit length."""


def read_outputs(
    reading: Task | OutputForm,
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],
) -> HeadEvents:
    """What each of N requests is answered, from the states [M, W] of the rows that are wanted, `starts` [N + 1]."""
    return READERS.get(reading, read_vectors)(head, states, starts, requests)


def reading_bytes(task: Task, rows: int, columns: int) -> int:
    """At most alive while `rows` are read that have `columns` scores each, and until the answers are fetched."""
    match task:
        case "tag" | "span" | "embed":
            return 2 * FLOAT_BYTES * columns * rows  # scores, or states, and answers
        case "fill":
            return 3 * FLOAT_BYTES * columns * min(rows, VOCABULARY_ROWS)  # logits, those of a group, closed
        case _:
            return 0  # a handful of labels a text


def read_vectors(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """A row of numbers a text."""
    scores = head(states, starts)  # [N, C]
    whole = scores.isfinite().all(dim=1).tolist()
    groups: defaultdict[tuple[bool, bool, int], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        if whole[index]:
            groups[request.raw, request.unit, request.dimensions].append(index)
    answers: list[HeadOutput | None] = [None] * len(whole)
    for (raw, unit, dimensions), members in groups.items():
        some = scores if len(members) == len(whole) else scores[torch.tensor(members, device=scores.device)]
        some = some[:, :dimensions] if dimensions else some
        closed = some if raw else head.postprocess(some)
        closed = normalize(closed, dim=-1) if unit else closed
        for index, value in zip(members, closed.tolist(), strict=True):
            answers[index] = HeadOutput(value)
    return answers


def read_tables(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """A row of scores for each token.  Closed text by text, so that no more is alive than they and the answers."""
    scores = head(states, starts).cpu()  # [M, C]
    answers: list[TokenOutputs | None] = []
    for request, (start, end) in zip(requests, pairwise(starts), strict=True):
        mine = scores[start:end]
        whole = bool(mine.isfinite().all())
        answers.append(copy_scores(mine if request.raw else head.postprocess(mine)) if whole else None)
    return answers


def copy_scores(scores: Tensor) -> TokenOutputs:
    """[T, C] float32, copied: a slice would keep all that was beside it."""
    return TokenOutputs(memoryview(scores.numpy().tobytes()).cast("f", scores.shape))


def read_candidates(head: OutputHead, states: Tensor, starts: list[int], requests: Sequence[Encode]) -> HeadEvents:
    """The likeliest words for each token: a few of a row as wide as the vocabulary, of which few exist at a time."""
    counts = (end - start for start, end in pairwise(starts))
    asked = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
    found: list[Candidates] = []
    for first in range(0, len(states), VOCABULARY_ROWS):
        some = states[first : first + VOCABULARY_ROWS]
        found += top_candidates(head, head(some, [0, len(some)]), asked[first : first + VOCABULARY_ROWS])
    return [
        TokenCandidates(tuple(found[start:end])) if all(found[start:end]) else None for start, end in pairwise(starts)
    ]


def top_candidates(head: OutputHead, logits: Tensor, asked: Sequence[Encode]) -> list[Candidates]:
    """Of each row [R, V] what its request asks for; nothing of one that is not finite."""
    whole = logits.isfinite().all(dim=1).tolist()
    groups: defaultdict[tuple[bool, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, request in enumerate(asked):
        if whole[row]:
            groups[request.raw, request.top_k, request.targets].append(row)
    found: list[Candidates] = [()] * len(asked)
    for (raw, count, targets), members in groups.items():
        some = logits if len(members) == len(asked) else logits[torch.tensor(members, device=logits.device)]
        scores = some if raw else head.postprocess(some)
        words = torch.tensor(targets, device=scores.device) if targets else None
        scores = scores if words is None else scores[:, words]
        values, columns = scores.topk(min(count, scores.size(1)))
        columns = columns if words is None else words[columns]
        for row, ids, numbers in zip(members, columns.tolist(), values.tolist(), strict=True):
            found[row] = tuple(zip(ids, numbers, strict=True))
    return found


def read_vocabulary_weights(
    head: OutputHead,
    states: Tensor,
    starts: list[int],
    requests: Sequence[Encode],  # noqa: ARG001
) -> HeadEvents:
    """How much each text is about each word: log(1 + relu(logit)) where it is largest, of those that are not zero."""
    answers: list[TokenCandidates | None] = []
    for start, end in pairwise(starts):
        pieces = [states[first : min(first + VOCABULARY_ROWS, end)] for first in range(start, end, VOCABULARY_ROWS)]
        largest = reduce(torch.maximum, (head(piece, [0, len(piece)]).amax(dim=0) for piece in pieces))  # [V]
        weight = largest.relu().log1p()
        words = weight.nonzero()[:, 0]
        told = tuple(zip(words.tolist(), weight[words].tolist(), strict=True))
        answers.append(TokenCandidates((told,)) if bool(largest.isfinite().all()) else None)
    return answers


class StateHead:
    """The head of those who want the states themselves."""

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
}
