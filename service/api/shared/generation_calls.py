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

from ...concurrency.outcome import run_on_thread
from ...concurrency.time_slices import iterate_in_slices
from ...core.errors import BadRequest, BodyTooLarge, NotFound, Overloaded
from ...core.model import Model, name_model_in_errors
from ...core.request import Generate
from ...text.chat_parser import ChatDelta, ChatDeltas, parse_answers
from ...text.chat_prompt import ChatPrompt, expected_output, fit_chat, parameter_grammars
from ...text.detokenizer import AnswerDelta, StopRules, TokenLogprobs, Usage, collect_parts, join_answer, stream_answers
from ...text.prompts import GenerationRequest
from ..access.authorized_models import ModelLookup
from .dialect import EngineRequest, call_submitter, read_terms, request_context, server
from .streaming import JsonResponse, dumps_sliced

IndexedPieces = AsyncGenerator[tuple[int, AnswerDelta], None]
PartT = TypeVar("PartT", AnswerDelta, ChatDelta)
ChunkT = TypeVar("ChunkT")
PART_SCORES = 32  # log-probabilities that take as long to write as a part of an answer without any
INLINE_SCORES = 2048  # log-probabilities that are written on the event loop; more are written on a thread
SCORE_BYTES = 700  # bytes for each log-probability: as it came from the engine, as it is read and as it is written
CLAIM_STEP = 4096  # log-probabilities that memory is claimed for at a time


async def start_answers(
    request: Request, wire: EngineRequest, model: Model, asked: GenerationRequest, call: str
) -> tuple[int, IndexedPieces]:
    """How many answers there will be, and the answers, not yet submitted; `call` is in the ids of their requests.

    Of several to one prompt the first comes first, then those to the next prompt.
    """
    with request_context(request).time_tokenising():
        settled = set_cache_salt(request, set_default_length(request, asked))
        requests = await server(request).text.read_prompts(model, settled, call, read_terms(request, wire))
    return len(asked.prompts) * asked.count, generate_pieces(request, model, asked, requests)


async def start_chat(
    request: Request, wire: EngineRequest, model: Model, talk: ChatPrompt, call: str
) -> tuple[int, int, ChatDeltas]:
    """As `begun`, with what the answers say told apart; before that, how many tokens the prompt has."""
    with name_model_in_errors(model):
        asked = set_cache_salt(request, set_default_length(request, fit_chat(talk, model)))
    text, conditions = server(request).text, read_terms(request, wire)
    try:
        with request_context(request).time_tokenising():
            requests = await text.read_prompts(model, asked, call, conditions)
    except BadRequest as error:
        if error.param == talk.tools.field:  # with one of them, which its own schema tells
            await text.check_grammars(model, parameter_grammars(talk.tools), conditions)
        raise
    heard = expected_output(asked, talk.tools, model, requests[0].tokens)
    return (
        asked.count,
        requests[0].prompt_tokens,
        parse_answers(generate_pieces(request, model, asked, requests), heard),
    )


def set_default_length(request: Request, asked: GenerationRequest) -> GenerationRequest:
    """As long as the setting says, where the request does not; no dialect looks at that setting itself."""
    usual = server(request).settings.max_tokens_default
    return replace(asked, default_max_tokens=usual) if usual else asked


def set_cache_salt(request: Request, asked: GenerationRequest) -> GenerationRequest:
    """Where each key keeps its prompts to itself, so that nobody finds those of another."""
    if server(request).settings.prefix_sharing == "all":
        return asked
    return replace(asked, salt=f"{request_context(request).owner}\n{asked.salt}")


def generate_pieces(
    request: Request, model: Model, asked: GenerationRequest, requests: Sequence[Generate]
) -> IndexedPieces:
    stops = StopRules(asked.stops, asked.stop_tokens, asked.keep_stop)
    every = stream_answers(model.tokenizer, stops, requests, call_submitter(request, model))
    return select_best(claim_scores(request, every), asked) if asked.attempts > asked.count else every


