"""A guide for thinking models: free text until the end of the thought, then the answer's grammar.

The tags are found in the bytes of tokens, wherever tokens begin and end.  Where a grammar follows, no token may contain
the end of a tag and bytes after it.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..core.grammar import Thinking
from ..core.guide import Guide, GuideSpec, GuideState
from .vocabulary_bytes import TokenMask, VocabularyBytes

BLANK_LINES = "\n\n"  # at most what templates write between a thought and the answer
NewAnswer = Callable[[], GuideState]


class ThinkingGuide:
    """A guide for an answer that begins with a thought and continues by `answer_guide`; None: without a constraint."""

    def __init__(self, vocabulary: VocabularyBytes, thinking: Thinking, answer_guide: Guide | None) -> None:
        self._vocabulary, self._thinking, self._answer_guide = vocabulary, thinking, answer_guide
        self.spec = GuideSpec(answer_guide.spec.grammar if answer_guide else None, thinking)
        for tag in filter(None, (thinking.begin, thinking.end, BLANK_LINES)):
            vocabulary.tag_tokens(tag)  # once for a model: all tokens are searched

    def new_state(self, owner: str = "") -> GuideState:
        new_answer = None if self._answer_guide is None else partial(self._answer_guide.new_state, owner)
        thought = ThoughtState(self._vocabulary, self._thinking, new_answer)
        return (
            UndecidedState(self._vocabulary, self._thinking, new_answer, thought) if self._thinking.begin else thought
        )


class ThoughtState:
    """Inside a thought.  Where a guide follows, the answer cannot end before the thought has ended."""

    def __init__(self, vocabulary: VocabularyBytes, thinking: Thinking, new_answer: NewAnswer | None) -> None:
        self._vocabulary, self._tag, self._budget_left = (
            vocabulary,
            vocabulary.tag_tokens(thinking.end),
            thinking.budget,
        )
        self._new_answer = new_answer
        self._tail = b""  # the last bytes, which may be the beginning of the tag
        self._forced_end: list[int] = []
        self._has_ended = False
        self._answer: GuideState | None = None
        self._end_on_budget()

    @property
    def is_finished(self) -> bool:
        return self._answer is not None and self._answer.is_finished

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        if self._has_ended:
            return self._answer is not None and self._answer.fill_mask(mask)
        if self._forced_end:
            mask[:] = self._vocabulary.mask_of(self._forced_end[:1])
        elif self._new_answer is not None:
            mask[:] = self._vocabulary.continuing_mask
            for written in range(len(self._tag.text)):
                if self._tail.endswith(self._tag.text[:written]):
                    mask &= ~self._tag.crossing_masks[written]
        return bool(self._forced_end) or self._new_answer is not None

    def advance(self, token: int) -> None:
        if self._has_ended:
            if self._answer is not None:
                self._answer.advance(token)
            return
        self._forced_end = self._forced_end[1:]
        self._budget_left -= self._budget_left > 0
        self.append_bytes(self._vocabulary.token_bytes[token])

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        if self._has_ended:
            return self._answer.forced_tokens(computes=computes) if self._answer is not None else []
        return list(self._forced_end)

    def append_bytes(self, added: bytes) -> None:
        """Continue the thought with these bytes."""
        self._tail += added
        if self._tag.text in self._tail:
            self._has_ended, self._forced_end = True, []
            self._answer = (
                BlankLinesState(self._vocabulary, self._new_answer()) if self._new_answer is not None else None
            )
            return
        self._tail = self._tail[-len(self._tag.text) :]
        self._end_on_budget()

    def _end_on_budget(self) -> None:
        """If the budget is used up, force the missing bytes of the end tag."""
        if self._budget_left == 0 and not self._forced_end:
            written = max(n for n in range(len(self._tag.text)) if self._tail.endswith(self._tag.text[:n]))
            self._forced_end = list(self._tag.completions[written])


class BlankLinesState:
    """After a thought: blank lines are allowed, as chat templates write them, before the answer begins."""

    def __init__(self, vocabulary: VocabularyBytes, answer: GuideState) -> None:
        self._vocabulary, self._tag, self._answer = vocabulary, vocabulary.tag_tokens(BLANK_LINES), answer
        self._remaining = self._tag.text  # of the blank lines; empty once the answer has begun

    @property
    def is_finished(self) -> bool:
        return self._answer.is_finished

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        filled = self._answer.fill_mask(mask)
        if filled and self._remaining:
            mask |= self._tag.inside_masks[-len(self._remaining)]
        return filled

    def advance(self, token: int) -> None:
        added = self._vocabulary.token_bytes[token]
        if added and self._remaining.startswith(added):
            self._remaining = self._remaining.removeprefix(added)
        else:
            self._remaining = b""
            self._answer.advance(token)

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        return [] if self._remaining else self._answer.forced_tokens(computes=computes)


class UndecidedState:
    """At the start: either the thought begins with its tag, or the answer begins without a thought."""

    def __init__(
        self, vocabulary: VocabularyBytes, thinking: Thinking, new_answer: NewAnswer | None, thought: ThoughtState
    ) -> None:
        self._vocabulary, self._tag, self._thought = vocabulary, vocabulary.tag_tokens(thinking.begin), thought
        self._answer = new_answer() if new_answer is not None else None  # no thought at all
        self._answer_mask: TokenMask | None = None  # what the answer allows, without what the tag allows
        self._has_guide = new_answer is not None
        self._tag_bytes = 0  # bytes of the tag so far
        self._state: GuideState | None = None  # set when it is decided
        self._is_decided = False

    @property
    def is_finished(self) -> bool:
        return self._state is not None and self._state.is_finished

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        if self._is_decided or not self._has_guide:
            return self._state is not None and self._state.fill_mask(mask)
        if self._answer is not None:
            self._answer.fill_mask(mask)
            self._answer_mask = mask.copy()
        mask |= self._tag.inside_masks[self._tag_bytes]
        return True

    def advance(self, token: int) -> None:
        if self._is_decided:
            if self._state is not None:
                self._state.advance(token)
            return
        if self._answer is not None:
            assert self._answer_mask is not None, "the token was sampled without a mask"
            if self._answer_mask[token // 32] >> token % 32 & 1:
                self._answer.advance(token)
            else:
                self._answer = None
        self._answer_mask = None
        self._append_bytes(self._vocabulary.token_bytes[token])

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        return self._state.forced_tokens(computes=computes) if self._state is not None else []

    def _append_bytes(self, added: bytes) -> None:
        missing = self._tag.text[self._tag_bytes :]
        if added.startswith(missing):
            self._is_decided, self._state, self._answer = True, self._thought, None
            self._thought.append_bytes(added[len(missing) :])
        elif added and missing.startswith(added):
            self._tag_bytes += len(added)
        else:
            self._is_decided, self._state = True, self._answer
