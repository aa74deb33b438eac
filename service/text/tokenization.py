"""Tokenisation: templates, tokenizers and grammars run on threads of their own, which clients share fairly.

A long prompt therefore never blocks the event loop. The longest texts have a thread of their own, so they delay only
each other; so do grammars that are compiled. Threads are shared between clients by what texts cost
(`service.concurrency.work_queue`). The way back, from tokens to text, is `service.text.detokenizer`.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from polyhead.models.chat.template_functions import value_size
from polyhead.models.core.errors import EncodingError, TemplateError
from polyhead.models.tokenizer import Encoding, TokenizerError

from ..concurrency.thread_pool import OwnerThreads, ThreadPool, WorkInfo
from ..concurrency.time_slices import iterate_in_slices
from ..core.errors import BadRequest, EmptyInput, Expired, PolyheadError, TooLong, TooMany, Unavailable
from ..core.grammar import Grammar, Thinking
from ..core.guide import Guide
from ..core.model import Model, name_model_in_errors
from ..core.request import DEFAULT_TERMS, Generate, Task, Terms
from ..core.text_limits import MAX_WRITTEN_BYTES, MIN_CHARS, check_characters, check_token_ids, input_label
from ..resources.request_memory import (
    BYTES_PER_CHARACTER,
    BYTES_PER_WRITTEN_BYTE,
    UNBOUNDED_HEADROOM,
    Headroom,
    MemoryClaim,
    json_size,
    max_token_size,
)
from ..structured.grammar_check import PROCESSES
from ..structured.guide_compiler import GuideCompiler
from .encoder_inputs import (
    MAX_WINDOW_TOKENS,
    EncodedInput,
    EncoderInput,
    EncodingRequest,
    checked_batches,
    encode_texts,
    prompt_length,
    read_inputs,
)
from .generation_request import ChatMessages, FillInMiddle, GenerationRequest, Prompt
from .label_prompts import read_labelled_inputs
from .prompts import encode_chat, read_prompts, remaining_thinking, render_chat

LONG_CHARACTERS = 1 << 18  # cost of a call that runs on the thread for long texts
CHARACTERS_PER_TEXT = 64  # cost of each text of a call beside its characters, in characters
HOLD_SECONDS = 1.0  # seconds of one call until another thread replaces its thread in the pool
CALL_SECONDS = 60.0  # time limit of one call, in seconds; the longest body, of 8 MiB, takes about ten
GRAMMAR_CHARACTERS = 1 << 14  # cost of a small grammar, in characters of text; its own characters are added
TOKENISING_PHRASE = "the text was being made tokens"

T = TypeVar("T")


@dataclass(slots=True)
class TokenizerJob:
    """One call of the tokenizer: the field of its texts in the request, the characters of them that are in memory at
    once, their client and deadline, their number, and the characters of all that are `written` one after another.
    """

    field: str
    characters: int
    terms: Terms
    texts: int = 1
    written: int = 0
    is_abandoned: bool = False  # its request no longer waits for it

    @property
    def cost(self) -> int:
        """What the call costs its client, in characters."""
        return max(self.characters, self.written) + CHARACTERS_PER_TEXT * self.texts

    def check(self) -> None:
        """Raise Expired if the result is no longer needed. Called between texts, on any thread."""
        if self.is_abandoned or time.perf_counter() >= self.terms.deadline:
            raise Expired(f"the deadline has passed while {TOKENISING_PHRASE}")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows of token ids to be decoded, which are `field` in the request; `plain`: without special tokens."""

    rows: Sequence[Sequence[int]]
    field: str = "ids"
    plain: bool = False


