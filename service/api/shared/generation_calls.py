"""Runs generation calls, for all dialects."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from polyhead.models.chat.template_functions import value_size

from ...concurrency.time_slices import iterate_in_slices, split_in_slices
from ...core.errors import BadRequest, NotFound, TooLong
from ...core.model import Model, name_model_in_errors
from ...core.request import Generate, Terms
from ...text.answer_delta import AnswerDelta, Usage
from ...text.answer_stream import AnswerStream, collect_deltas, join_answers
from ...text.chat_prompt import add_tools, expected_output, fit_chat, ignores_reasoning, parameter_grammars
from ...text.chat_truncation import answer_room, cut_messages, list_cuts
from ...text.event_source import EventReader
from ...text.generation_request import ChatMessages, GenerationRequest, Prompt
from ...text.score_claim import SCORE_BYTES, ScoreClaim
from ...text.stop_strings import StopRules
from ...text.tokenization import text_length
from ..access.authorized_models import ModelLookup
from .dialect import (
    EngineRequest,
    answer_threads,
    call_submitter,
    read_terms,
    request_context,
    server,
    text_processor,
    turn_taker,
)
from .json_body import SCAN_BYTES, count_containers, run_in_turn
from .streaming import INLINE_BYTES, PartsResponse, dump_chunks, dumps, json_weight

PART_SCORES = 32  # cost of a part without log-probabilities, in log-probabilities
INLINE_SCORES = 2048  # log-probabilities that are written on the event loop; more are written on a thread

T = TypeVar("T")


async def start_answers(
    request: Request, wire: EngineRequest, model: Model, generation: GenerationRequest, call: str
) -> AnswerStream:
    """Tokenise the prompts of `generation` and submit them.  Returns the answers as they are generated.

    `call` is the prefix of the request ids.  The attempts of one prompt are consecutive, in the order of the prompts.
    Answers to a conversation are parsed into reasoning, text and tool calls.  What was not read is aborted at the end
    of the HTTP request.
    """
    with name_model_in_errors(model):
        is_chat = isinstance(generation.prompts[0], ChatMessages) if generation.prompts else False
        fitted = await fit_conversation(request, generation, model) if is_chat else generation
        prepared = set_cache_salt(request, set_default_length(request, fitted))
    terms = read_terms(request, wire)
    try:
        requests = await read_prompts(request, model, prepared, call, terms)
    except TooLong:
        if not generation.drops_oldest:
            raise
        prepared = await drop_oldest(request, model, generation, prepared, terms)
        requests = await read_prompts(request, model, prepared, call, terms)
    stops = StopRules(prepared.stops, prepared.stop_tokens, prepared.keep_stop)
    expected = expected_output(prepared, model, requests[0].tokens)
    scores = ScoreClaim(request_context(request).claim)
    scores.expect(requests)
    sources = await call_submitter(request, model)(requests)
    answers = AnswerStream(model.tokenizer, stops, requests, EventReader(sources, turn_taker(request)), expected)
    answers.scores = scores
    request_context(request).cleanup.callback(answers.close)
    return answers


async def fit_conversation(request: Request, generation: GenerationRequest, model: Model) -> GenerationRequest:
    """`fit_chat`, on a thread where there is much to write; a header of the response names an option of reasoning that
    the model's template does not know. Claims memory for the arguments of calls, which may be texts in the body.
    """
    if containers := sum(map(count_argument_containers, generation.prompts)):
        request_context(request).claim.grow_by_containers(containers, 0, "the arguments of tool calls")
    size, fit = conversation_size(generation), partial(fit_chat, generation, model)
    fitted = await run_for_conversation(request, size, fit)
    if ignores_reasoning(generation, model):
        request_context(request).ignored.append(generation.reasoning.field)
    return fitted


def conversation_size(generation: GenerationRequest) -> int:
    """The approximate number of characters of all messages and tools."""
    tools = sum(value_size(tool.parameters) + len(tool.description) for tool in generation.tools.offered)
    return tools + sum(map(text_length, generation.prompts))


async def run_for_conversation(request: Request, size: int, function: Callable[[], T]) -> T:
    """Run `function`, which reads a whole conversation of `size` characters: on a thread if they are many."""
    if size <= SCAN_BYTES:
        return function()
    return await run_in_turn(request, "reading the conversation", size, function)


async def drop_oldest(
    request: Request, model: Model, generation: GenerationRequest, prepared: GenerationRequest, terms: Terms
) -> GenerationRequest:
    """`prepared`, which is `generation` made for the model, without the oldest messages: the longest form that leaves
    room for the answer, else the shortest one; all of it if nothing may be left out.  The forms are made and rendered
    one after another, as few as a bisection needs.
    """
    [chat], [fitted] = generation.prompts, prepared.prompts
    assert isinstance(chat, ChatMessages), "a conversation"
    assert isinstance(fitted, ChatMessages), "a conversation"
    room, text, size = answer_room(model, prepared), text_processor(request), conversation_size(generation)

    def make_shorter(place: int) -> ChatMessages:
        shorter = replace(chat, messages=cut_messages(chat.messages, place), variables=fitted.variables)
        return add_tools(shorter, generation.tools, model.chat_format)

    async def cut(place: int) -> ChatMessages:
        return await run_for_conversation(request, size, partial(make_shorter, place))

    async def fits(place: int) -> bool:
        shorter = await cut(place)
        try:
            with request_context(request).time_tokenising():
                _, ids = await text.render_prompt(model, shorter, prepared.field, special=False, terms=terms)
        except TooLong:
            return False
        return len(ids) + room <= model.max_tokens

    cuts = await run_for_conversation(request, size, partial(list_cuts, chat.messages))
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return replace(prepared, prompts=(await cut(cuts[low]),)) if cuts else prepared


def count_argument_containers(prompt: Prompt) -> int:
    """How many lists and objects are in the arguments of the tool calls of a conversation."""
    if not isinstance(prompt, ChatMessages):
        return 0
    calls = (call for message in prompt.messages for call in message.get("tool_calls", ()))
    return sum(count_containers(call["function"]["arguments"]) for call in calls)


async def read_prompts(
    request: Request, model: Model, generation: GenerationRequest, call: str, terms: Terms
) -> list[Generate]:
    """Tokenise the prompts on a thread."""
    text = text_processor(request)
    try:
        with request_context(request).time_tokenising():
            return await text.read_prompts(model, generation, call, terms)
    except BadRequest as error:
        if error.param == generation.tools.field:  # the error is in one tool's schema; find out which
            await text.check_grammars(model, parameter_grammars(generation.tools), terms)
        raise


def set_default_length(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Set the default length of an answer to the setting max_tokens_default, if there is one."""
    default = server(request).settings.max_tokens_default
    return replace(generation, default_max_tokens=default) if default else generation