async def select_best(answers: IndexedPieces, asked: GenerationRequest) -> IndexedPieces:
    """Of each prompt's tries the best, once all are there; all of them are paid for."""
    tries = await collect_parts(len(asked.prompts) * asked.attempts, answers)
    for prompt in range(len(asked.prompts)):
        theirs = tries[prompt * asked.attempts : (prompt + 1) * asked.attempts]
        whole = [join_answer(pieces) async for pieces in iterate_in_slices(theirs, 1)]
        ranked = sorted(range(asked.attempts), key=lambda index: mean_logprob(whole[index]), reverse=True)[
            : asked.count
        ]
        cost = sum((piece.usage for piece in whole), Usage())
        for place, index in enumerate(ranked):
            usage = cost if not place else Usage()
            async for piece in iterate_in_slices(theirs[index]):
                drawn = piece.logprobs if asked.logprobs >= 0 else ()
                scored = whole[0].prompt_logprobs if piece is theirs[index][0] else ()
                paid = usage if piece.finish else piece.usage
                yield prompt * asked.count + place, replace(piece, logprobs=drawn, usage=paid, prompt_logprobs=scored)


async def claim_scores(
    request: Request, parts: AsyncGenerator[tuple[int, PartT], None], repeated: int = 1
) -> AsyncGenerator[tuple[int, PartT], None]:
    """`parts`, all of which are kept until the last of them is there: their log-probabilities take memory for requests,
    those of a prompt `repeated` times.

    Raises Overloaded where there is too little, and closes `parts`.
    """
    claim, more = request_context(request).claim, 0
    async with aclosing(parts):
        async for index, part in parts:
            more += count_scores(part.logprobs) + repeated * count_scores(part.prompt_logprobs)
            if more >= CLAIM_STEP:
                try:
                    claim.grow(SCORE_BYTES * more, "the answer")
                except (BodyTooLarge, Overloaded) as error:
                    message = "the log-probabilities of the answer take more memory than is left for requests"
                    wanted = "ask for fewer of them, for fewer tokens or answers, or for a stream"
                    raise Overloaded(f"logprobs: {message}; {wanted}", param="logprobs", retry_after=1) from error
                more = 0
            yield index, part


def count_scores(drawn: Sequence[TokenLogprobs]) -> int:
    """How many log-probabilities there are: of the tokens, and of the likeliest in their places."""
    return len(drawn) + sum(len(each.top) for each in drawn)


def part_size(part: AnswerDelta | ChatDelta) -> int:
    """How much there is to write, in log-probabilities."""
    return PART_SCORES + count_scores(part.logprobs) + count_scores(part.prompt_logprobs)


async def write_json(parts: Sequence[AnswerDelta | ChatDelta], content: Callable[[], Any]) -> Response:
    """The `content`, made of `parts`, as JSON.  What takes long is made and written on a thread."""
    if fits_inline(parts):
        return JsonResponse(content())
    return await run_on_thread(lambda: Response(dumps_sliced(content()), media_type=JsonResponse.media_type))


async def make_chunk(part: AnswerDelta | ChatDelta, content: Callable[[], ChunkT]) -> ChunkT:
    """The `content` of a streamed `part`; where that is long, such as a prompt's tokens, it is made on a thread."""
    return content() if fits_inline([part]) else await run_on_thread(content)


def fits_inline(parts: Sequence[AnswerDelta | ChatDelta]) -> bool:
    """Whether little enough is to be written for the event loop."""
    size = 0
    for part in parts:
        size += part_size(part)
        if size >= INLINE_SCORES:
            return False
    return True


def mean_logprob(piece: AnswerDelta) -> float:
    """The mean log-probability of an answer's tokens."""
    scores = [drawn.token.logprob for drawn in piece.logprobs if drawn.token.logprob is not None]
    return sum(scores) / len(scores) if scores else -math.inf


def resolve_adapter(registry: ModelLookup, base: str, adapter: str) -> Model:
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
