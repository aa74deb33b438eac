"""Grammars compiled for a vocabulary, and the positions of answers in them.

llguidance builds the states of a lexer while masks are filled, and the copies of a matcher share one lexer.  A lexer
therefore grows with every answer, and one that reaches a limit fails for all of them.  So its memory is reserved before
it grows:

1. A lexer has room for a number of states, and reserves memory for them.  The memory of its regular expressions is
   measured and reserved as they are derived.
2. A lexer without room is replaced: the grammar is compiled again, with more room, or in a new lexer of the first size
   after the last one.  Its answers continue there; their tokens are read again.
3. An answer that has used MAX_SHARED_LEXERS lexers gets one of its own.  Only what this lexer cannot take is too
   complex, so an answer that would succeed alone does not fail beside others.

A grammar is compiled again on a thread of its own; meanwhile `fill_mask` raises GuideBusy.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter, thread_time
from typing import Protocol, TypeVar
from weakref import finalize

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from ..concurrency.fair_queue import FairQueue
from ..concurrency.fair_share import FairScheduler
from ..concurrency.outcome import Failure, attempt, submit, unwrap
from ..core.errors import BadRequest, BodyTooLarge, Overloaded, PolyheadError, TooComplex, Unavailable
from ..core.grammar import Grammar
from ..core.guide import GuideBusy, GuideFinished, GuideSpec, GuideState
from .grammar_child import MAX_LEXER_STATES, readable_error, set_parser_limits
from .vocabulary_bytes import VocabularyBytes

T = TypeVar("T")
LEXER_ROOMS = (1_024, 4_096, 16_384, MAX_LEXER_STATES)  # states of a lexer, one size after the other
BYTES_PER_STATE = 2_048  # measured: 0.4 to 1.9 KB, with a transition for each of 256 bytes at most
BYTES_PER_LEXEME = 12  # of a state, for each lexeme that may be alive in it
BYTES_PER_COST = 4  # measured: 0.6 to 3.6 bytes for each unit of llguidance's `lexer_cost`
COST_CLAIM_BYTES = 1 << 20  # reserved at a time for regular expressions
MEASURE_S = 0.02  # seconds of masks between two measurements: a lexer derives about 1 MB in them
MAX_SHARED_LEXERS = 6
MAX_FORCED_TOKENS = 64  # forced tokens in one step
# What the forced tokens of a place took last, at most, for the engine's thread to compute those of the next.  It is not
# processor time: the library tokenises a long literal on threads of its own, and the caller waits for them.
QUICK_FORCED_S = 0.002
NO_TOKENS = np.zeros(0, np.int32)
# Processor time of one mask.  A mask reads every token that it allows, without the interpreter, so to read one of them
# with the interpreter takes no longer.  Ambiguous rules take time that grows with the square of an answer's length.
QUICK_MASK_S = 0.005  # at most, for the engine's thread to read the next token
SLOW_MASK_S = 0.05  # an answer may have MAX_SLOW_MASKS: a lexer may derive much at once, a machine be slow for a moment
MAX_SLOW_MASKS = 2
MAX_MASK_S = 0.2
TRIAL_STEPS = 3  # that are tried before a guide is used
TOKENS_PER_MASK = 16  # read again in a shared lexer
READ_SLICE_S = 0.02
TURNS = 64  # lines of grammars of one key that wait to be compiled again
MAX_CACHED_BYTES = 1 << 28  # bytes of the lexers of all cached guides, at most an eighth of the memory for requests
WHAT = "the answer's form"
TOO_COMPLEX = "the answer's form has become too complex: "
READY: Future[None] = Future()
READY.set_result(None)
LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
# What a grammar has for each lexeme that stays alive while the lexer reads on: a repetition, or a keyword of a schema.
REPETITIONS = re.compile(r'[*+~]|\{\s*[\d,]|Length"|"format"|"multipleOf"|[mM](?:in|ax)imum"')


class MemoryLimit(Protocol):
    """The memory for requests.  Any thread may call it."""

    @property
    def total(self) -> float: ...

    def reserve(self, size: int, what: str, before: int = 0, owner: str = "") -> None:
        """Reserve `size` bytes for `owner`, the name of a key.

        Raises BodyTooLarge where there is never as much, Overloaded where other requests have it.
        """

    def share_shortfall(self, size: int, owner: str, /) -> float:
        """How many bytes of `size` other requests of `owner` leave no room for in its share."""

    def release(self, size: int, owner: str = "") -> None: ...

    def move(self, size: int, owner: str, other: str) -> None:
        """Count `size` bytes that are reserved for `owner` as those of `other`."""


class LexerMemory:
    """What the lexers of all guides reserve of `limit`: each for the key whose grammar it is, or for no key while it is
    that of a cached guide, which all keys use.

    `trim_caches(most)` drops cached guides until the lexers of all have at most `most` bytes.
    """

    def __init__(self, limit: MemoryLimit, trim_caches: Callable[[float], None]) -> None:
        self._limit, self._trim_caches = limit, trim_caches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guide-growth")
        self._shares: FairScheduler[str] = FairScheduler()  # of keys whose answers wait for lexers, in seconds
        self._queues: dict[str, FairQueue[LexerJob]] = {}  # by key; its grammars take turns, by seconds
        self._lock = Lock()
        self.clock: Callable[[], float] = perf_counter  # of what is quick
        self.owner = ""  # the name of the key; empty for guides that are of no key
        self.held = 0  # bytes of the request whose grammar is being compiled

    def for_owner(self, owner: str) -> "LexerMemory":
        """The same memory and thread, for the grammars of a key."""
        view = copy(self)
        view.owner = owner
        return view

    def reserve(self, size: int, before: int, owner: str) -> None:
        """Drops cached guides for it where others have the memory.  Raises Overloaded, or TooComplex where there is
        never as much.
        """
        before += self.held
        try:
            try:
                self._limit.reserve(size, WHAT, before, owner)
            except Overloaded:
                if self._limit.share_shortfall(size, owner):
                    raise  # cached guides are not in its share
                self._trim_caches(0)
                self._limit.reserve(size, WHAT, before, owner)
        except BodyTooLarge as error:
            raise TooComplex(TOO_COMPLEX + error.message) from None

    def trim_caches(self) -> None:
        """Call it when a cached guide has grown."""
        self._trim_caches(min(MAX_CACHED_BYTES, self._limit.total / 8))

    def release(self, claim: "LexerClaim") -> None:
        self._limit.release(claim.size, claim.owner)

    def move(self, size: int, owner: str, other: str) -> None:
        self._limit.move(size, owner, other)

    def compile_aside(self, guide: "CompiledGuide", room: int, owner: str) -> "LexerJob":
        """Compile a guide again for an answer of the key `owner`, on the thread for it.

        Raises Unavailable where the thread cannot be started.
        """
        job = LexerJob(guide, room)
        with self._lock:
            self._enqueue(job, owner)
        try:
            submit(self._thread, self._compile_next)
        except Unavailable:
            with self._lock:
                self._dequeue(job)
            raise
        return job

    def join(self, job: "LexerJob", owner: str) -> None:
        """An answer of `owner` needs the lexer, too: a job that still waits does so in the line of this key as well."""
        with self._lock:
            if any(job in queue for queue in self._queues.values()):
                self._enqueue(job, owner)

    def _enqueue(self, job: "LexerJob", owner: str) -> None:
        """Let a job wait in the line of a key, unless it does.  The caller has the lock, here and below."""
        queue = self._queues.setdefault(owner, FairQueue())
        if not queue:
            self._shares.rejoin(owner)
        if job not in queue:
            queue.add(job, job.line, 0)

    def _dequeue(self, job: "LexerJob") -> None:
        for queue in self._queues.values():
            if job in queue:
                queue.remove(job)

    def _compile_next(self) -> None:
        with self._lock:
            owner = self._shares.next(key for key, queue in self._queues.items() if queue)
            job = None if owner is None else self._queues[owner].peek()
            if owner is None or job is None:  # it could not be submitted, and is compiled no more
                return
            self._dequeue(job)
        began = self.clock()
        compiled = attempt(lambda: Lexer(job.guide, job.room))
        with self._lock:
            seconds = self.clock() - began
            self._shares.charge(owner, seconds)
            self._queues[owner].charge(job.line, seconds)
        if isinstance(compiled, Failure):
            job.lexer.set_exception(compiled.error)
        else:
            job.lexer.set_result(compiled)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False, slots=True)
class LexerJob:
    """A guide to be compiled again, and the lexer that comes of it."""

    guide: "CompiledGuide"
    room: int
    lexer: "Future[Lexer]" = field(default_factory=Future)

    @property
    def line(self) -> str:
        """In which it waits, beside other grammars of its key."""
        return str(hash(self.guide.source) % TURNS)


class LexerClaim:
    """The bytes that one lexer has reserved for `owner`, a key; empty for that of a cached guide."""

    def __init__(self, memory: LexerMemory) -> None:
        self._memory, self.size, self.owner = memory, 0, memory.owner
        self._lock = Lock()

    def grow_to(self, size: int) -> None:
        """One thread at a time calls it."""
        more, owner = size - self.size, self.owner
        if more > 0:
            self._memory.reserve(more, self.size, owner)  # without the lock: it may drop cached guides
            with self._lock:
                self._memory.move(more, owner, self.owner)  # it may be another one by now
                self.size = size
            self._memory.trim_caches()

    def set_cached(self, is_cached: bool) -> None:
        """Any thread may call it."""
        with self._lock:
            owner, self.owner = self.owner, "" if is_cached else self._memory.owner
            self._memory.move(self.size, owner, self.owner)


class LexerFull(Exception):
    """The lexer can be used no more; the answer continues in another."""


class LexerBusy(Exception):
    """Another answer uses the lexer."""


class Lexer:
    """A compiled grammar, whose copies share one lexer with room for `room` states.

    Raises as LexerMemory.reserve does, and TooComplex where the grammar cannot be compiled.
    """

    def __init__(self, guide: "CompiledGuide", room: int) -> None:
        self.room = room
        self.error = ""  # why it can be used no more
        self.lock = Lock()  # one thread at a time uses its copies
        self.claim = LexerClaim(guide.memory)
        finalize(self, guide.memory.release, self.claim)
        self._mask_words = -(-guide.vocabulary.size // 32)
        self._state_bytes = room * guide.bytes_per_state
        self.claim.grow_to(self._state_bytes)
        limits = set_parser_limits(room, verbose=True)
        self.matcher = call_library(lambda: compile_matcher(guide, limits))
        if self.matcher.is_error():
            raise TooComplex(TOO_COMPLEX + readable_error(self.matcher.get_error()))
        self._measured_at = 0.0  # of the seconds of masks
        self._mask_s = 0.0

    @property
    def lacks_room(self) -> bool:
        return "too many states" in self.error

    @property
    def lacks_fuel(self) -> bool:
        """Whether one mask would have derived too much."""
        return "too many expressions" in self.error

    @property
    def next_room(self) -> int:
        """The room of the lexer that replaces it: the next size where it was full, or else the first."""
        return next((room for room in LEXER_ROOMS if self.lacks_room and room > self.room), LEXER_ROOMS[0])

    def copy(self) -> LLMatcher:
        return call_library(self.matcher.deep_copy)

    def use(self, matcher: LLMatcher, function: Callable[[], T], *, waits: bool = True) -> T:
        """Call `function`, which uses the copy `matcher`.

        Raises LexerFull where the lexer cannot be used any more, LexerBusy where it is in use and the caller does not
        wait, TooComplex where this answer has met another limit.
        """
        if not self.lock.acquire(blocking=waits):
            raise LexerBusy
        try:
            if self.error:
                raise LexerFull
            try:
                result = call_library(function)
            except PolyheadError as panic:  # the library may have left the lexer unusable
                self.error = panic.message
                raise
            if not matcher.is_error():
                return result
            error = matcher.get_error()
            self.error = error if is_lexer_error(error) else self._find_error()
            if self.error:
                raise LexerFull
            raise TooComplex(TOO_COMPLEX + readable_error(error))
        finally:
            self.lock.release()

    def _find_error(self) -> str:
        """The error of the lexer; empty where it has none.  A matcher reports it as a token that is not allowed."""
        probe, mask = self.copy(), np.zeros(self._mask_words, np.int32)
        call_library(lambda: probe.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
        return probe.get_error()

    def measure(self, matcher: LLMatcher, seconds: float) -> None:
        """Reserve memory for what the lexer has derived, now and then: a mask took `seconds`.

        Raises as LexerMemory.reserve does.
        """
        self._mask_s += seconds
        if self._mask_s - self._measured_at < MEASURE_S:
            return
        self._measured_at = self._mask_s
        with self.lock:
            size = self._state_bytes + BYTES_PER_COST * read_lexer_cost(matcher)
            if size > self.claim.size:
                try:
                    self.claim.grow_to(size + COST_CLAIM_BYTES)
                except PolyheadError as error:
                    self.error = error.message
                    raise


def is_lexer_error(error: str) -> bool:
    """Whether all copies of a matcher fail from now on, not only the one that has met the error."""
    return error.startswith("lexer error") or "PoisonError" in error or "panic" in error


def read_lexer_cost(matcher: LLMatcher) -> int:
    """How many regular expressions the lexer of `matcher` had derived at its last mask, in llguidance's unit.

    llguidance writes it into errors only, so a copy is given a token that does not exist.
    """
    probe = call_library(matcher.deep_copy)
    call_library(lambda: probe.consume_token(1 << 31))
    found = LEXER_COST.search(probe.get_error())
    return int(found[1]) if found else 0


def compile_matcher(guide: "CompiledGuide", limits: LLParserLimits) -> LLMatcher:
    return LLMatcher(guide.vocabulary.tokenizer, guide.source, log_level=0, limits=limits)


def call_library(function: Callable[[], T]) -> T:
    """Call the library.  Raises PolyheadError where it panics, so that only one answer fails."""
    return unwrap(attempt(function))


class CompiledGuide:
    """A grammar compiled for a vocabulary.  Raises as Lexer does.  `source` is the grammar in llguidance's form."""

    def __init__(self, vocabulary: VocabularyBytes, source: str, grammar: Grammar, memory: LexerMemory) -> None:
        self.vocabulary, self.source, self.memory = vocabulary, source, memory
        self.spec = GuideSpec(grammar, None)
        # To compute what is forced by the rules of a client can take seconds, and the interpreter.
        self.forces_tokens = grammar.kind != "lark"
        self.forced_s = 0.0  # seconds that the last search for forced tokens took
        self.last_forced: tuple[list[int], NDArray[np.int32]] | None = None  # of a long literal, and what is before it
        self.bytes_per_state = BYTES_PER_STATE + BYTES_PER_LEXEME * len(REPETITIONS.findall(grammar.source))
        self._lock = Lock()
        self._is_cached = False
        self._next: LexerJob | None = None  # of the lexer that will replace this one
        self.lexer = Lexer(self, LEXER_ROOMS[0])

    def new_state(self, owner: str = "") -> "GrammarState":
        return GrammarState(self, owner)

    def set_cached(self, is_cached: bool) -> None:
        """Count the lexer, and those that replace it, for no key, or for the key whose grammar it is.  Other lexers are
        those of its key: answers still use them.
        """
        with self._lock:
            self._is_cached = is_cached
            self.lexer.claim.set_cached(is_cached)

    def replace(self, lexer: Lexer, owner: str) -> Lexer:
        """The lexer that replaces `lexer`, for an answer of the key `owner`.

        Raises GuideBusy until it is compiled, and as Lexer does.
        """
        with self._lock:
            if self.lexer is not lexer:
                return self.lexer
            if self._next is None:
                self._next = self.memory.compile_aside(self, lexer.next_room, owner)
            compiled = self._next.lexer
            if not compiled.done():
                self.memory.join(self._next, owner)
                raise GuideBusy(compiled)
            self._next = None
            replaced, self.lexer = self.lexer, compiled.result()
            replaced.claim.set_cached(False)
            self.lexer.claim.set_cached(self._is_cached)
        self.memory.trim_caches()  # without the lock, which it takes of the guides that it drops
        return compiled.result()


