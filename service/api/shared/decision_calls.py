"""Runs calls of typed questions about a text, for all dialects of decisions."""

import uuid
from dataclasses import replace
from functools import partial

from fastapi import Request

from ...core.errors import StepFailed
from ...core.model import Model
from ...core.request import Done, Failed, GeneratedToken, Terms
from ...decisions.calibration import apply_calibration
from ...decisions.encoder_reads import DECISION_TASKS, HeadRead, read_heads
from ...decisions.generator_reads import LabelRead, read_labels
from ...decisions.question import DecisionRequest, OptionScores, average_orders
from ...resources.request_memory import BYTES_PER_NUMBER, BYTES_PER_TEXT
from ...text.answer_delta import NO_USAGE, Usage
from ...text.encoder_outputs import SubmittedAhead
from ...text.event_source import EventSource
from ...text.tokenization import TokenizerJob
from ..access.authorized_models import AuthorizedModels
from .dialect import EngineRequest, read_terms, record_model, request_context, server, submitter
from .encoding_calls import collect_scores
from .generation_calls import cache_salt

TOKENS_AHEAD = 1 << 15  # tokens of a call's prompts that are submitted ahead; most of them are found in the cache


def find_decision_model(request: Request, models: AuthorizedModels, name: str) -> Model:
    """The model that answers; without a name the only one that can."""
    return record_model(request, models.resolve_or_only(name, DECISION_TASKS))


async def answer_questions(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    """The probabilities of the options of each question, in order, calibrated where the model has a calibration."""
    found = await read_scores(request, wire, model, decision)
    calibrated = [
        apply_calibration(model.calibration, question, scores)
        for question, scores in zip(decision.questions, found, strict=True)
    ]
    for question, scores in zip(decision.questions, calibrated, strict=True):
        server(request).metrics.record_calibrated(model.name, question.kind, scores.calibration, scores.confidence)
    return calibrated


async def read_scores(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    """The probabilities as the model has them."""
    options = sum(len(question.options) for question in decision.questions)
    size = BYTES_PER_TEXT * len(decision.questions) + BYTES_PER_NUMBER * options
    request_context(request).claim.grow(size, "the answers")
    if model.task == "generate":
        return await ask_generator(request, wire, model, decision)
    return [
        average_orders([await ask_head(request, wire, model, read) for read in orders])
        for orders in read_heads(model, decision)
    ]


async def ask_head(request: Request, wire: EngineRequest, model: Model, read: HeadRead) -> OptionScores:
    if read.ignored:
        request_context(request).ignored.append(read.ignored)
    outputs = await collect_scores(request, wire, model, read.encoding)
    return read.score_options([found.values for found in outputs], sum((found.usage for found in outputs), NO_USAGE))


async def ask_generator(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    """All reads of a call are in the engine at once, as far as TOKENS_AHEAD allows: they share steps and the cache."""
    context, terms = request_context(request), read_terms(request, wire)
    with context.time_tokenising():
        reads = await tokenize_questions(request, model, decision, terms)
    requests = [each for orders in reads for read in orders for each in read.requests]
    ahead = min(TOKENS_AHEAD, server(request).settings.max_tokens_in_flight // 2)
    sources = SubmittedAhead(requests, submitter(request, model), ahead)
    context.cleanup.callback(sources.close)
    return [average_orders([await score_read(read, sources) for read in orders]) for orders in reads]


async def tokenize_questions(
    request: Request, model: Model, decision: DecisionRequest, terms: Terms
) -> list[list[LabelRead]]:
    salted = replace(decision, salt=cache_salt(request, decision.salt))
    characters = len(decision.state) + sum(len(question.instructions) for question in decision.questions)
    job = TokenizerJob(decision.field, characters, terms)
    work = partial(read_labels, model, salted, f"decision-{uuid.uuid4().hex}", terms, job.check)
    return await server(request).text.run(model, job, work)


async def score_read(read: LabelRead, sources: SubmittedAhead) -> OptionScores:
    tops, likeliest, usage = list[dict[int, float]](), -1, NO_USAGE
    for _ in read.requests:
        token, cost = await read_token(await sources.next())
        tops.append(dict(token.top))
        likeliest = token.id if len(tops) == 1 else likeliest
        usage += cost
    return read.score_options(tops, likeliest, usage)


async def read_token(source: EventSource) -> tuple[GeneratedToken, Usage]:
    """The token that a read answered with, and its usage. Raises the error of its request."""
    found: GeneratedToken | None = None
    async for event in source:
        match event:
            case GeneratedToken():
                found = event
            case Failed():
                raise event.error
            case Done() if found is not None:
                return found, Usage(event.prompt_tokens, event.completion_tokens, event.cached_tokens)
    raise StepFailed("the engine ended a request without an answer")
