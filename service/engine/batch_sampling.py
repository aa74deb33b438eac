"""What comes next for everybody who has caught up: masks, shapes, chance and scores, for the whole batch at once.

Knows logits and who talks; nothing of blocks or tickets.  The one idea: every token is drawn from one row of logits and
what belongs to its talk alone, so a row may be asked several times (answers that begin together) and a talk may have
several rows (a draft): what is drawn is the same.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.executors.contract import Rows

from ..concurrency.outcome import Failure, attempt
from ..core.errors import PolyheadError
from .beam_groups import Turn
from .logits_processors import shape
from .request_state import Talk
from .sampler import UNSCORED, Ask, Sampler, Scored, score
from .scheduler import Chunk, rows_wanted
from .scheduler import Sequence as Queued


@dataclass(frozen=True, slots=True)
class Slice:
    """A chunk of a step, whose talk it is, and which rows of the logits are its: the last `count`, from `first` on."""

    chunk: Chunk
    talk: Talk
    first: int
    count: int

    @property
    def last(self) -> int:
        """The row after the last token that is no draft."""
        return self.first + self.count - 1 - self.chunk.draft


def slices_of(chunks: Sequence[Chunk], talks: Mapping[Queued, Talk]) -> list[Slice]:
    """Logits are wanted where a sequence catches up, after each token of its draft, and all over a prompt to score."""
    slices, first = [], 0
    for chunk in chunks:
        count = rows_wanted(chunk)
        slices.append(Slice(chunk, talks[chunk.sequence], first, count))
        first += count
    return slices


def lay_out(slices: Sequence[Slice], block_size: int) -> Rows:
    """The chunks end to end, as an executor wants them."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    starts, tables = [0], []
    for each in slices:
        chunk, sequence = each.chunk, each.chunk.sequence
        known = sequence.computed + chunk.count
        tokens += sequence.tokens[sequence.computed : known] + sequence.draft[: chunk.draft]
        positions += range(sequence.computed, known + chunk.draft)
        starts.append(len(tokens))
        tables.append(sequence.blocks[: -(-(known + chunk.draft) // block_size)])
        wanted += range(len(tokens) - each.count, len(tokens))
    adapters = [each.chunk.sequence.adapter for each in slices]
    sources = [each.chunk.sequence.source for each in slices]
    return Rows(
        tokens,
        positions,
        starts,
        tables,
        wanted,
        adapters=adapters if any(adapters) else None,
        sources=sources if any(sources) else None,
    )


@dataclass(frozen=True, slots=True)
class Draw:
    """The token of `talk` that follows the tokens `ahead` of what it has said, by a row of logits.

    If it is the first of the `draft`, the next row says what follows it.
    """

    talk: Talk
    row: int
    draft: tuple[int, ...]
    ahead: tuple[int, ...] = ()

    @property
    def obvious(self) -> bool:
        """Whether it is the likeliest token as it is, and nothing else is asked of it."""
        request = self.talk.request
        return not request.sampling.temperature and request.logprobs < 0 and not (self.talk.shape or self.talk.walk)

    def ask(self, masks: "Masks") -> Ask:
        talk, request = self.talk, self.talk.request
        shape = None if talk.shape is None else talk.shape.after(self.ahead)
        words = masks.words[masks.row_of[talk]] if talk in masks.row_of else None
        return Ask(self.row, request.sampling, talk.uniform(len(self.ahead)), shape, words, request.logprobs)

    def after(self, token: int) -> "Draw":
        """The next, once the first of the draft has come."""
        return Draw(self.talk, self.row + 1, self.draft[1:], (*self.ahead, token))


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may come next: a row of bits for each talk that has a say in it, and those who failed to."""

    row_of: dict[Talk, int] = field(default_factory=dict)
    words: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    failed: dict[Talk, PolyheadError] = field(default_factory=dict)


class Masking:
    """Fills masks on a thread of its own while the network computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._started: Future[Masks] | None = None
        self._talks: list[Talk] = []

    def start(self, talks: list[Talk], words: int) -> None:
        """For a vocabulary of `words`; 0 where it is not known yet."""
        self._talks = talks
        self._started = self._thread.submit(masks, talks, words) if talks and words else None

    def ready(self, words: int) -> Masks:
        """Of the talks that it was started for."""
        return masks(self._talks, words) if self._started is None else self._started.result()


def masks(talks: Sequence[Talk], words: int) -> Masks:
    made = Masks(words=np.zeros((len(talks), -(-words // 32)), np.int32))
    for talk in talks:
        assert talk.walk is not None
        row = len(made.row_of)
        filled = attempt(partial(talk.walk.fill, made.words[row]))
        if isinstance(filled, Failure):
            if not isinstance(filled.error, PolyheadError):  # a fault of ours: the step fails
                raise filled.error
            made.words[row] = 0
            made.failed[talk] = filled.error
        elif filled:
            made.row_of[talk] = row
    return made


def guided(slices: Sequence[Slice]) -> list[Talk]:
    """Those who will draw and have a say in what may come."""
    return [talk for each in slices if each.chunk.last for talk in voices(each.talk) if talk.walk is not None]


def voices(talk: Talk) -> list[Talk]:
    """Who goes on from where `talk` is, if anybody draws."""
    return [talk, *talk.followers] if talk.search is None and talk.request.max_tokens else []


def draws(slices: Sequence[Slice], masks: Masks) -> list[Draw]:
    return [
        Draw(talk, each.last, tuple(each.chunk.sequence.draft[: each.chunk.draft]))
        for each in slices
        if each.chunk.last
        for talk in voices(each.talk)
        if talk not in masks.failed
    ]


def drawn(
    logits: Tensor, slices: Sequence[Slice], likeliest: Sequence[int] | None, masks: Masks, sampler: Sampler
) -> dict[Talk, list[tuple[int, Scored]]]:
    """What everybody says: a token, and another one as long as the draft before it is right, so none is in vain.

    `likeliest` is of each row of `logits`.
    """
    said: dict[Talk, list[tuple[int, Scored]]] = {}
    going = draws(slices, masks)
    while going:
        known = [-1 if likeliest is None or not one.obvious else likeliest[one.row] for one in going]
        asks = [one.ask(masks) for one, token in zip(going, known, strict=True) if token < 0]
        found = iter(sampler.draw(logits, asks) if asks else ())
        for one, token in zip(going, known, strict=True):
            said.setdefault(one.talk, []).append((token, UNSCORED) if token >= 0 else next(found))
        going = [one.after(token) for one in going if (token := said[one.talk][-1][0]) in one.draft[:1]]
    return said


def spoiled_of(
    slices: Sequence[Slice], whole: Sequence[bool], tables: Sequence[Sequence[int]], poisoned: AbstractSet[int]
) -> set[Talk]:
    """Those of whom logits, keys or values are no numbers; `whole` says so of each row of logits."""
    return {
        each.talk
        for each, table in zip(slices, tables, strict=True)
        if not all(whole[each.first : each.first + each.count]) or not poisoned.isdisjoint(table)
    }


def prompt_scores(each: Slice, logits: Tensor) -> list[Scored]:
    """Of those tokens of a prompt to score that follow the chunk's and have none yet."""
    talk, sequence = each.talk, each.chunk.sequence
    if sequence.computed >= sequence.scored:
        return []
    begin = max(sequence.computed, len(talk.scores))
    rows = range(begin, min(sequence.computed + each.chunk.count, sequence.scored - 1))
    first = each.first - sequence.computed
    scored = logits[first + rows.start : first + rows.stop]
    tokens = [sequence.tokens[row + 1] for row in rows]
    return score(scored, tokens, [talk.request.prompt_logprobs] * len(rows)) if rows else []


def turns(slices: Sequence[Slice], logits: Tensor) -> list[tuple[Talk, dict[Queued, Tensor], Turn | None]]:
    """What a step says of each search: what comes after some of its beams; and if after all by now, how it goes on."""
    rows: dict[Talk, dict[Queued, Tensor]] = {}
    for each in slices:
        if each.talk.search is not None and each.chunk.last and each.talk.request.max_tokens:
            rows.setdefault(each.talk, {})[each.chunk.sequence] = logits[each.last].clone()
    return [(talk, known, turn(talk, known)) for talk, known in rows.items()]


def turn(talk: Talk, known: Mapping[Queued, Tensor]) -> Turn | None:
    """How a search goes on, once it is known what comes after all its beams."""
    search = talk.search
    assert search is not None
    rows = [known.get(beam.sequence, beam.logits) for beam in search.beams]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        return None
    logits = torch.stack(found)
    shapes = [beam.shape and beam.shape.after(()) for beam in search.beams]
    return search.turn(logits, shape(logits.log_softmax(dim=-1), shapes))
