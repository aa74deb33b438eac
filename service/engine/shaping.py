"""What is done to logits before a token is drawn from them: for the batch at once, from each answer's own history.

Knows tokens and what was asked of them; nothing of sequences, and nothing of drawing.  The one idea: what changes is a
few words of a row, so these are looked up, changed and put back, for all rows together; which words may come at all is
a row of bits.

What is asked applies in the order in which transformers' `_get_logits_processor` has it, and means what it means there:
bias (SequenceBias), repetition penalty, then frequency and presence penalty (which it lacks: as the OpenAI API defines
them, of the answer alone), banned rows (NoBadWords: a stop token is never banned by itself), least tokens
(MinNewTokensLength), allowed tokens (PrefixConstrained).  A row of which nothing is left is minus infinity throughout,
where transformers would let allowed tokens come after all: nothing can be drawn from it, as `sampler.sample` tells.
Tokens that the model does not have change nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from service.request import Generate, Sampling

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Words = NDArray[np.int32]
Drafts = tuple[int, ...]
Edit = tuple[Ints, Floats]
NONE = np.empty(0, np.int64)
NEVER = float("-inf")
FEW = 8  # where one in so many may come, they are put into an empty row; else the others are taken out


class Tally:
    """Tokens, each once, and how often they were added since."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        self._tokens = np.fromiter(self._places, np.int64)
        self._counts = np.zeros(len(self._tokens), np.float32)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place >= len(self._tokens):
            more = len(self._tokens) + 16
            self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._tokens[place] = token
        self._counts[place] += 1

    def after(self, drafts: Drafts) -> Edit:
        """Tokens and counts, as if these had been added."""
        tokens, counts = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        if not drafts:
            return tokens, counts
        drafted = Counter(drafts)
        known = [token for token in drafted if token in self._places]
        others = [token for token in drafted if token not in self._places]
        counts = np.append(counts, [drafted[token] for token in others]).astype(np.float32)
        counts[[self._places[token] for token in known]] += [drafted[token] for token in known]
        return np.append(tokens, np.array(others, np.int64)), counts


@dataclass(frozen=True, slots=True)
class Fixed:
    """What of a request does not depend on its answer, for a vocabulary."""

    biased: Edit
    banned: Ints
    stops: Ints
    allowed: Words  # bit i for token i; empty: all


class Shape:
    """What one request asks of its logits, and the history that this depends on."""

    def __init__(self, request: Generate) -> None:
        sampling = request.sampling
        self._request, self._sampling, self._fixed = request, sampling, dict[int, Fixed]()
        self._repeats = sampling.repetition_penalty != 1
        self._counts = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._seen, self._said, self._answered = Tally(request.tokens if self._repeats else ()), Tally(), 0
        self._rows: dict[int, list[tuple[int, ...]]] = {}  # banned ones of several tokens, by the last but one
        for row in sampling.banned:
            if len(row) > 1:
                self._rows.setdefault(row[-2], []).append(row)
        self._reach = max(map(len, sampling.banned), default=0)
        self._tail = request.tokens[-self._reach :] if self._rows else ()

    def push(self, token: int) -> None:
        """`token` was drawn and is kept."""
        self._answered += 1
        if self._repeats:
            self._seen.add(token)
        if self._counts:
            self._said.add(token)
        if self._rows:
            self._tail = (*self._tail[1 - self._reach :], token)

    def fixed(self, vocabulary: int) -> Fixed:
        if vocabulary not in self._fixed:
            self._fixed[vocabulary] = fixed(self._request, vocabulary)
        return self._fixed[vocabulary]

    def biased(self, drafts: Drafts, vocabulary: int) -> Edit:  # noqa: ARG002
        """What is added to which tokens."""
        return self.fixed(vocabulary).biased

    def seen(self, drafts: Drafts, vocabulary: int) -> Edit:  # noqa: ARG002
        """The tokens of prompt and answer, and by how much they are less likely: a factor."""
        tokens = self._seen.after(drafts)[0] if self._repeats else NONE
        return tokens, np.full(len(tokens), self._sampling.repetition_penalty, np.float32)

    def said(self, drafts: Drafts, vocabulary: int) -> Edit:  # noqa: ARG002
        """The tokens of the answer, and what is added to them."""
        tokens, counts = self._said.after(drafts if self._counts else ())
        return tokens, -self._sampling.frequency_penalty * counts - self._sampling.presence_penalty

    def never(self, drafts: Drafts, vocabulary: int) -> Edit:
        """What must not come next, and what is added to it."""
        fixed = self.fixed(vocabulary)
        early = self._answered + len(drafts) < self._sampling.min_tokens
        found = [fixed.banned, fixed.stops] if early else [fixed.banned]
        tail = (*self._tail, *drafts)
        if rows := self._rows.get(tail[-1]) if self._rows else None:
            found.append(inside((row[-1] for row in rows if tail[1 - len(row) :] == row[:-1]), vocabulary))
        tokens = np.concatenate(found)
        return tokens, np.full(len(tokens), NEVER, np.float32)


