"""Compiles grammars to guides with llguidance, for the vocabulary of a model.

A guide is compiled once and cached; each answer uses a copy of its matcher.  A client's grammar is checked in a child
process first (`service.structured.grammar_check`).
"""

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

from ..concurrency.outcome import attempt, unwrap
from ..core.errors import BadRequest, PolyheadError, TooComplex
from ..core.grammar import Grammar, Thinking
from ..core.guide import Guide, GuideSpec
from ..core.model import Model
from .grammar_check import GrammarCheck
from .grammar_child import PARSER_LIMITS, readable_error, to_llguidance
from .thinking import ThinkingGuide
from .vocabulary_bytes import VocabularyBytes

T = TypeVar("T")
MAX_CACHED_GUIDES, MAX_CACHED_CHARS = 128, 1 << 22  # guides of a model, and characters of their grammars
MAX_FORCED_TOKENS = 64  # forced tokens in one step
TRIAL_STEPS = 3  # that are tried before a guide is used


class GuideCompiler:
    """The guides of all models.  Any thread may call it."""

    def __init__(self) -> None:
        self._grammar_check = GrammarCheck()
        self._caches: WeakKeyDictionary[Tokenizer, GuideCache | str] = (
            WeakKeyDictionary()
        )  # or why the model can have no guides
        self._lock = Lock()

    def find_cached(self, model: Model, grammar: Grammar | None, thinking: Thinking | None) -> Guide | None:
        """A cached guide, or None.  Returns at once."""
        cache = self._caches.get(model.tokenizer)
        guide = cache.find(grammar) if isinstance(cache, GuideCache) and grammar is not None else None
        return guide if thinking is None else None

    def compile(self, model: Model, grammar: Grammar | None, thinking: Thinking | None) -> Guide | None:
        """The guide of an answer; None if nothing constrains it.

        Raises BadRequest, which names the field and what is wrong.  It can take seconds, for the first guide of a model
        or for a hard grammar.
        """
        if grammar is None and (thinking is None or thinking.budget < 0):
            return None
        cache = self._cache_of(model, grammar.field if grammar is not None else "thinking_budget")
        guide = self._compile_cached(cache, grammar) if grammar is not None else None
        return guide if thinking is None else ThinkingGuide(cache.vocabulary, thinking, guide)

    def prepare(self, model: Model) -> None:
        """Build what all guides of a model need, so that its first request does not wait for it."""
        with suppress(BadRequest):  # it cannot have guides: its requests get this error
            self._cache_of(model, "")

    def close(self) -> None:
        self._grammar_check.close()

    def _cache_of(self, model: Model, field: str) -> "GuideCache":
        """The cache of a model.  Raises BadRequest, which names the field, where the model can have no guides."""
        with self._lock:
            cache = self._caches.get(model.tokenizer)
            if cache is None:
                cache = self._caches[model.tokenizer] = build_cache(model)
        if isinstance(cache, str):
            raise BadRequest(f"{field}: {cache}", param=field)
        return cache

    def _compile_cached(self, cache: "GuideCache", grammar: Grammar) -> "CompiledGuide":
        guide = cache.find(grammar)
        if guide is None:
            is_trusted = grammar.kind == "object"
            source = (
                to_llguidance("object", "")
                if is_trusted
                else self._grammar_check.compile(grammar, cache.vocabulary.outline)
            )
            guide = compile_guide(cache.vocabulary, source, grammar)
            cache.add(grammar, guide)
        return guide


def build_cache(model: Model) -> "GuideCache | str":
    """An empty cache for a model, or why the model can have no guides, such as a panic of the library."""
    try:
        return GuideCache(call_library(lambda: VocabularyBytes(model)))
    except (PolyheadError, TokenizerError) as error:
        return str(error)


class GuideCache:
    """The guides of a model that were used last."""

    def __init__(self, vocabulary: VocabularyBytes) -> None:
        self.vocabulary = vocabulary
        self._guides: OrderedDict[tuple[str, str], CompiledGuide] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def find(self, grammar: Grammar) -> "CompiledGuide | None":
        key = grammar.kind, grammar.source
        with self._lock:
            found = self._guides.get(key)
            if found is not None:
                self._guides.move_to_end(key)
            return found

    def add(self, grammar: Grammar, guide: "CompiledGuide") -> None:
        key = grammar.kind, grammar.source
        with self._lock:
            if key in self._guides:
                return
            self._guides[key] = guide
            self._characters += len(grammar.source)
            while len(self._guides) > MAX_CACHED_GUIDES or self._characters > MAX_CACHED_CHARS:
                (_, source), _ = self._guides.popitem(last=False)
                self._characters -= len(source)


def compile_guide(vocabulary: VocabularyBytes, source: str, grammar: Grammar) -> "CompiledGuide":
    """Compile a grammar and try a few steps.  Raises BadRequest where one fails."""
    field = grammar.field
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=PARSER_LIMITS)
    ahead = matcher.deep_copy()
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    for _ in range(TRIAL_STEPS):
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            ahead.consume_token(lowest_token(mask))
    if matcher.is_error() or ahead.is_error():
        raise BadRequest(f"{field}: {readable_error(matcher.get_error() or ahead.get_error())}", param=field)
    return CompiledGuide(matcher, grammar)


def call_library(function: Callable[[], T]) -> T:
    """Call the library.  Raises PolyheadError where it panics, so that only one answer fails."""
    return unwrap(attempt(function))


def lowest_token(mask: NDArray[np.int32]) -> int:
    """The lowest token whose bit is set."""
    return int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax())


class CompiledGuide:
    """A grammar compiled for a vocabulary."""

    def __init__(self, matcher: LLMatcher, grammar: Grammar) -> None:
        self._matcher, self.spec = matcher, GuideSpec(grammar, None)

    def new_state(self) -> "GrammarState":
        return GrammarState(call_library(self._matcher.deep_copy))


class GrammarState:
    """The position of one answer in a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._pending_forced = deque[int]()  # tokens that must come next and were not appended yet

    @property
    def is_finished(self) -> bool:
        return call_library(self._matcher.is_stopped)

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        assert mask.flags.c_contiguous
        if self._pending_forced:
            mask[:] = np.packbits(np.arange(mask.size * 32) == self._pending_forced[0], bitorder="little").view(
                np.int32
            )
            return True
        call_library(lambda: self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
        self._raise_on_error()
        return True

    def advance(self, token: int) -> None:
        call_library(lambda: self._matcher.consume_token(token))
        self._raise_on_error()
        self._drop_forced(token)

    def try_advance(self, token: int) -> bool:
        """Append `token` if it is allowed; return whether it is."""
        is_allowed = call_library(lambda: self._matcher.try_consume_tokens([token])) == 1
        self._raise_on_error()
        if is_allowed:
            self._drop_forced(token)
        return is_allowed

    def forced_tokens(self) -> list[int]:
        """At most MAX_FORCED_TOKENS of a long literal: it is computed once, and no step gets all of it."""
        if not self._pending_forced:
            self._pending_forced.extend(call_library(self._matcher.compute_ff_tokens))
            self._raise_on_error()
        return list(islice(self._pending_forced, MAX_FORCED_TOKENS))

    def _drop_forced(self, token: int) -> None:
        if self._pending_forced and self._pending_forced[0] == token:
            self._pending_forced.popleft()
        else:
            self._pending_forced.clear()

    def _raise_on_error(self) -> None:
        if self._matcher.is_error():
            raise TooComplex(f"the answer's form has become too complex: {readable_error(self._matcher.get_error())}")
