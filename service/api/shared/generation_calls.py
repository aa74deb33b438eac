"""Runs generation calls, for all dialects."""

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

AnswerStream = AsyncGenerator[tuple[int, AnswerDelta], None]
PartT = TypeVar("PartT", AnswerDelta, ChatDelta)
ChunkT = TypeVar("ChunkT")
PART_SCORES = 32  # cost of a part without log-probabilities, in log-probabilities
INLINE_SCORES = 2048  # log-probabilities that are written on the event loop; more are written on a thread
SCORE_BYTES = 700  # bytes of each log-probability: from the engine, as a Python object, and as JSON
CLAIM_STEP = 4096  # log-probabilities for which memory is claimed at a time


async def start_answers(
    request: Request, wire: EngineRequest, model: Model, generation: GenerationRequest, call: str
) -> tuple[int, AnswerStream]:
    """Tokenise the prompts of `generation`.  Returns the number of answers, and the answers, not yet submitted.

    `call` is the prefix of the request ids.  Several answers to one prompt are consecutive, in the order of the
    prompts.
    """
    with request_context(request).time_tokenising():
        prepared = set_cache_salt(request, set_default_length(request, generation))
        requests = await server(request).text.read_prompts(model, prepared, call, read_terms(request, wire))
    return len(generation.prompts) * generation.count, open_answer_stream(request, model, generation, requests)


async def start_chat(
    request: Request, wire: EngineRequest, model: Model, chat_prompt: ChatPrompt, call: str
) -> tuple[int, int, ChatDeltas]:
    """The same for a chat: the answers are parsed into reasoning, text and tool calls.

    Returns the number of answers, the prompt's length in tokens, and the answers.
    """
    with name_model_in_errors(model):
        generation = set_cache_salt(request, set_default_length(request, fit_chat(chat_prompt, model)))
    text, terms = server(request).text, read_terms(request, wire)
    try:
        with request_context(request).time_tokenising():
            requests = await text.read_prompts(model, generation, call, terms)
    except BadRequest as error:
        if error.param == chat_prompt.tools.field:  # the error is in one tool's schema; find out which
            await text.check_grammars(model, parameter_grammars(chat_prompt.tools), terms)
        raise
    expectation = expected_output(generation, chat_prompt.tools, model, requests[0].tokens)
    deltas = parse_answers(open_answer_stream(request, model, generation, requests), expectation)
    return generation.count, requests[0].prompt_tokens, deltas