class GrammarState:
    """The position of one answer in a grammar.  `owner` is the key whose answer it is."""

    def __init__(self, guide: CompiledGuide, owner: str) -> None:
        self._guide, self._lexer, self._owner = guide, guide.lexer, owner
        self._matcher = self._lexer.copy()
        self._tokens: list[int] = []
        self._read_count = 0  # tokens that the matcher has read: fewer than all after it began in another lexer
        self._forced, self._forced_at = NO_TOKENS, 0  # tokens that must come next, and how many of them were appended
        self._owes_forced = False  # they were asked for and are searched with the next mask
        self._owes_end = False  # whether the answer is complete was asked for before that
        self._mask_s = 0.0  # processor time of the last mask
        self._masked_at = -1  # tokens that the matcher had read then
        self._slow_masks = 0
        self._lexer_count = 1
        self._has_own_lexer = False
        self._own_next: Future[Lexer] | None = None

    @property
    def is_finished(self) -> bool:
        """Where the matcher has not read all tokens, `fill_mask` finds it out."""
        self._owes_end = not self._has_read_all
        return not self._owes_end and not self._matcher.is_error() and call_library(self._matcher.is_stopped)

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        assert mask.flags.c_contiguous
        if self._has_forced:
            return self._allow_forced(mask)
        began = perf_counter()
        while True:
            try:
                if self._lexer.error:
                    self._begin_again(self._next_lexer())
                self._read_tokens(mask, began + READ_SLICE_S)
                if self._owes_end and self.is_finished:
                    raise GuideFinished
                if self._owes_forced:
                    self._compute_forced(waits=True)
                    if self._has_forced:
                        return self._allow_forced(mask)
                self._compute_mask(mask)
                return True
            except LexerFull:
                if self._lexer.lacks_fuel:  # none is shared with an answer that takes so much
                    self._lexer_count = MAX_SHARED_LEXERS

    def advance(self, token: int) -> None:
        self._tokens.append(token)
        self._drop_forced(token)
        self._owes_forced = False
        if self._is_quick and self._read_count == len(self._tokens) - 1:
            with suppress(LexerFull, LexerBusy):
                self._read(1, waits=False)

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        """At most MAX_FORCED_TOKENS of a long literal: it is computed once, and no step gets all of it."""
        if not self._has_forced and self._guide.forces_tokens:
            self._owes_forced = not self._reuse_forced()
            if self._owes_forced and computes and self._has_read_all and self._guide.forced_s < QUICK_FORCED_S:
                with suppress(LexerFull, LexerBusy):
                    self._compute_forced(waits=False)
        found: list[int] = self._forced[self._forced_at : self._forced_at + MAX_FORCED_TOKENS].tolist()
        return found

    @property
    def _has_forced(self) -> bool:
        return self._forced_at < self._forced.size

    @property
    def _is_quick(self) -> bool:
        return self._mask_s < QUICK_MASK_S

    @property
    def _has_read_all(self) -> bool:
        return self._read_count == len(self._tokens)

    def _compute_forced(self, *, waits: bool) -> None:
        if not self._reuse_forced():
            clock, guide = self._guide.memory.clock, self._guide
            began = clock()
            found = self._lexer.use(self._matcher, self._matcher.compute_ff_tokens, waits=waits)
            guide.forced_s = clock() - began
            self._forced, self._forced_at = np.array(found, np.int32), 0
            if len(found) > MAX_FORCED_TOKENS:
                guide.last_forced = list(self._tokens), self._forced
        self._owes_forced = False

    def _reuse_forced(self) -> bool:
        """Take the forced tokens that another answer had after the same tokens, if there are any."""
        last = self._guide.last_forced
        if last is None or last[0] != self._tokens:
            return False
        self._forced, self._forced_at = last[1], 0
        return True

    def _allow_forced(self, mask: NDArray[np.int32]) -> bool:
        """Allow the next forced token alone."""
        mask[:] = 0
        token = int(self._forced[self._forced_at])
        mask.view(np.uint32)[token // 32] = 1 << token % 32
        return True

    def _drop_forced(self, token: int) -> None:
        if self._has_forced and self._forced[self._forced_at] == token:
            self._forced_at += 1
        else:
            self._forced, self._forced_at = NO_TOKENS, 0

    def _compute_mask(self, mask: NDArray[np.int32]) -> None:
        began = thread_time()
        self._lexer.use(self._matcher, lambda: self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
        self._mask_s, self._masked_at = thread_time() - began, self._read_count
        self._slow_masks += self._mask_s > SLOW_MASK_S
        if self._mask_s > MAX_MASK_S or self._slow_masks > MAX_SLOW_MASKS:
            raise TooComplex(TOO_COMPLEX + "its rules are ambiguous, or too many may apply at one place")
        self._lexer.measure(self._matcher, self._mask_s)

    def _read(self, count: int, *, waits: bool = True) -> None:
        """Let the matcher read `count` tokens."""
        tokens = self._tokens[self._read_count : self._read_count + count]
        self._lexer.use(self._matcher, lambda: self._matcher.consume_tokens(tokens), waits=waits)
        self._read_count += len(tokens)

    def _read_tokens(self, mask: NDArray[np.int32], until: float) -> None:
        """Let the matcher read all tokens.  Raises GuideBusy where that takes until `until`.

        Masks renew what the lexer may derive.  In a lexer of its own the answer has all its masks again, so that it
        succeeds here if it would have alone.
        """
        while not self._has_read_all:
            if (self._read_count or self._lexer_count > 1) and self._masked_at != self._read_count:
                self._compute_mask(mask)
            self._read(TOKENS_PER_MASK if self._is_quick and not self._has_own_lexer else 1)
            if perf_counter() > until:
                raise GuideBusy(READY)

    def _begin_again(self, lexer: Lexer) -> None:
        self._lexer, self._matcher = lexer, lexer.copy()
        self._read_count, self._masked_at = 0, -1
        self._lexer_count += 1

    def _next_lexer(self) -> Lexer:
        """The lexer after this one.  Raises GuideBusy until it is compiled, TooComplex where there is none."""
        lexer = self._lexer
        if not self._has_own_lexer and self._lexer_count < MAX_SHARED_LEXERS:
            return self._guide.replace(lexer, self._owner)
        if self._has_own_lexer and not (lexer.lacks_room and lexer.room < LEXER_ROOMS[-1]):
            raise TooComplex(TOO_COMPLEX + readable_error(lexer.error))
        if self._own_next is None:
            room = lexer.next_room if self._has_own_lexer else LEXER_ROOMS[0]
            self._own_next = self._guide.memory.compile_aside(self._guide, room, self._owner).lexer
        if not self._own_next.done():
            raise GuideBusy(self._own_next)
        compiled, self._own_next = self._own_next, None
        self._has_own_lexer = True
        return compiled.result()


def compile_guide(vocabulary: VocabularyBytes, source: str, grammar: Grammar, memory: LexerMemory) -> CompiledGuide:
    """Compile a grammar and try a few steps.  Raises BadRequest where one fails, Overloaded where memory is short."""
    try:
        guide = CompiledGuide(vocabulary, source, grammar, memory)
        ahead, mask = guide.new_state(), np.zeros(-(-vocabulary.size // 32), np.int32)
        for _ in range(TRIAL_STEPS):
            if not ahead.is_finished:
                with suppress(GuideFinished):
                    wait_for_mask(ahead, mask)
                    ahead.advance(lowest_token(mask))
    except TooComplex as error:
        reason = error.message.removeprefix(TOO_COMPLEX)
        raise BadRequest(f"{grammar.field}: {reason}", param=grammar.field) from None
    return guide


def wait_for_mask(state: GuideState, mask: NDArray[np.int32]) -> bool:
    """Fill a mask, however long it takes."""
    while True:
        try:
            return state.fill_mask(mask)
        except GuideBusy as busy:
            busy.ready.exception()


def lowest_token(mask: NDArray[np.int32]) -> int:
    """The lowest token whose bit is set."""
    return int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax())