class TextProcessor:
    """Makes requests from text, on `threads` threads, and on one more for the longest texts.

    `batch_limit` bounds the texts of one call, `window_limit` the tokens of all its windows. `on_tokenised(model, task,
    seconds)` gets the duration of each call, with its wait for a thread. The memory of texts that are being tokenised
    is reserved in `headroom`, beside what their request has (`for_request`).
    """

    def __init__(
        self,
        *,
        threads: int,
        batch_limit: int,
        window_limit: int = MAX_WINDOW_TOKENS,
        on_tokenised: Callable[[str, Task, float], None],
        headroom: Headroom = UNBOUNDED_HEADROOM,
    ) -> None:
        self._short = ThreadPool(threads, "text", CALL_SECONDS, HOLD_SECONDS)
        self._long = ThreadPool(1, "text-long", CALL_SECONDS, HOLD_SECONDS)
        self._grammars = ThreadPool(PROCESSES, "grammars", CALL_SECONDS)
        self._guides = GuideCompiler(headroom)
        self._batch_limit, self._window_limit = batch_limit, window_limit
        self._on_tokenised, self._headroom = on_tokenised, headroom
        self._claim: MemoryClaim | None = None  # of the request, in `for_request`

    def for_request(self, claim: MemoryClaim) -> "TextProcessor":
        """The same threads for the texts of one request, whose memory is `claim`."""
        view = copy(self)
        view._claim = claim
        return view

    async def read_prompts(
        self, model: Model, request: GenerationRequest, call: str, terms: Terms = DEFAULT_TERMS
    ) -> list[Generate]:
        """Return one request for each prompt, with `call` in its id. Raises BadRequest, EmptyInput or TooLong, each
        with the name of the prompt, and Expired at the deadline.
        """
        with name_model_in_errors(model):
            self._check_count(request.field, len(request.prompts))
            self._check_attempts(request)
            characters = sum(map(text_length, request.prompts)) + sum(map(len, request.bad_words))
            work = TokenizerJob(request.field, characters, terms, len(request.prompts) + len(request.bad_words))
            requests = await self._run(model, work, lambda: read_prompts(model, request, call, terms, work.check))
            thinking = remaining_thinking(model, request, requests[0].tokens)
            guide = await self.find_guide(model, request.grammar, thinking, terms)
            if guide is None:
                return requests
            if request.beams is not None:
                field = request.grammar.field if request.grammar is not None else "thinking_budget"
                raise BadRequest(f"{field}: not together with a beam search, which nothing guides", param=field)
            return [replace(text_request, guide=guide) async for text_request in iterate_in_slices(requests)]

    def prepare_grammars(self, model: Model) -> None:
        """Start to prepare what all grammars of this model need, before a request has one."""
        if model.task == "generate":
            with suppress(Unavailable):  # no thread can be started: the first request prepares it
                self._grammars.start(lambda: self._guides.prepare(model), compilation_piece(model, None, DEFAULT_TERMS))

    async def check_grammars(self, model: Model, grammars: Sequence[Grammar], terms: Terms) -> None:
        """Raise the error of the first grammar that cannot be compiled."""
        with name_model_in_errors(model):
            for grammar in grammars:
                await self.find_guide(model, grammar, None, terms)

    async def read_inputs(
        self, model: Model, request: EncodingRequest, call: str, terms: Terms = DEFAULT_TERMS
    ) -> list[EncodedInput | BadRequest]:
        """Return the requests of each input, with `call` in their ids. Raises the errors of `read_prompts`; with
        `request.partial` the error of an input is returned in its place.
        """
        with name_model_in_errors(model):
            self._check_count(request.field, len(request.inputs))
            characters = sum(text_length(given) + prompt_length(model, request, given) for given in request.inputs)
            characters += len(request.inputs) * sum(map(len, request.labels))
            read = read_inputs if model.label_prompt is None else read_labelled_inputs
            work = TokenizerJob(request.field, characters, terms, len(request.inputs))
            bounded = replace(request, max_window_tokens=self._window_limit)
            return await self._run(model, work, lambda: read(model, bounded, call, terms, work.check))

    async def tokenize(
        self, model: Model, texts: Sequence[str], *, special: bool, terms: Terms = DEFAULT_TERMS
    ) -> list[Encoding]:
        """Return the tokens of the texts, which are `inputs` in the request. Raises the errors of `read_prompts`."""
        with name_model_in_errors(model):
            self._check_count("inputs", len(texts))
            work = TokenizerJob("inputs", sum(map(len, texts)), terms, len(texts))
            return await self._run(model, work, lambda: tokenize_texts(model, texts, work.check, special=special))

    async def render_prompt(
        self, model: Model, prompt: str | ChatMessages, field: str, *, special: bool, terms: Terms
    ) -> tuple[str, list[int]]:
        """Return a prompt as the model would get it: its text and its tokens. Raises the errors of `read_prompts`."""
        with name_model_in_errors(model):
            work = TokenizerJob(field, text_length(prompt), terms)
            return await self._run(model, work, lambda: read_prompt(model, prompt, field, special=special))

    async def decode(self, model: Model, request: Decoding, terms: Terms = DEFAULT_TERMS) -> list[str]:
        """Return the texts of token ids. Claims their memory before they are decoded. Raises the errors of
        `read_prompts` and of the claim of its request.
        """
        claim = self._claim_of(terms)
        with name_model_in_errors(model):
            self._check_count(request.field, len(request.rows))
            work = TokenizerJob(request.field, sum(map(len, request.rows)), terms, len(request.rows))
            return await self._run(model, work, lambda: decode_texts(model, request, claim, work.check))

    async def run(self, model: Model, job: TokenizerJob, function: Callable[[], T]) -> T:
        """Return what `function` returns, which tokenises or decodes text, on one of these threads.

        Raises the errors of `read_prompts`.
        """
        with name_model_in_errors(model):
            return await self._run(model, job, function)

    def output_threads(self, model: Model, owner: str) -> OwnerThreads:
        """The threads for short texts, on which `owner` has answers of `model` read; sizes in characters or numbers."""
        return OwnerThreads(self._short, "reading the answer", model.tokenizer, owner)

    def close(self) -> None:
        for threads in (self._short, self._long, self._grammars):
            threads.close()
        self._guides.close()

    def _check_count(self, field: str, count: int) -> None:
        if count == 0:
            raise EmptyInput(f"{field}: must not be empty", param=field)
        if count > self._batch_limit:
            raise TooMany(f"{field}: at most {self._batch_limit} a call, got {count}", param=field)

    def _check_attempts(self, request: GenerationRequest) -> None:
        if len(request.prompts) * request.attempts > self._batch_limit:
            attempts = (
                f"{len(request.prompts)} prompts x {request.attempts} tries"
                if len(request.prompts) > 1
                else f"{request.attempts}"
            )
            raise TooMany(
                f"{request.count_field}: at most {self._batch_limit} answers a call, got {attempts}",
                param=request.count_field,
            )

    async def find_guide(
        self, model: Model, grammar: Grammar | None, thinking: Thinking | None, terms: Terms
    ) -> Guide | None:
        """Return the guide for a grammar and for reasoning, from the cache or compiled; None if there is neither."""
        if grammar is None and thinking is None:
            return None
        key = model, grammar, thinking
        if known := self._guides.find_cached(*key):
            return known
        compile_guide = partial(self._guides.compile, *key, terms.owner, self._claim_of(terms).held)
        work = self._grammars.run(compile_guide, compilation_piece(model, grammar, terms))
        return await wait_until(terms.deadline, work, "the answer's form was being compiled")

    def _claim_of(self, terms: Terms) -> MemoryClaim:
        """The claim of the request, or one of its own for a call that has none."""
        return self._claim or MemoryClaim(self._headroom, terms.owner)

    async def _run(self, model: Model, job: TokenizerJob, function: Callable[[], T]) -> T:
        """Return what `function` returns, on a thread, or raise its error."""

        claim, what = self._claim_of(job.terms), f"{job.field} of {job.characters} characters"

        def run() -> T:
            with claim.reserved(BYTES_PER_CHARACTER * job.characters, what):
                return function()

        began = time.perf_counter()
        pool = self._long if job.cost > LONG_CHARACTERS else self._short
        try:
            piece = WorkInfo(f"{job.field}: making its text tokens", model.tokenizer, job.terms.owner, job.cost)
            return await wait_until(job.terms.deadline, pool.run(run, piece), TOKENISING_PHRASE)
        except (EncodingError, TemplateError) as error:
            raise BadRequest(f"{job.field}: {error}", param=job.field) from None
        except TokenizerError as error:
            raise PolyheadError(f"{job.field}: {error}", param=job.field) from None
        finally:
            job.is_abandoned = True
            self._on_tokenised(model.name, model.task, time.perf_counter() - began)


