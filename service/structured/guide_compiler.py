"""Grammars compiled for a model: what they ask for, token by token, by llguidance.

Knows no HTTP and no tensor.  The one idea: a guide is compiled once and kept; every answer walks a copy of it.  What
a client wrote is tried in another process first (`service.structured.grammar_check`), where it can take as long as
it likes."""

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from polyhead.models.tokenizer import Tokenizer, TokenizerError

from ..concurrency.outcome import attempt, result
from ..core.errors import BadRequest, PolyheadError, TooComplex
from ..core.grammar import Grammar, Thinking
from ..core.guide import Asked, Guide
from ..core.model import Model
from .grammar_check import Trials
from .grammar_child import LIMITS, sentence, written
from .thinking import Thoughtful
from .vocabulary_bytes import Lexicon

T = TypeVar("T")
MOST_KEPT, MOST_CHARACTERS = 128, 1 << 22  # guides of a model, and of their sources
MOST_FORCED = 64  # tokens that come without a choice in one step
FIRST_STEPS = 3  # that are tried before anybody is given a guide


class Guides:
    """Those of all models.  Threads may share it."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._kept: WeakKeyDictionary[Tokenizer, Kept | str] = WeakKeyDictionary()  # or why it can have no guide
        self._lock = Lock()

    def known(self, model: Model, grammar: Grammar | None, thinking: Thinking | None) -> Guide | None:
        """A guide that is there already; it costs nothing to ask."""
        kept = self._kept.get(model.tokenizer)
        inner = kept.find(grammar) if isinstance(kept, Kept) and grammar is not None else None
        return inner if thinking is None else None

    def guide(self, model: Model, grammar: Grammar | None, thinking: Thinking | None) -> Guide | None:
        """What an answer must look like; None if it may be anything.  BadRequest names the field and what is wrong.

        It can take seconds: where the model has none yet, and where a grammar is hard.
        """
        if grammar is None and (thinking is None or thinking.budget < 0):
            return None
        kept = self._of(model, grammar.field if grammar is not None else "thinking_budget")
        inner = self._compiled(kept, grammar) if grammar is not None else None
        return inner if thinking is None else Thoughtful(kept.lexicon, thinking, inner)

    def expect(self, model: Model) -> None:
        """Make now what any guide of a model needs, so that nobody waits for it who asks for one."""
        with suppress(BadRequest):  # it cannot have any, as those will hear who ask
            self._of(model, "")

    def close(self) -> None:
        self._trials.close()

    def _of(self, model: Model, field: str) -> "Kept":
        """BadRequest naming the field where the model can have no guide, which is found out once."""
        with self._lock:
            kept = self._kept.get(model.tokenizer)
            if kept is None:
                kept = self._kept[model.tokenizer] = prepared(model)
        if isinstance(kept, str):
            raise BadRequest(f"{field}: {kept}", param=field)
        return kept

    def _compiled(self, kept: "Kept", grammar: Grammar) -> "Compiled":
        found = kept.find(grammar)
        if found is None:
            harmless = grammar.kind == "object"
            source = written("object", "") if harmless else self._trials.written(grammar, kept.lexicon.outline)
            found = compiled(kept.lexicon, source, grammar)
            kept.keep(grammar, found)
        return found


def prepared(model: Model) -> "Kept | str":
    """A place for a model's guides, or why it can have none; a panic of the library is such a reason too."""
    try:
        return Kept(asked(lambda: Lexicon(model)))
    except (PolyheadError, TokenizerError) as error:
        return str(error)


class Kept:
    """A model's guides, those that were asked for last."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        self._guides: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def find(self, grammar: Grammar) -> "Compiled | None":
        key = grammar.kind, grammar.source
        with self._lock:
            found = self._guides.get(key)
            if found is not None:
                self._guides.move_to_end(key)
            return found

    def keep(self, grammar: Grammar, guide: "Compiled") -> None:
        key = grammar.kind, grammar.source
        with self._lock:
            if key in self._guides:
                return
            self._guides[key] = guide
            self._characters += len(grammar.source)
            while len(self._guides) > MOST_KEPT or self._characters > MOST_CHARACTERS:
                (_, source), _ = self._guides.popitem(last=False)
                self._characters -= len(source)


def compiled(lexicon: Lexicon, source: str, grammar: Grammar) -> "Compiled":
    """A guide that has shown that it can be followed, for a few steps.  BadRequest otherwise."""
    field = grammar.field
    matcher = LLMatcher(lexicon.tokenizer, source, log_level=0, limits=LIMITS)
    ahead = matcher.deep_copy()
    words = np.zeros(-(-lexicon.size // 32), np.int32)
    for _ in range(FIRST_STEPS):
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            ahead.consume_token(first(words))
    if matcher.is_error() or ahead.is_error():
        raise BadRequest(f"{field}: {sentence(matcher.get_error() or ahead.get_error())}", param=field)
    return Compiled(matcher, grammar)


def asked(ask: Callable[[], T]) -> T:
    """What the library answers to `ask`.  Raises PolyheadError where it panics, so that one answer fails alone."""
    return result(attempt(ask))


def first(words: NDArray[np.int32]) -> int:
    """The lowest token whose bit is set."""
    return int(np.unpackbits(words.view(np.uint8), bitorder="little").argmax())


class Compiled:
    """A grammar of a vocabulary."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar) -> None:
        self._matcher, self.asked = matcher, Asked(grammar, None)

    def begin(self) -> "Matched":
        return Matched(asked(self._matcher.deep_copy))


class Matched:
    """One answer's way through a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._ahead = deque[int]()  # tokens that must come next and were not returned yet

    @property
    def ended(self) -> bool:
        return asked(self._matcher.is_stopped)

    def fill(self, words: NDArray[np.int32]) -> bool:
        assert words.flags.c_contiguous
        if self._ahead:
            words[:] = np.packbits(np.arange(words.size * 32) == self._ahead[0], bitorder="little").view(np.int32)
            return True
        asked(lambda: self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        self._check()
        return True

    def advance(self, token: int) -> None:
        asked(lambda: self._matcher.consume_token(token))
        self._check()
        self._follow(token)

    def takes(self, token: int) -> bool:
        """Whether `token` may come next; if so, it has."""
        taken = asked(lambda: self._matcher.try_consume_tokens([token])) == 1
        self._check()
        if taken:
            self._follow(token)
        return taken

    def forced(self) -> list[int]:
        """Of a long literal MOST_FORCED at a time: it is looked for once, and no step has all of it."""
        if not self._ahead:
            self._ahead.extend(asked(self._matcher.compute_ff_tokens))
            self._check()
        return list(islice(self._ahead, MOST_FORCED))

    def _follow(self, token: int) -> None:
        if self._ahead and self._ahead[0] == token:
            self._ahead.popleft()
        else:
            self._ahead.clear()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TooComplex(f"the answer's form has become too complex: {sentence(self._matcher.get_error())}")
