"""An answer that is thought about first: anything until the end of the thought, then what a grammar asks for.

Knows neither grammar nor tensor.  The one idea: tags are found in the bytes of tokens, wherever tokens begin and end;
where something must follow a tag, no token may reach over its end.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.grammar import Thinking
from ..core.guide import Asked, Walk
from .vocabulary_bytes import Lexicon

GAP = "\n\n"  # what templates write between a thought and what follows it, at most


class Taking(Walk, Protocol):
    """A walk that can be asked whether it would go on with a token."""

    def takes(self, token: int) -> bool:
        """Whether `token` may come next; if so, it has."""


class Inner(Protocol):
    @property
    def asked(self) -> Asked: ...

    def begin(self) -> Taking: ...


class Thoughtful:
    """A guide for an answer that begins with a thought, and goes on as `inner` says; None: anyhow."""

    def __init__(self, lexicon: Lexicon, thinking: Thinking, inner: Inner | None) -> None:
        self._lexicon, self._thinking, self._inner = lexicon, thinking, inner
        self.asked = Asked(inner.asked.grammar if inner else None, thinking)
        lexicon.tag(thinking.end)
        if thinking.begin:
            lexicon.tag(thinking.begin)

    def begin(self) -> Walk:
        thought = Thought(self._lexicon, self._thinking, self._inner)
        return Opening(self._lexicon, self._thinking, self._inner, thought) if self._thinking.begin else thought


class Thought:
    """Thinking has begun.  Nothing ends the answer before the thought has ended, where something must follow that."""

    def __init__(self, lexicon: Lexicon, thinking: Thinking, inner: Inner | None) -> None:
        self._lexicon, self._tag, self._left = lexicon, lexicon.tag(thinking.end), thinking.budget
        self._inner = inner
        self._said = b""  # what may be the beginning of the tag
        self._closing: list[int] = []
        self._over = False
        self._after: Walk | None = None
        self._hurry()

    @property
    def ended(self) -> bool:
        return self._after is not None and self._after.ended

    def fill(self, words: NDArray[np.int32]) -> bool:
        if self._over:
            return self._after is not None and self._after.fill(words)
        if self._closing:
            words[:] = self._lexicon.bits(self._closing[:1])
        elif self._inner is not None:
            words[:] = self._lexicon.open
            for there in range(len(self._tag.text)):
                if self._said.endswith(self._tag.text[:there]):
                    words &= ~self._tag.over[there]
        return bool(self._closing) or self._inner is not None

    def advance(self, token: int) -> None:
        if self._over:
            if self._after is not None:
                self._after.advance(token)
            return
        self._closing = self._closing[1:]
        self._left -= self._left > 0
        self.hear(self._lexicon.spelled[token])

    def forced(self) -> list[int]:
        if self._over:
            return self._after.forced() if self._after is not None else []
        return list(self._closing)

    def hear(self, said: bytes) -> None:
        """More of the thought."""
        self._said += said
        if self._tag.text in self._said:
            self._over, self._closing = True, []
            self._after = Gap(self._lexicon, self._inner.begin()) if self._inner is not None else None
            return
        self._said = self._said[-len(self._tag.text) :]
        self._hurry()

    def _hurry(self) -> None:
        """Where nothing is left of the budget, what is missing of the tag must come."""
        if self._left == 0 and not self._closing:
            there = max(n for n in range(len(self._tag.text)) if self._said.endswith(self._tag.text[:n]))
            self._closing = list(self._tag.rest[there])


class Gap:
    """After a thought, whoever ended it: lines may be left empty, as templates do, before `inner` begins."""

    def __init__(self, lexicon: Lexicon, inner: Walk) -> None:
        self._lexicon, self._gap, self._inner = lexicon, lexicon.tag(GAP), inner
        self._left = self._gap.text  # of the gap; none once `inner` has begun

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def fill(self, words: NDArray[np.int32]) -> bool:
        filled = self._inner.fill(words)
        if filled and self._left:
            words |= self._gap.along[-len(self._left)]
        return filled

    def advance(self, token: int) -> None:
        said = self._lexicon.spelled[token]
        if said and self._left.startswith(said):
            self._left = self._left.removeprefix(said)
        else:
            self._left = b""
            self._inner.advance(token)

    def forced(self) -> list[int]:
        return [] if self._left else self._inner.forced()


class Opening:
    """Thinking may begin, with a tag; or, where what comes is not that tag, the answer itself has begun."""

    def __init__(self, lexicon: Lexicon, thinking: Thinking, inner: Inner | None, thought: Thought) -> None:
        self._lexicon, self._tag, self._thought = lexicon, lexicon.tag(thinking.begin), thought
        self._direct: Taking | None = inner.begin() if inner is not None else None  # no thought at all
        self._guided = inner is not None
        self._there = 0  # bytes of the tag
        self._walk: Walk | None = None  # once it is known
        self._known = False

    @property
    def ended(self) -> bool:
        return self._walk is not None and self._walk.ended

    def fill(self, words: NDArray[np.int32]) -> bool:
        if self._known or not self._guided:
            return self._walk is not None and self._walk.fill(words)
        if self._direct is not None:
            self._direct.fill(words)
        words |= self._tag.along[self._there]
        return True

    def advance(self, token: int) -> None:
        if self._known:
            if self._walk is not None:
                self._walk.advance(token)
            return
        if self._direct is not None and not self._direct.takes(token):
            self._direct = None
        self._hear(self._lexicon.spelled[token])

    def forced(self) -> list[int]:
        return self._walk.forced() if self._walk is not None else []

    def _hear(self, said: bytes) -> None:
        missing = self._tag.text[self._there :]
        if said.startswith(missing):
            self._known, self._walk, self._direct = True, self._thought, None
            self._thought.hear(said[len(missing) :])
        elif said and missing.startswith(said):
            self._there += len(said)
        else:
            self._known, self._walk = True, self._direct
