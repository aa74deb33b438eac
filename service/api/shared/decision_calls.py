"""Runs calls of typed questions about a text, for all dialects of decisions."""

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from fastapi import Request

from polyhead.models.core.decision_prompt import LabelSchemaPrompt

from ...concurrency.time_slices import iterate_in_slices
from ...core.errors import BadRequest, BodyTooLarge, Overloaded, PolyheadError, StepFailed
from ...core.model import Model
from ...core.request import Done, Failed, GeneratedToken, HeadOutput, Task, Terms
from ...decisions.calibration import apply_calibration
from ...decisions.decider_reads import DeciderRead, read_deciders
from ...decisions.encoder_reads import (
    DECISION_TASKS,
    HEAD_READS,
    HeadRead,
    check_read_size,
    count_written_characters,
    read_heads,
)
from ...decisions.encoder_reads import count_orders as count_head_orders
from ...decisions.explained_option import (
    build_decider_subject,
    build_head_encoding,
    build_head_subject,
    build_label_subject,
    check_explained,
)
from ...decisions.generator_reads import LabelRead, check_read_count, read_labels
from ...decisions.generator_reads import count_orders as count_label_orders
from ...decisions.option_orders import count_different
from ...decisions.question import (
    COPIED_CHARACTERS,
    DecisionRequest,
    OptionScores,
    Question,
    average_orders,
    count_reading,
)
from ...explain.explain_request import ExplainSubject
from ...resources.request_memory import BYTES_PER_NUMBER, BYTES_PER_TEXT
from ...text.answer_delta import NO_USAGE, Usage
from ...text.encoder_inputs import EncodedInput, EncoderInput, EncodingRequest
from ...text.encoder_outputs import ScoreOutput, SubmittedAhead, read_events
from ...text.event_source import EventSource
from ...text.tokenization import TokenizerJob
from ..access.authorized_models import AuthorizedModels
from .dialect import (
    EngineRequest,
    read_terms,
    record_model,
    request_context,
    server,
    submitter,
    text_processor,
    turn_taker,
)
from .encoding_calls import INLINE_NUMBERS, STEPS_AHEAD, collect_replies, start_replies
from .explain_calls import ExplainCall, check_explain_enabled, compute_explanation
from .generation_calls import cache_salt

CHARACTER_BYTES = 4  # bytes of a character of a text that is made of a question, at most
QUESTIONS_PER_SLICE = 8  # questions whose scores are computed in one iteration of the event loop
TOKENS_AHEAD = 1 << 15  # tokens of a call's prompts that are submitted ahead; most of them are found in the cache


def find_decision_model(request: Request, models: AuthorizedModels, name: str) -> Model:
    """The model that answers; without a name the only one that can."""
    return record_model(request, models.resolve_or_only(name, DECISION_TASKS))


