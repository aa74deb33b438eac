"""From text to tokens: what a dialect read becomes the requests that the engine takes.

Knows no HTTP and no tensor.  The one idea: templates and tokenisers run on a few threads of their own, so that a long
prompt never holds up the event loop; the longest have one to themselves, so that they wait for each other only.  The
way back, from tokens to text, is `service.transcript`.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, cast

from models.errors import EncodingError, TemplateError
from models.tokenizer import Encoding
from service.errors import BadRequest, EmptyInput, Expired, TooLong
from service.model import Model, concerning
from service.request import Encode, Generate, Sampling, Task, Terms

CHARACTERS = 64  # for every token a model takes, are read at most: a longer text can hardly be short enough
FEWEST = 1 << 16  # characters that are always read
LONG = 1 << 18  # characters of one call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the checkpoint's template."""

    messages: tuple[Mapping[str, Any], ...]


Prompt = str | tuple[int, ...] | Chat
Input = str | tuple[str, str] | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Prompts to be continued, all in the same way.  `field` is the wire's name for them."""

    field: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    seeded: bool = False  # the sampling's seed was asked for; otherwise every request draws its own
    max_tokens: int = 0  # 0: as many as the context leaves
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int = -1  # as in Generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Texts to be read by an encoder, all in the same way.  `field` is the wire's name for them."""

    field: str
    inputs: tuple[Input, ...]
    raw: bool = False
    unit: bool = False
    dimensions: int = 0
    truncate: Literal["", "left", "right"] = ""  # the end that may be cut off; empty: too long is an error


@dataclass(frozen=True, slots=True)
class Job:
    """One call of the tokeniser: the wire's name for its texts, how long they are, and when it is too late."""

    field: str
    characters: int
    deadline: float  # on `time.perf_counter`


UNCONDITIONAL = Terms()


class Text:
    """Turns what is asked into requests, on `threads` threads of its own, and one for the longest texts.

    `batch_limit` bounds the texts of one call.  `tokenised(model, task, seconds)` is told how long each call took,
    waiting for a thread included.
    """

    def __init__(self, *, threads: int, batch_limit: int, tokenised: Callable[[str, Task, float], None]) -> None:
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="text-long")
        self._batch_limit = batch_limit
        self._tokenised = tokenised

    async def prompts(
        self, model: Model, asked: Continuation, call: str, terms: Terms = UNCONDITIONAL
    ) -> list[Generate]:
        """One request a prompt, `call` in its id.  Raises BadRequest, EmptyInput or TooLong, naming the prompt, and
        Expired at the deadline."""
        with concerning(model):
            self._check_count(asked.field, len(asked.prompts))
            work = Job(asked.field, sum(map(length, asked.prompts)), terms.deadline)
            return await self._run(model, work, lambda: read_prompts(model, asked, call, terms))

    async def inputs(self, model: Model, asked: Reading, call: str, terms: Terms = UNCONDITIONAL) -> list[Encode]:
        """One request an input, `call` in its id.  Raises as `prompts` does."""
        with concerning(model):
            self._check_count(asked.field, len(asked.inputs))
            work = Job(asked.field, sum(map(length, asked.inputs)), terms.deadline)
            return await self._run(model, work, lambda: read_inputs(model, asked, call, terms))

    async def tokens(
        self, model: Model, texts: Sequence[str], *, special: bool, deadline: float = math.inf
    ) -> list[Encoding]:
        """The texts, `inputs` to the wire, as they are tokenised.  Raises as `prompts` does."""
        with concerning(model):
            self._check_count("inputs", len(texts))
            work = Job("inputs", sum(map(len, texts)), deadline)
            return await self._run(model, work, lambda: read_tokens(model, texts, special=special))

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_count(self, field: str, count: int) -> None:
        if count == 0:
            raise EmptyInput(f"{field}: must not be empty", param=field)
        if count > self._batch_limit:
            raise BadRequest(f"{field}: at most {self._batch_limit} a call, got {count}", param=field)

    async def _run(self, model: Model, job: Job, function: Callable[[], T]) -> T:
        """What `function` returns or raises.  At the deadline nobody waits for it any longer, though a thread may."""
        began = time.perf_counter()
        pool = self._long if job.characters > LONG else self._short
        try:
            async with asyncio.timeout(None if job.deadline == math.inf else job.deadline - began):
                return await asyncio.get_running_loop().run_in_executor(pool, function)
        except TimeoutError:
            raise Expired("the deadline has passed while the text was being made tokens") from None
        except (EncodingError, TemplateError) as error:
            raise BadRequest(f"{job.field}: {error}", param=job.field) from None
        finally:
            self._tokenised(model.name, model.task, time.perf_counter() - began)