Row = tuple[Shape | None, Drafts]


def shaped(sampling: Sampling) -> bool:
    """Whether there is anything to do before a token is drawn."""
    penalties = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    return bool(penalties or sampling.bias or sampling.allowed or sampling.banned or sampling.min_tokens)


def shape(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[N, V], of which rows with a shape are as it asks after its history and these drafts.

    `logits` stay as they are; the same tensor comes back where no row has a shape.
    """
    asked = [(number, shape, drafts) for number, (shape, drafts) in enumerate(rows) if shape is not None]
    if not asked:
        return logits
    out, vocabulary = logits.clone(memory_format=torch.contiguous_format), logits.size(1)
    for told, change in STEPS:
        edits = [(number, *told(shape, drafts, vocabulary)) for number, shape, drafts in asked]
        if edits := [edit for edit in edits if len(edit[1])]:
            places = np.concatenate([number * vocabulary + tokens for number, tokens, _ in edits])
            values = np.concatenate([values for _, _, values in edits])
            change(out.view(-1), torch.from_numpy(places).to(out.device), torch.from_numpy(values).to(out.device))
    for number, shape, _ in asked:
        if len(words := shape.fixed(vocabulary).allowed):
            keep(out[number], words, out[number])
    return out


def restrict(logits: Tensor, rows: Sequence[int], words: Tensor | Words) -> Tensor:
    """[N, V], of which `rows` are minus infinity where bit i of their words [len(rows), ceil(V / 32)] is 0.

    `logits` stay as they are; the same tensor comes back where there are no rows.
    """
    if not rows:
        return logits
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    kept = dict(zip(rows, np.asarray(words), strict=True))
    for number, row in enumerate(logits):
        if number in kept:
            keep(row, kept[number], out[number])
        else:
            out[number] = row
    return out


def add(flat: Tensor, places: Tensor, values: Tensor) -> None:
    flat.index_add_(0, places, values)


def repel(flat: Tensor, places: Tensor, values: Tensor) -> None:
    """As RepetitionPenaltyLogitsProcessor does: what is negative grows, what is positive shrinks."""
    found = flat[places]
    flat[places] = torch.where(found < 0, found * values, found / values)


STEPS = ((Shape.biased, add), (Shape.seen, repel), (Shape.said, add), (Shape.never, add))


def keep(row: Tensor, words: Words, out: Tensor) -> None:
    """Put into `out` [V] what `row` [V] has where the bits of `words` are 1, minus infinity elsewhere."""
    vocabulary = len(row)
    if int(np.bitwise_count(words).sum()) * FEW < vocabulary:
        places = torch.from_numpy(ones(words, vocabulary)).to(row.device)
        values = row[places]
        out.fill_(NEVER)
        out[places] = values
    else:
        bits = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little")
        torch.where(torch.from_numpy(bits.view(np.bool_)).to(row.device), row, torch.tensor(NEVER), out=out)


def ones(words: Words, vocabulary: int) -> Ints:
    """The tokens whose bits are 1."""
    some = np.flatnonzero(words)
    bits = np.unpackbits(words[some].view(np.uint8), bitorder="little")
    at = np.flatnonzero(bits)
    tokens = some[at // 32] * 32 + at % 32
    return tokens[tokens < vocabulary]


def fixed(request: Generate, vocabulary: int) -> Fixed:
    sampling = request.sampling
    bias = {token: value for token, value in sampling.bias if token < vocabulary}
    single = {row[0] for row in sampling.banned if len(row) == 1}
    allowed = np.empty(0, np.int32)
    if sampling.allowed:
        bits = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
        bits[inside(sampling.allowed, vocabulary)] = True
        allowed = np.packbits(bits, bitorder="little").view(np.int32)
    return Fixed(
        (np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)),
        inside(single - request.stop_tokens, vocabulary),
        inside(request.stop_tokens, vocabulary) if sampling.min_tokens else NONE,
        allowed,
    )


def inside(tokens: Iterable[int], vocabulary: int) -> Ints:
    """Those that the model has."""
    return np.array([token for token in tokens if token < vocabulary], np.int64)