def set_cache_salt(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Add the key's name to the cache salt, unless all keys share cached prefixes (setting prefix_sharing)."""
    return replace(generation, salt=cache_salt(request, generation.salt))


def cache_salt(request: Request, salt: str) -> str:
    """The cache salt of a request with its key's name, unless all keys share cached prefixes."""
    is_shared = server(request).settings.prefix_sharing == "all"
    return salt if is_shared else f"{request_context(request).owner}\n{salt}"


async def collect_answers(
    request: Request, generation: GenerationRequest, answers: AnswerStream, repeated: int = 1
) -> list[AnswerDelta]:
    """All answers, each as one delta: of each prompt the best `generation.count` of its attempts, the best first.

    Memory for their log-probabilities is claimed; those of a prompt are written `repeated` times.
    """
    take_turn = turn_taker(request)
    joined = await join_answers(await collect_deltas(answers, repeated), take_turn)
    if generation.attempts == generation.count:
        return joined
    prompts = iterate_in_slices(split_in_slices(joined, generation.attempts), 1, take_turn)
    return [answer async for tries in prompts for answer in select_best(tries, generation)]


def select_best(tries: Sequence[AnswerDelta], generation: GenerationRequest) -> list[AnswerDelta]:
    """The best of one prompt's tries.  The usage of the first counts all of them."""
    ranked = sorted(tries, key=mean_logprob, reverse=True)[: generation.count]
    cost, scored = sum((one.usage for one in tries), Usage()), tries[0].prompt_logprobs
    return [
        replace(
            one,
            logprobs=one.logprobs if generation.logprobs >= 0 else (),
            usage=Usage() if place else cost,
            prompt_logprobs=scored,
        )
        for place, one in enumerate(ranked)
    ]


def part_size(part: AnswerDelta) -> int:
    """The cost of writing a part, in log-probabilities.  All tokens have as many alternatives as the last one."""
    listed = (tokens for tokens in (part.logprobs, part.prompt_logprobs) if tokens)
    return PART_SCORES + sum(len(tokens) * (1 + len(tokens[-1].likeliest)) for tokens in listed)


async def write_json(request: Request, parts: Sequence[AnswerDelta], content: Callable[[], Any]) -> PartsResponse:
    """A response with `content`, made of `parts`, as JSON.  Large answers are written on a thread."""
    if (cost := writing_cost(parts)) >= INLINE_SCORES:
        return PartsResponse(await answer_threads(request).run(SCORE_BYTES * cost, lambda: dump_chunks(content())))
    made = content()
    size = json_weight(made, INLINE_BYTES)
    if size <= INLINE_BYTES:
        return PartsResponse([dumps(made)])
    return PartsResponse(await answer_threads(request).run(size, partial(dump_chunks, made)))


def writing_cost(parts: Sequence[AnswerDelta]) -> int:
    """The cost of writing `parts`, in log-probabilities.  From INLINE_SCORES on it is estimated by the first parts."""
    size = 0
    for count, part in enumerate(parts, 1):
        size += part_size(part)
        if size >= INLINE_SCORES:
            return size * len(parts) // count
    return size


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
            raise BadRequest(f"{field}: {adapter[:60]!r} {problem}", param=field)
        [name] = names
    try:
        return registry.resolve(name, ["generate"])
    except NotFound as error:
        raise NotFound(f"{field}: {error.message}", param=field) from None