async def answer_questions(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    """The probabilities of the options of each question, in order, calibrated where the model has a calibration and
    explained where that is asked for.
    """
    check_questions(request, model, decision)
    options = sum(len(question.options) for question in decision.questions)
    size = BYTES_PER_TEXT * len(decision.questions) + BYTES_PER_NUMBER * options
    request_context(request).claim.grow(size, "the answers")
    ask = ASK.get(model.task, ask_heads)
    found = await ask(request, wire, model, decision)
    for question, scores in zip(decision.questions, found, strict=True):
        refused = scores.confidence < decision.min_confidence
        server(request).metrics.record_decision(model.name, question.kind, scores, refused=refused)
        server(request).metrics.record_calibrated(model.name, question.kind, scores.calibration, scores.confidence)
    return found


def answer_numbers(found: Sequence[OptionScores]) -> int:
    """How many numbers are written for the answers: an explanation is long, however few options there are."""
    return sum(len(scores.probabilities) + (INLINE_NUMBERS if scores.explanation else 0) for scores in found)


def check_questions(request: Request, model: Model, decision: DecisionRequest) -> None:
    """Raise the error of what a question or the call asks for and this model or server does not do."""
    if any(question.explain for question in decision.questions):
        check_explain_enabled(request)
    for question in decision.questions:
        check_explained(model, question)
    if decision.is_joint and not isinstance(model.decision_prompt, LabelSchemaPrompt):
        raise BadRequest(f"joint: {model.name} reads each question on its own; leave it out", param="joint")


async def check_batch(request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest) -> None:
    """Raise the error that questions have about every text, before any text is read: a classifier without a label of an
    option's name, a yes or no that asks nothing, too many reads.
    """
    check_questions(request, model, decision)
    if model.task in HEAD_READS:
        record_ignored(request, await write_head_texts(request, model, decision, read_terms(request, wire)))
    elif model.task == "generate":
        check_read_count(decision)


async def build_job(
    request: Request, decision: DecisionRequest, terms: Terms, count_orders: Callable[[Question], int]
) -> TokenizerJob:
    """The call of the tokenizer for the questions, each in `count_orders` orders of its options if it has so many.

    Its cost is that of all texts that are written, of which one is in memory at a time.
    """
    state = len(decision.instructions) + len(decision.state)
    texts, written, longest = 0, state, 0
    async for question in iterate_in_slices(decision.questions, QUESTIONS_PER_SLICE, turn_taker(request)):
        orders = count_different(len(question.options), count_orders(question))
        texts, written = texts + orders, written + count_reading(question, orders, state)
        longest = max(longest, count_reading(question, 1, 0))
    return TokenizerJob(decision.field, state + longest, terms, texts, written)


def settle_scores(model: Model, question: Question, orders: Sequence[OptionScores]) -> OptionScores:
    """The calibrated mean of the scores of a question in several orders of its options."""
    return apply_calibration(model.calibration, question, average_orders(orders))


# Encoders


async def ask_heads(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    reads = await write_head_texts(request, model, decision, read_terms(request, wire))
    record_ignored(request, reads)
    outputs = await compute_heads(request, wire, model, [read.encoding for orders in reads for read in orders])
    found, asked = list[OptionScores](), zip(decision.questions, reads, strict=True)
    async for question, orders in iterate_in_slices(asked, QUESTIONS_PER_SLICE, turn_taker(request)):
        scores = settle_scores(model, question, [read.score_options(*next(outputs)) for read in orders])
        if question.explain is not None:
            explain_call = ExplainCall(request, wire, model, question.explain)
            subject = await encode_option(explain_call, decision, question, orders[0], scores)
            scores = replace(scores, explanation=await compute_explanation(explain_call, subject))
        found.append(scores)
    return found


def record_ignored(request: Request, reads: Sequence[Sequence[HeadRead]]) -> None:
    """Name the fields of the questions that the head does not read in a header of the response."""
    request_context(request).ignored += [field for first, *_ in reads for field in first.ignored]


async def write_head_texts(
    request: Request, model: Model, decision: DecisionRequest, terms: Terms
) -> list[list[HeadRead]]:
    """What the head reads for each question; computed on a thread, since there may be tens of thousands of texts."""
    check_read_size(model, decision)
    size = CHARACTER_BYTES * count_written_characters(model, decision)
    request_context(request).claim.grow(size, "the questions")
    job = await build_job(request, decision, terms, partial(count_head_orders, model))
    job.written += size // (CHARACTER_BYTES * COPIED_CHARACTERS)
    work = partial(read_heads, model, decision, job.check)
    return await text_processor(request).run(model, job, work)


async def compute_heads(
    request: Request, wire: EngineRequest, model: Model, encodings: Sequence[EncodingRequest]
) -> Iterator[tuple[list[list[float]], Usage]]:
    """The values of each input of each of `encodings`, and their usage. Equal inputs with equal labels are computed
    once, and counted where they come first.
    """
    groups: dict[tuple[str, ...], dict[EncoderInput, ScoreOutput | None]] = {}
    for encoding in encodings:
        groups.setdefault(encoding.labels, {}).update(dict.fromkeys(encoding.inputs))
    for labels, known in groups.items():
        first, inputs = encodings[0], tuple(known)
        whole = replace(first, inputs=inputs, labels=labels, names=(first.field,) * len(inputs))
        answers = await collect_replies(await start_replies(request, wire, model, whole), ScoreOutput)
        known.update(zip(inputs, answers, strict=True))
    return read_known(encodings, groups)


def read_known(
    encodings: Sequence[EncodingRequest], groups: Mapping[tuple[str, ...], Mapping[EncoderInput, ScoreOutput | None]]
) -> Iterator[tuple[list[list[float]], Usage]]:
    counted = set[tuple[tuple[str, ...], EncoderInput]]()
    for encoding in encodings:
        values, usage = list[list[float]](), NO_USAGE
        for given in encoding.inputs:
            output = groups[encoding.labels][given]
            assert output is not None, "all inputs are computed"
            values.append(output.values)
            if (encoding.labels, given) not in counted:
                usage += output.usage
                counted.add((encoding.labels, given))
        yield values, usage


async def encode_option(
    explain_call: ExplainCall, decision: DecisionRequest, question: Question, read: HeadRead, scores: OptionScores
) -> ExplainSubject:
    """The input that the score of the chosen option comes from, with positions in the text of the request."""
    request, encoding = explain_call.request, build_head_encoding(read, scores)
    call = f"{explain_call.model.task}-{uuid.uuid4().hex}"
    with request_context(request).time_tokenising():
        found = await text_processor(request).read_inputs(explain_call.model, encoding, call, explain_call.terms)
    [encoded] = [each for each in found if isinstance(each, EncodedInput)]
    return build_head_subject(decision, question, read, scores, encoded)


# Generators


async def ask_generator(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    """All reads of a call are in the engine at once, as far as TOKENS_AHEAD allows: they share steps and the cache."""
    context, terms = request_context(request), read_terms(request, wire)
    with context.time_tokenising():
        reads = await tokenize_questions(request, model, decision, terms)
    requests = [each for orders in reads for read in orders for each in read.requests]
    ahead = min(TOKENS_AHEAD, server(request).settings.max_tokens_in_flight // 2)
    sources = SubmittedAhead(requests, submitter(request, model), ahead, turn_taker(request))
    context.cleanup.callback(sources.close)
    found = [
        settle_scores(model, question, [await score_read(read, sources) for read in orders])
        for question, orders in zip(decision.questions, reads, strict=True)
    ]
    for index, (question, (read, *_)) in enumerate(zip(decision.questions, reads, strict=True)):
        if question.explain is not None:
            explain_call = ExplainCall(request, wire, model, question.explain)
            subject = await place_label(explain_call, decision, read, found[index])
            found[index] = replace(found[index], explanation=await compute_explanation(explain_call, subject))
    return found


async def place_label(
    explain_call: ExplainCall, decision: DecisionRequest, read: LabelRead, scores: OptionScores
) -> ExplainSubject:
    """The prompt with the label of the chosen option, with positions in the text; computed on a thread."""
    characters = len(decision.state) + count_reading(read.question, 1, 0)
    job = TokenizerJob(decision.field, characters, explain_call.terms)
    work = partial(build_label_subject, explain_call.model, decision.state, read, scores)
    with request_context(explain_call.request).time_tokenising():
        return await text_processor(explain_call.request).run(explain_call.model, job, work)


async def tokenize_questions(
    request: Request, model: Model, decision: DecisionRequest, terms: Terms
) -> list[list[LabelRead]]:
    salted = replace(decision, salt=cache_salt(request, decision.salt))
    job = await build_job(request, decision, terms, count_label_orders)
    work = partial(read_labels, model, salted, f"decision-{uuid.uuid4().hex}", terms, claim_reads(request, job))
    return await text_processor(request).run(model, job, work)


def claim_reads(request: Request, job: TokenizerJob) -> Callable[[int], None]:
    """A function that claims bytes for what a model reads of questions. It raises BodyTooLarge or Overloaded, which
    name the field, and what the check of `job` raises.
    """
    memory = request_context(request).claim

    def claim(size: int) -> None:
        job.check()
        try:
            memory.grow(size, "what the model reads of them")
        except (BodyTooLarge, Overloaded) as error:
            message = f"questions: {error.message}; ask fewer, in fewer orders, or of a shorter text"
            raise type(error)(message, param="questions", retry_after=error.retry_after) from None

    return claim


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


# Models made for questions


async def ask_deciders(
    request: Request, wire: EngineRequest, model: Model, decision: DecisionRequest
) -> list[OptionScores]:
    context, terms = request_context(request), read_terms(request, wire)
    job = await build_job(request, decision, terms, attrgetter("permutations"))
    work = partial(read_deciders, model, decision, f"decision-{uuid.uuid4().hex}", terms, claim_reads(request, job))
    with context.time_tokenising():
        reads = await text_processor(request).run(model, job, work)
    ahead = STEPS_AHEAD * server(request).settings.encoder_step_tokens
    requests = (each for read in reads for each in read.requests)
    sources = SubmittedAhead(requests, submitter(request, model), ahead, turn_taker(request))
    context.cleanup.callback(sources.close)
    orders: list[list[OptionScores]] = [[] for _ in decision.questions]
    for read in reads:
        outputs = [await read_head(await sources.next()) for _ in read.requests]
        values, usages = [values for values, _ in outputs], [usage for _, usage in outputs]
        for index, scores in read.score_options(decision.questions, values, usages).items():
            orders[index].append(scores)
    found = [settle_scores(model, question, some) for question, some in zip(decision.questions, orders, strict=True)]
    for index, question in enumerate(decision.questions):
        if question.explain is not None:
            explain_call = ExplainCall(request, wire, model, question.explain)
            subject = await place_option(explain_call, decision, index, reads[0], found[index])
            found[index] = replace(found[index], explanation=await compute_explanation(explain_call, subject))
    return found


async def place_option(
    explain_call: ExplainCall, decision: DecisionRequest, index: int, read: DeciderRead, scores: OptionScores
) -> ExplainSubject:
    """What the score of the chosen option comes from, with positions in the text; computed on a thread. `read` is the
    first one, which has all questions.
    """
    characters = len(decision.state) + count_reading(decision.questions[index], 1, 0)
    job = TokenizerJob(decision.field, characters, explain_call.terms)
    work = partial(build_decider_subject, explain_call.model, decision, index, read, scores)
    with request_context(explain_call.request).time_tokenising():
        return await text_processor(explain_call.request).run(explain_call.model, job, work)


async def read_head(source: EventSource) -> tuple[list[float], Usage]:
    """The output of a head and its usage. Raises the error of its request."""
    found = await read_events(source)
    if isinstance(found, PolyheadError):
        raise found
    [event], usage = found
    assert isinstance(event, HeadOutput), "a score for each option"
    return event.values, usage


ASK: Mapping[Task, Callable[[Request, EngineRequest, Model, DecisionRequest], Awaitable[list[OptionScores]]]] = {
    "generate": ask_generator,
    "decide": ask_deciders,
}