def place(field: str, index: int, count: int) -> str:
    """What messages call one of `count` texts."""
    return field if count == 1 else f"{field}[{index}]"


def length(given: Prompt | Input) -> int:
    """In characters; ids are tokens already, and cost nothing."""
    match given:
        case str():
            return len(given)
        case Chat(messages=messages):
            return sum(len(str(message.get("content", ""))) for message in messages)
        case _:
            return sum(len(part) for part in given if isinstance(part, str))


def read_prompts(model: Model, asked: Continuation, call: str, terms: Terms) -> list[Generate]:
    known_tokens(model, list(asked.stop_tokens), "stop_token_ids")
    requests = []
    for index, prompt in enumerate(asked.prompts):
        where = place(asked.field, index, len(asked.prompts))
        tokens = prompt_tokens(model, prompt, where)
        seed = asked.sampling.seed if asked.seeded else random.getrandbits(63)
        requests.append(
            Generate(
                id=f"{call}-{index}",
                tokens=tokens,
                max_tokens=room(model, len(tokens), asked.max_tokens, where),
                stop_tokens=asked.stop_tokens if asked.ignore_eos else asked.stop_tokens | model.stop_tokens,
                sampling=replace(asked.sampling, seed=seed),
                logprobs=asked.logprobs,
                terms=terms,
            )
        )
    return requests


def prompt_tokens(model: Model, prompt: Prompt, where: str) -> tuple[int, ...]:
    match prompt:
        case str():
            ids = encoded(model, prompt, where, special=True) if prompt else []
        case Chat():
            # the template writes the special tokens itself
            ids = encoded(model, rendered(model, prompt, where), where, special=False)
        case _:
            ids = list(prompt)
    if not ids:
        raise EmptyInput(f"{where}: is empty, there is nothing to continue", param=where)
    return tuple(known_tokens(model, ids, where))


def encoded(model: Model, text: str, where: str, *, special: bool) -> list[int]:
    """The text's tokens; TooLong before there is a list of them."""
    check_characters(model, text, where)
    [encoding] = model.tokenizer.encode_batch([text], special=special, offsets=False)
    check_length(model, len(encoding), where)
    return encoding.ids


def check_length(model: Model, length: int, where: str) -> None:
    if length > model.max_tokens:
        raise TooLong(f"{where}: the prompt has {length} tokens, the model takes {model.max_tokens}", param=where)


def check_characters(model: Model, text: str, where: str) -> None:
    """Turning text into tokens holds up everybody else; of an absurdly long one it is not begun."""
    most = max(FEWEST, CHARACTERS * model.max_tokens)
    if len(text) > most:
        raise TooLong(
            f"{where}: has {len(text)} characters, at most {most} are read: the model takes {model.max_tokens} tokens",
            param=where,
        )


def rendered(model: Model, prompt: Chat, where: str) -> str:
    if model.chat is None:
        raise BadRequest(f"{where}: {model.name} has no chat template; ask for a completion instead", param=where)
    return model.chat.render(prompt.messages)


def known_tokens(model: Model, ids: Sequence[int], where: str) -> list[int]:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < model.vocab_size:
            raise BadRequest(f"{where}: token {token} is outside the vocabulary of {model.vocab_size}", param=where)
    return list(ids)


def room(model: Model, length: int, wanted: int, where: str) -> int:
    """How many tokens may follow a prompt of `length`: as many as are wanted, or as the context leaves."""
    check_length(model, length, where)
    limit = model.max_tokens
    if length == limit:
        raise TooLong(
            f"{where}: the prompt has {length} tokens of the {limit} the model takes, none is left", param=where
        )
    if length + wanted > limit:
        raise TooLong(
            f"max_tokens: the prompt has {length} tokens and {wanted} more are asked for, the model takes {limit}",
            param="max_tokens",
        )
    return wanted or limit - length


