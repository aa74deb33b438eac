"""Compiles grammars to guides with llguidance, for the vocabulary of a model.

A guide is compiled once and cached, as long as the lexers of all cached guides have little memory
(`service.structured.compiled_guide`).  A client's grammar is checked in a child process first
(`service.structured.grammar_check`).
"""

import math
from collections import OrderedDict
from contextlib import suppress
from threading import Lock
from weakref import WeakKeyDictionary, WeakSet

from polyhead.models.tokenizer import Tokenizer, TokenizerError

from ..core.errors import BadRequest, PolyheadError
from ..core.grammar import Grammar, Thinking
from ..core.guide import Guide
from ..core.model import Model
from .compiled_guide import CompiledGuide, LexerMemory, MemoryLimit, call_library, compile_guide
from .grammar_check import GrammarCheck
from .grammar_child import to_llguidance
from .thinking import ThinkingGuide
from .vocabulary_bytes import VocabularyBytes

MAX_CACHED_GUIDES, MAX_CACHED_CHARS = 128, 1 << 22  # guides of a model, and characters of their grammars


class UnlimitedMemory:
    """A MemoryLimit without a limit."""

    total = math.inf

    def reserve(self, size: int, what: str, before: int = 0, owner: str = "") -> None: ...

    def share_shortfall(self, _size: int, _owner: str, /) -> float:
        return 0

    def release(self, size: int, owner: str = "") -> None: ...

    def move(self, size: int, owner: str, other: str) -> None: ...


UNLIMITED_MEMORY = UnlimitedMemory()


class GuideCompiler:
    """The guides of all models, whose lexers reserve their memory in `memory`.  Any thread may call it."""

    def __init__(self, memory: MemoryLimit = UNLIMITED_MEMORY) -> None:
        self._grammar_check = GrammarCheck()
        self._memory = LexerMemory(memory, self._trim_caches)
        self._built: WeakSet[GuideCache] = WeakSet()
        self._built_lock = Lock()
        self._caches: WeakKeyDictionary[Tokenizer, GuideCache | str] = (
            WeakKeyDictionary()
        )  # or why the model can have no guides
        self._lock = Lock()

    def find_cached(self, model: Model, grammar: Grammar | None, thinking: Thinking | None) -> Guide | None:
        """A cached guide, or None.  Returns at once."""
        cache = self._caches.get(model.tokenizer)
        guide = cache.find(grammar) if isinstance(cache, GuideCache) and grammar is not None else None
        return guide if thinking is None else None

    def compile(
        self, model: Model, grammar: Grammar | None, thinking: Thinking | None, owner: str = "", held: int = 0
    ) -> Guide | None:
        """The guide of an answer; None if nothing constrains it.  A new one takes its memory from that of `owner`,
        except while it is cached: all keys use it then.  Its request has `held` bytes already.

        Raises BadRequest, which names the field and what is wrong.  It can take seconds, for the first guide of a model
        or for a hard grammar.
        """
        if grammar is None and (thinking is None or thinking.budget < 0):
            return None
        cache = self._cache_of(model, grammar.field if grammar is not None else "thinking_budget")
        guide = self._compile_cached(cache, grammar, owner, held) if grammar is not None else None
        return guide if thinking is None else ThinkingGuide(cache.vocabulary, thinking, guide)

    def prepare(self, model: Model) -> None:
        """Build what all guides of a model need, so that its first request does not wait for it."""
        with suppress(BadRequest):  # it cannot have guides: its requests get this error
            self._cache_of(model, "")

    def close(self) -> None:
        self._grammar_check.close()
        self._memory.close()

    def _trim_caches(self, most: float) -> None:
        """Drop guides that were used least recently, until the lexers of all cached ones have at most `most` bytes."""
        with self._built_lock:
            caches = list(self._built)
        size = sum(cache.size for cache in caches)
        for cache in caches:
            if size > most:
                size -= cache.trim(size - most)

    def _cache_of(self, model: Model, field: str) -> "GuideCache":
        """The cache of a model.  Raises BadRequest, which names the field, where the model can have no guides."""
        with self._lock:
            cache = self._caches.get(model.tokenizer)
            if cache is None:
                cache = self._caches[model.tokenizer] = build_cache(model)
                if isinstance(cache, GuideCache):
                    with self._built_lock:
                        self._built.add(cache)
        if isinstance(cache, str):
            raise BadRequest(f"{field}: {cache}", param=field)
        return cache

    def _compile_cached(self, cache: "GuideCache", grammar: Grammar, owner: str, held: int) -> CompiledGuide:
        guide = cache.find(grammar)
        if guide is None:
            is_trusted = grammar.kind == "object"
            source = (
                to_llguidance("object", "")
                if is_trusted
                else self._grammar_check.compile(grammar, cache.vocabulary.outline)
            )
            memory = self._memory.for_owner("" if is_trusted else owner)  # all keys use the trusted one
            memory.held = held
            guide = compile_guide(cache.vocabulary, source, grammar, memory)
            memory.held = 0
            cache.add(grammar, guide)
            self._memory.trim_caches()
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

    def find(self, grammar: Grammar) -> CompiledGuide | None:
        key = grammar.kind, grammar.source
        with self._lock:
            found = self._guides.get(key)
            if found is not None:
                self._guides.move_to_end(key)
            return found

    def add(self, grammar: Grammar, guide: CompiledGuide) -> None:
        key = grammar.kind, grammar.source
        with self._lock:
            if key in self._guides:
                return
            self._guides[key] = guide
            guide.set_cached(True)
            self._characters += len(grammar.source)
            while len(self._guides) > MAX_CACHED_GUIDES or self._characters > MAX_CACHED_CHARS:
                self._drop_oldest()

    @property
    def size(self) -> int:
        """Bytes that the lexers of its guides have reserved."""
        with self._lock:
            return sum(guide.lexer.claim.size for guide in self._guides.values())

    def trim(self, size: float) -> int:
        """Drop the guides that were used least recently, with at least `size` bytes or all.  Returns their bytes."""
        dropped: list[CompiledGuide] = []
        with self._lock:
            while self._guides and sum(guide.lexer.claim.size for guide in dropped) < size:
                dropped.append(self._drop_oldest())
        return sum(guide.lexer.claim.size for guide in dropped)

    def _drop_oldest(self) -> CompiledGuide:
        """The guide that was used least recently, which is cached no more.  The caller has the lock."""
        (_, source), guide = self._guides.popitem(last=False)
        self._characters -= len(source)
        guide.set_cached(False)
        return guide