def compilation_piece(model: Model, grammar: Grammar | None, terms: Terms) -> WorkInfo:
    size = GRAMMAR_CHARACTERS + len(grammar.source if grammar is not None else "")
    return WorkInfo("compiling the answer's form", model.tokenizer, terms.owner, size)


async def wait_until(deadline: float, work: Coroutine[Any, Any, T], meanwhile: str) -> T:
    """Return what `work` returns, or raise its error. Raises Expired at the deadline; a thread may go on after that."""
    try:
        async with asyncio.timeout(None if deadline == math.inf else deadline - time.perf_counter()):
            return await work
    except TimeoutError:
        raise Expired(f"the deadline has passed while {meanwhile}") from None


def text_length(given: Prompt | EncoderInput) -> int:
    """Return the approximate number of characters; 0 for token ids."""
    match given:
        case str():
            return len(given)
        case ChatMessages(messages=messages):
            return value_size((messages, given.tools))
        case FillInMiddle(before=before, after=after):
            return len(before) + len(after)
        case _:
            return sum(len(part) for part in given if isinstance(part, str))


def tokenize_texts(model: Model, texts: Sequence[str], check: Callable[[], None], *, special: bool) -> list[Encoding]:
    places = [input_label("inputs", index, len(texts)) for index in range(len(texts))]
    for text, where in zip(texts, places, strict=True):
        if not text:
            raise EmptyInput(f"{where}: is empty, there is nothing to read", param=where)
        check_characters(model, len(text), where)
    encodings = list(encode_texts(model, texts, check, special=special))
    for encoding, where in zip(encodings, places, strict=True):
        check_listed_length(model, [encoding], where)
    return encodings