def set_default_length(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Set the default length of an answer to the setting max_tokens_default, if there is one."""
    default = server(request).settings.max_tokens_default
    return replace(generation, default_max_tokens=default) if default else generation


def set_cache_salt(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Add the key's name to the cache salt, unless all keys share cached prefixes (setting prefix_sharing)."""
    if server(request).settings.prefix_sharing == "all":
        return generation
    return replace(generation, salt=f"{request_context(request).owner}\n{generation.salt}")


def open_answer_stream(
    request: Request, model: Model, generation: GenerationRequest, requests: Sequence[Generate]
) -> AnswerStream:
    stops = StopRules(generation.stops, generation.stop_tokens, generation.keep_stop)
    answers = stream_answers(model.tokenizer, stops, requests, call_submitter(request, model))
    if generation.attempts > generation.count:
        return select_best(claim_scores(request, answers), generation)
    return answers


async def select_best(answers: AnswerStream, generation: GenerationRequest) -> AnswerStream:
    """Select the best of each prompt's tries when all are complete.  The usage counts all tries."""
    tries = await collect_parts(len(generation.prompts) * generation.attempts, answers)
    for prompt in range(len(generation.prompts)):
        candidates = tries[prompt * generation.attempts : (prompt + 1) * generation.attempts]
        whole = [join_answer(pieces) async for pieces in iterate_in_slices(candidates, 1)]
        ranked = sorted(range(generation.attempts), key=lambda index: mean_logprob(whole[index]), reverse=True)
        ranked = ranked[: generation.count]
        cost = sum((piece.usage for piece in whole), Usage())
        for place, index in enumerate(ranked):
            usage = cost if not place else Usage()
            async for piece in iterate_in_slices(candidates[index]):
                token_logprobs = piece.logprobs if generation.logprobs >= 0 else ()
                scored = whole[0].prompt_logprobs if piece is candidates[index][0] else ()
                paid = usage if piece.finish else piece.usage
                part = replace(piece, logprobs=token_logprobs, usage=paid, prompt_logprobs=scored)
                yield prompt * generation.count + place, part


async def claim_scores(
    request: Request, parts: AsyncGenerator[tuple[int, PartT], None], repeated: int = 1
) -> AsyncGenerator[tuple[int, PartT], None]:
    """Pass `parts` on, and claim memory for their log-probabilities, which are kept until the answer is complete.

    Those of a prompt are written `repeated` times.  Raises Overloaded, and closes `parts`, if there is too little
    memory.
    """
    claim, pending = request_context(request).claim, 0
    async with aclosing(parts):
        async for index, part in parts:
            pending += count_scores(part.logprobs) + repeated * count_scores(part.prompt_logprobs)
            if pending >= CLAIM_STEP:
                try:
                    claim.grow(SCORE_BYTES * pending, "the answer")
                except (BodyTooLarge, Overloaded) as error:
                    message = "the log-probabilities of the answer take more memory than is left for requests"
                    advice = "ask for fewer of them, for fewer tokens or answers, or for a stream"
                    raise Overloaded(f"logprobs: {message}; {advice}", param="logprobs", retry_after=1) from error
                pending = 0
            yield index, part


def count_scores(tokens: Sequence[TokenLogprobs]) -> int:
    """The number of log-probabilities: of the tokens and of their alternatives."""
    return len(tokens) + sum(len(each.top) for each in tokens)


def part_size(part: AnswerDelta | ChatDelta) -> int:
    """The cost of writing a part, in log-probabilities."""
    return PART_SCORES + count_scores(part.logprobs) + count_scores(part.prompt_logprobs)


async def write_json(parts: Sequence[AnswerDelta | ChatDelta], content: Callable[[], Any]) -> Response:
    """A response with `content`, made of `parts`, as JSON.  Large answers are written on a thread."""
    if fits_inline(parts):
        return JsonResponse(content())
    return await run_on_thread(lambda: Response(dumps_sliced(content()), media_type=JsonResponse.media_type))


async def make_chunk(part: AnswerDelta | ChatDelta, content: Callable[[], ChunkT]) -> ChunkT:
    """The `content` of a streamed `part`; if it is large, such as a prompt's tokens, it is made on a thread."""
    return content() if fits_inline([part]) else await run_on_thread(content)


def fits_inline(parts: Sequence[AnswerDelta | ChatDelta]) -> bool:
    """Whether `parts` are small enough to be written on the event loop."""
    size = 0
    for part in parts:
        size += part_size(part)
        if size >= INLINE_SCORES:
            return False
    return True


def mean_logprob(piece: AnswerDelta) -> float:
    """The mean log-probability of an answer's tokens."""
    scores = [token.token.logprob for token in piece.logprobs if token.token.logprob is not None]
    return sum(scores) / len(scores) if scores else -math.inf


def resolve_adapter(registry: ModelLookup, base: str, adapter: str) -> Model:
    """The adapter `adapter` of the model `base`; without `base`, the only served adapter of that name."""
    field = "parameters.adapter_id"
    name = adapter if ":" in adapter else f"{base.partition(':')[0]}:{adapter}"
    if name.startswith(":"):
        names = [model.name for model in registry.models() if model.name.endswith(name)]
        if len(names) != 1:
            problem = f"is an adapter of {', '.join(names)}; say which" if names else "is not a served adapter"
            raise BadRequest(f"{field}: {adapter!r} {problem}", param=field)
        [name] = names
    try:
        return registry.resolve(name, ["generate"])
    except NotFound as error:
        raise NotFound(f"{field}: {error.message}", param=field) from None
