"""How prompts are continued, for every dialect that does so.

Knows no dialect's words.
"""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from ...concurrency.outcome import on_thread
from ...concurrency.time_slices import spaced
from ...core.errors import BadRequest, BodyTooLarge, NotFound, Overloaded
from ...core.model import Model, concerning
from ...core.request import Generate
from ...text.chat_parser import Utterance, Utterances, conversed
from ...text.chat_prompt import Talk, expected, fitted, parts
from ...text.detokenizer import Drawn, Piece, Stops, Usage, continued, joined, parted
from ...text.prompts import Continuation
from ..access.authorized_models import Served
from .dialect import Work, call_submitter, server, terms, visit
from .streaming import JsonResponse, dumps_sliced

Answers = AsyncGenerator[tuple[int, Piece], None]
Part = TypeVar("Part", Piece, Utterance)
Chunk = TypeVar("Chunk")
PART = 32  # log-probabilities that take as long to write as a part of an answer without any
INLINE = 2048  # log-probabilities that are written on the event loop; more are written on a thread
SCORE = 700  # bytes for each log-probability: as it came from the engine, as it is read and as it is written
CLAIMED = 4096  # log-probabilities that memory is claimed for at a time


async def begun(request: Request, wire: Work, model: Model, asked: Continuation, call: str) -> tuple[int, Answers]:
    """How many answers there will be, and the answers, not yet submitted; `call` is in the ids of their requests.

    Of several to one prompt the first comes first, then those to the next prompt.
    """
    with visit(request).tokenising():
        settled = apart(request, lasting(request, asked))
        requests = await server(request).text.prompts(model, settled, call, terms(request, wire))
    return len(asked.prompts) * asked.count, answers(request, model, asked, requests)


async def spoken(request: Request, wire: Work, model: Model, talk: Talk, call: str) -> tuple[int, int, Utterances]:
    """As `begun`, with what the answers say told apart; before that, how many tokens the prompt has."""
    with concerning(model):
        asked = apart(request, lasting(request, fitted(talk, model)))
    text, conditions = server(request).text, terms(request, wire)
    try:
        with visit(request).tokenising():
            requests = await text.prompts(model, asked, call, conditions)
    except BadRequest as error:
        if error.param == talk.tools.field:  # with one of them, which its own schema tells
            await text.check(model, parts(talk.tools), conditions)
        raise
    heard = expected(asked, talk.tools, model, requests[0].tokens)
    return asked.count, requests[0].prompt_tokens, conversed(answers(request, model, asked, requests), heard)


def lasting(request: Request, asked: Continuation) -> Continuation:
    """As long as the setting says, where the request does not; no dialect looks at that setting itself."""
    usual = server(request).settings.max_tokens_default
    return replace(asked, usual=usual) if usual else asked


def apart(request: Request, asked: Continuation) -> Continuation:
    """Where each key keeps its prompts to itself, so that nobody finds those of another."""
    if server(request).settings.prefix_sharing == "all":
        return asked
    return replace(asked, salt=f"{visit(request).owner}\n{asked.salt}")


def answers(request: Request, model: Model, asked: Continuation, requests: Sequence[Generate]) -> Answers:
    stops = Stops(asked.stops, asked.stop_tokens, asked.keep_stop)
    every = continued(model.tokenizer, stops, requests, call_submitter(request, model))
    return best(kept(request, every), asked) if asked.tries > asked.count else every


async def best(answers: Answers, asked: Continuation) -> Answers:
    """Of each prompt's tries the best, once all are there; all of them are paid for."""
    tries = await parted(len(asked.prompts) * asked.tries, answers)
    for prompt in range(len(asked.prompts)):
        theirs = tries[prompt * asked.tries : (prompt + 1) * asked.tries]
        whole = [joined(pieces) async for pieces in spaced(theirs, 1)]
        ranked = sorted(range(asked.tries), key=lambda index: likelihood(whole[index]), reverse=True)[: asked.count]
        cost = sum((piece.usage for piece in whole), Usage())
        for place, index in enumerate(ranked):
            usage = cost if not place else Usage()
            async for piece in spaced(theirs[index]):
                drawn = piece.drawn if asked.logprobs >= 0 else ()
                scored = whole[0].prompt if piece is theirs[index][0] else ()
                paid = usage if piece.finish else piece.usage
                yield prompt * asked.count + place, replace(piece, drawn=drawn, usage=paid, prompt=scored)


async def kept(
    request: Request, parts: AsyncGenerator[tuple[int, Part], None], repeated: int = 1
) -> AsyncGenerator[tuple[int, Part], None]:
    """`parts`, all of which are kept until the last of them is there: their log-probabilities take memory for requests,
    those of a prompt `repeated` times.

    Raises Overloaded where there is too little, and closes `parts`.
    """
    claim, more = visit(request).claim, 0
    async with aclosing(parts):
        async for index, part in parts:
            more += scores_in(part.drawn) + repeated * scores_in(part.prompt)
            if more >= CLAIMED:
                try:
                    claim.grow(SCORE * more, "the answer")
                except (BodyTooLarge, Overloaded) as error:
                    message = "the log-probabilities of the answer take more memory than is left for requests"
                    wanted = "ask for fewer of them, for fewer tokens or answers, or for a stream"
                    raise Overloaded(f"logprobs: {message}; {wanted}", param="logprobs", retry_after=1) from error
                more = 0
            yield index, part


def scores_in(drawn: Sequence[Drawn]) -> int:
    """How many log-probabilities there are: of the tokens, and of the likeliest in their places."""
    return len(drawn) + sum(len(each.top) for each in drawn)


def size_of(part: Piece | Utterance) -> int:
    """How much there is to write, in log-probabilities."""
    return PART + scores_in(part.drawn) + scores_in(part.prompt)


async def json_of(parts: Sequence[Piece | Utterance], content: Callable[[], Any]) -> Response:
    """The `content`, made of `parts`, as JSON.  What takes long is made and written on a thread."""
    if inline(parts):
        return JsonResponse(content())
    return await on_thread(lambda: Response(dumps_sliced(content()), media_type=JsonResponse.media_type))


async def chunk_of(part: Piece | Utterance, content: Callable[[], Chunk]) -> Chunk:
    """The `content` of a streamed `part`; where that is long, such as a prompt's tokens, it is made on a thread."""
    return content() if inline([part]) else await on_thread(content)


def inline(parts: Sequence[Piece | Utterance]) -> bool:
    """Whether little enough is to be written for the event loop."""
    size = 0
    for part in parts:
        size += size_of(part)
        if size >= INLINE:
            return False
    return True


def likelihood(piece: Piece) -> float:
    """The mean log-probability of an answer's tokens."""
    scores = [drawn.token.logprob for drawn in piece.drawn if drawn.token.logprob is not None]
    return sum(scores) / len(scores) if scores else -math.inf


def adapted(registry: Served, base: str, adapter: str) -> Model:
    """The model called `adapter`, or `base`:`adapter`; where there is no `base`, the only one that is called so."""
    field = "parameters.adapter_id"
    name = adapter if ":" in adapter else f"{base.partition(':')[0]}:{adapter}"
    if name.startswith(":"):
        named = [model.name for model in registry.models() if model.name.endswith(name)]
        if len(named) != 1:
            said = f"is an adapter of {', '.join(named)}; say which" if named else "is no adapter that is served here"
            raise BadRequest(f"{field}: {adapter!r} {said}", param=field)
        [name] = named
    try:
        return registry.resolve(name, ["generate"])
    except NotFound as error:
        raise NotFound(f"{field}: {error.message}", param=field) from None