def read_prompt(model: Model, prompt: str | ChatMessages, where: str, *, special: bool) -> tuple[str, list[int]]:
    if isinstance(prompt, ChatMessages):
        text = render_chat(model, prompt, where)
        parts = encode_chat(model, text, where)
    else:
        text = prompt
        check_characters(model, len(text), where)
        parts = model.tokenizer.encode_batch([text], special=special, offsets=False)
    check_listed_length(model, parts, where)
    return model.tokenizer.unquote(text), [id for part in parts for id in part.ids]


def check_listed_length(model: Model, parts: Sequence[Encoding], where: str) -> None:
    most, length = max(MIN_CHARS, model.max_tokens), sum(map(len, parts))
    if length > most:
        raise TooLong(f"{where}: has {length} tokens, at most {most} are listed", param=where)


def decode_texts(model: Model, request: Decoding, claim: MemoryClaim, check: Callable[[], None]) -> list[str]:
    for index, ids in enumerate(request.rows):
        check_token_ids(model, ids, input_label(request.field, index, len(request.rows)))
    counts = Counter(token for ids in request.rows for token in ids)
    size = sum(count * token_size(model, token) for token, count in counts.items())
    claim_text(claim, size, f"{request.field}: the text of the tokens", request.field)
    return [
        model.tokenizer.decode(ids, skip_special=request.plain)
        for some in checked_batches(request.rows, check)
        for ids in some
    ]


def token_size(model: Model, token: int) -> int:
    """Bytes of a token's text as JSON, at most, wherever it stands in a text."""
    return max(max_token_size(model.tokenizer.piece_bytes(token, first=first)) for first in (True, False))


def spell_tokens(model: Model, ids: Sequence[int], claim: MemoryClaim, field: str) -> list[str]:
    """Return the vocabulary's spelling of each token of the text in `field`. Claims the memory to write them first."""
    counts = Counter(ids)
    pieces = {token: model.tokenizer.piece(token) for token in counts}
    size = sum(count * json_size(pieces[token]) for token, count in counts.items())
    claim_text(claim, size, f"{field}: the names of its {len(ids)} tokens", field)
    return [pieces[token] for token in ids]


def claim_text(claim: MemoryClaim, size: int, what: str, field: str) -> None:
    """Claim memory for a text that is written as `size` bytes of JSON. Raises TooLong if no answer may be so long."""
    if size > MAX_WRITTEN_BYTES:
        raise TooLong(f"{what}: {size} bytes, at most {MAX_WRITTEN_BYTES} are written", param=field)
    claim.grow(BYTES_PER_WRITTEN_BYTE * size, f"{what}, {size} bytes,")