def read_tokens(model: Model, texts: Sequence[str], *, special: bool) -> list[Encoding]:
    check_filled("inputs", texts)
    places = [place("inputs", index, len(texts)) for index in range(len(texts))]
    for text, where in zip(texts, places, strict=True):
        check_characters(model, text, where)
    encodings = model.tokenizer.encode_batch(texts, special=special)
    most = max(FEWEST, model.max_tokens)
    for encoding, where in zip(encodings, places, strict=True):
        if len(encoding) > most:
            raise TooLong(f"{where}: has {len(encoding)} tokens, at most {most} are listed", param=where)
    return encodings


def read_inputs(model: Model, asked: Reading, call: str, terms: Terms) -> list[Encode]:
    if asked.dimensions > model.width:
        message = f"dimensions: {model.name} has {model.width}, got {asked.dimensions}"
        raise BadRequest(message, param="dimensions")
    requests = []
    for index, encoding in enumerate(encodings(model, asked)):
        rows = fitting(model, encoding, asked, index)
        segments = tuple(encoding.segments[row] for row in rows)
        requests.append(
            Encode(
                id=f"{call}-{index}",
                tokens=tuple(encoding.ids[row] for row in rows),
                segments=segments if any(segments) else (),
                raw=asked.raw,
                unit=asked.unit,
                dimensions=asked.dimensions,
                terms=terms,
            )
        )
    return requests


class Row(Protocol):
    """A text as tokens, as far as an encoder needs to know."""

    def __len__(self) -> int: ...

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def segments(self) -> Sequence[int]: ...

    @property
    def special(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Given:
    """Tokens that came as such."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> Sequence[int]:
        return (0,) * len(self.ids)

    @property
    def special(self) -> Sequence[bool]:
        return (False,) * len(self.ids)


def encodings(model: Model, asked: Reading) -> list[Row]:
    """All texts in one call of the tokeniser; ids are taken as they are, special tokens included."""
    check_filled(asked.field, asked.inputs)
    for index, given in enumerate(asked.inputs):
        for text in (given,) if isinstance(given, str) else given:
            if isinstance(text, str):
                check_characters(model, text, place(asked.field, index, len(asked.inputs)))
    texts = [given for given in asked.inputs if is_text(given)]
    encoded = iter(model.tokenizer.encode_batch(texts, offsets=False) if texts else ())
    return [next(encoded) if is_text(given) else as_given(model, given, asked.field) for given in asked.inputs]


def check_filled(field: str, inputs: Sequence[Input]) -> None:
    for index, given in enumerate(inputs):
        if not given or (is_text(given) and not any(given)):
            where = place(field, index, len(inputs))
            raise EmptyInput(f"{where}: is empty, there is nothing to read", param=where)


def is_text(given: Input) -> TypeGuard[str | tuple[str, str]]:
    return isinstance(given, str) or isinstance(given[0], str)


def as_given(model: Model, given: Input, field: str) -> Given:
    return Given(known_tokens(model, cast(tuple[int, ...], given), field))


def fitting(model: Model, encoding: Row, asked: Reading, index: int) -> Sequence[int]:
    """The rows of `encoding` that the model reads: all, or fewer if they are too many and may be cut."""
    length, limit = len(encoding), model.max_tokens
    if length <= limit:
        return range(length)
    if not asked.truncate:
        where = place(asked.field, index, len(asked.inputs))
        raise TooLong(f"{where}: the input has {length} tokens, the model takes {limit}", param=where)
    return cut(encoding.special, limit, side=asked.truncate, pair=isinstance(asked.inputs[index], tuple))


def cut(special: Sequence[bool], limit: int, *, side: Literal["left", "right"], pair: bool) -> list[int]:
    """At most `limit` rows: special tokens stay, texts lose tokens at `side`, of a pair the longer first."""
    content = [row for row, is_special in enumerate(special) if not is_special]
    # the two texts of a pair have special tokens between them
    border = next((n for n in range(1, len(content)) if content[n] != content[n - 1] + 1), len(content)) if pair else 0
    texts = content[:border], content[border:]
    lengths = shares(len(texts[0]), len(texts[1]), max(0, limit - (len(special) - len(content))))
    kept = [row for row, is_special in enumerate(special) if is_special]
    for text, length in zip(texts, lengths, strict=True):
        kept += text[:length] if side == "right" else text[len(text) - length :]
    return sorted(kept)


def shares(first: int, second: int, budget: int) -> tuple[int, int]:
    """How much of two lengths fits into `budget` when the longer gives first, and both give evenly after that."""
    if first + second <= budget:
        return first, second
    shorter = min(first, second, budget // 2)
    return (shorter, budget - shorter) if first <= second else (budget - shorter, shorter)
