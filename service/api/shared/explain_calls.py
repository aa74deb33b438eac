"""Computes explanations of answers, for all dialects.

An explanation is a second engine request about the same text; its JSON object is the same in every dialect.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from ...core.errors import AnswerTooLarge, BadRequest, PolyheadError, StepFailed
from ...core.model import Model
from ...core.request import (
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Generate,
    GeneratedToken,
    Sampling,
    Terms,
)
from ...explain import explain_response
from ...explain.explain_request import (
    ExplainParameters,
    ExplainSubject,
    build_encoding_call,
    build_explain_request,
    build_generated_subject,
    build_subject,
    check_context,
    check_target,
    choose_goal,
    choose_method,
    similarity_goals,
)
from ...explain.explain_response import check_token_count
from ...text.encoder_inputs import EncodedInput
from ...text.encoder_outputs import stream_outputs, submit_inputs
from ...text.event_source import EventSource, Submit
from ...text.generation_request import ChatMessages, GenerationRequest, Prompt
from ...text.tokenization import TokenizerJob, text_length
from .dialect import (
    EngineRequest,
    Wire,
    answer_threads,
    between,
    max_items,
    must_be,
    output_job,
    read_terms,
    request_context,
    server,
    submitter,
    text_processor,
)
from .explain_options import ExplainFields

MAX_EXPLAINED_TOKENS = 256  # generated tokens that are explained
MAX_EXPLAIN_MESSAGES = 1024
EXPLAIN_OFF = "this server explains no answers: its setting explain is off"


class ExplainMessage(Wire):
    """A message for the checkpoint's chat template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(min_length=1)]


ExplainMessages = Annotated[list[ExplainMessage], Field(min_length=1, fail_fast=True), max_items(MAX_EXPLAIN_MESSAGES)]


class ExplainRequest(EngineRequest, ExplainFields):
    """The body of /v1/explain.  `input` is a text, two texts, or messages."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=2, max_length=2)] | ExplainMessages,
        must_be("a text, a list of two texts or a list of messages"),
    ]
    max_tokens: Annotated[int, between(1, MAX_EXPLAINED_TOKENS)] = 16


ExplainInput = str | tuple[str, str] | ChatMessages


def convert_message(message: ExplainMessage) -> dict[str, str]:
    """A message for the chat template; templates have no role "developer", it becomes "system"."""
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def read_explain_input(wire: ExplainRequest, model: Model) -> ExplainInput:
    """The input.  Raises BadRequest if the model's task does not read this kind of input."""
    if isinstance(wire.input, str):
        if model.task == "span":
            message = f"input: {model.name} answers questions; give a list of two texts, the question and its context"
            raise BadRequest(message, param="input")
        return wire.input
    texts = [each for each in wire.input if isinstance(each, str)]
    if model.task == "generate" and not texts:
        return ChatMessages(tuple(convert_message(each) for each in wire.input if not isinstance(each, str)))
    if model.task == "generate" or not texts:
        reads = "a text or messages" if model.task == "generate" else "a text or two"
        raise BadRequest(f"input: {model.name} reads {reads}", param="input")
    return texts[0], texts[1]


@dataclass(frozen=True)
class ExplainCall:
    """A request to explain an answer of `model`: the HTTP request, its wire object, and the options of the client."""

    request: Request
    wire: EngineRequest
    model: Model
    asked: ExplainParameters

    @property
    def options(self) -> ExplainParameters:
        """The options with a method, whether or not the client gave one."""
        return choose_method(self.model, self.asked)

    @property
    def terms(self) -> Terms:
        return read_terms(self.request, self.wire)

    @property
    def submit(self) -> Submit:
        return submitter(self.request, self.model)


async def read_subject(explain_call: ExplainCall, given: ExplainInput) -> ExplainSubject:
    """What is explained: `given`, with the model's answer to it."""
    check_target(explain_call.model, explain_call.options)
    if isinstance(given, tuple) or (isinstance(given, str) and explain_call.model.task != "generate"):
        return await encode_subject(explain_call, given)
    return await generate_subject(explain_call, given)


async def explain_completion(explain_call: ExplainCall, prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    """The explanation of `tokens` that were already generated after `prompt`."""
    check_target(explain_call.model, explain_call.options)
    first = await build_generate(explain_call, prompt, max(len(tokens), 1))
    return await compute_explanation(explain_call, await place_tokens(explain_call, prompt, first, tokens))


def check_explain_enabled(request: Request) -> None:
    """Raises BadRequest for the option `explain` if the server's setting explain is off."""
    if not server(request).settings.explain:
        raise BadRequest(f"explain: {EXPLAIN_OFF}", param="explain")


async def compute_explanation(explain_call: ExplainCall, subject: ExplainSubject) -> dict[str, Any]:
    """The JSON object of an explanation.  Weights are chosen and encoded while it is written, so it is to be written on
    a thread.
    """
    async with aclosing(follow_explanation(explain_call, subject)) as items:
        async for item in items:
            if isinstance(item, dict):
                return item
    raise StepFailed("the engine ended a request without an answer")


async def follow_explanation(
    explain_call: ExplainCall, subject: ExplainSubject
) -> AsyncGenerator[ExplanationProgress | dict[str, Any], None]:
    """How much of the work is done, if the options ask for it, and then what `compute_explanation` returns.

    Where no method was asked for and integrated gradients take too much work, it is gradients times input.
    """
    options = explain_call.options
    try:
        async with aclosing(follow_method(explain_call, options, subject)) as items:
            async for item in items:
                yield item
            return
    except AnswerTooLarge:
        if not explain_call.asked.suits_model or options.method != "integrated_gradients":
            raise
    async with aclosing(follow_method(explain_call, replace(options, method="gradient_x_input"), subject)) as items:
        async for item in items:
            yield item


async def follow_method(
    explain_call: ExplainCall, options: ExplainParameters, subject: ExplainSubject
) -> AsyncGenerator[ExplanationProgress | dict[str, Any], None]:
    request_id, model = f"explain-{uuid.uuid4().hex}", explain_call.model
    context = request_context(explain_call.request)
    loading = server(explain_call.request).load_explainer(model)
    layout = await context.wait(loading)  # no await between this and the submission
    explain_response.check_size(options, subject, layout, server(explain_call.request).settings)
    size = explain_response.memory_of(options, subject, layout)
    context.claim.grow(size, "the answer")
    [source] = explain_call.submit([build_explain_request(model, options, subject, request_id, explain_call.terms)])
    threads = answer_threads(explain_call.request)
    async with aclosing(read_explanation(source)) as events:
        async for event in events:
            match event:
                case ExplanationResult():
                    write = partial(explain_response.explanation_object, request_id, model, options, subject, event)
                    yield await threads.run(size, write)
                case progress:
                    yield progress


async def read_explanation(source: EventSource) -> AsyncGenerator[ExplanationProgress | ExplanationResult, None]:
    """The engine's events.  Raises its error.  Closing the generator ends the computation."""
    has_result = False
    try:
        async for event in source:
            match event:
                case ExplanationProgress() | ExplanationResult():
                    has_result = isinstance(event, ExplanationResult)
                    yield event
                case Failed():
                    raise event.error
    finally:
        source.close(answered=has_result)


# The subject of an explanation


async def encode_subject(explain_call: ExplainCall, given: str | tuple[str, str]) -> ExplainSubject:
    """The input text, with the head's answer where the explanation depends on it."""
    model, options = explain_call.model, explain_call.options
    encoding, request_id = build_encoding_call(model, given, options), f"{model.task}-{uuid.uuid4().hex}"
    with request_context(explain_call.request).time_tokenising():
        found = await text_processor(explain_call.request).read_inputs(model, encoding, request_id, explain_call.terms)
    encoded = [each for each in found if isinstance(each, EncodedInput)]
    subject = build_subject(encoded)
    if model.task == "embed":
        return replace(subject, goals=similarity_goals(options) if options.is_attribution else ())
    if not options.needs_target:
        return subject
    check_token_count(len(subject.shown_tokens), server(explain_call.request).settings)  # before the answer is computed
    sources = submit_inputs(encoded[:1], explain_call.submit, len(subject.tokens))
    job = output_job(explain_call.request, model, explain_call.terms)
    async with aclosing(stream_outputs(model, encoding, encoded[:1], sources, job)) as answers:
        reply = await anext(answers)
    assert not isinstance(reply, PolyheadError), "one text alone raises"
    return replace(subject, goals=(choose_goal(model, options, encoded[0], reply),))


async def generate_subject(explain_call: ExplainCall, prompt: Prompt) -> ExplainSubject:
    """A prompt with the target text after it, or with the most likely continuation."""
    model, target = explain_call.model, explain_call.options.target.text
    first = await build_generate(explain_call, prompt, explain_call.options.max_tokens)
    if target is None:
        return await place_tokens(explain_call, prompt, first, await collect_tokens(explain_call.submit([first])[0]))
    context = request_context(explain_call.request)
    with context.time_tokenising():
        [encoded] = await text_processor(explain_call.request).tokenize(
            model, [target], special=False, terms=context.terms
        )
    check_context(model, len(first.tokens), len(encoded))
    return await place_tokens(explain_call, prompt, first, encoded.ids)


async def place_tokens(
    explain_call: ExplainCall, prompt: Prompt, first: Generate, tokens: Sequence[int]
) -> ExplainSubject:
    """A prompt with `tokens` after it, and the position of each token in the texts; computed on a thread."""
    job = TokenizerJob("input", text_length(prompt) + len(tokens), explain_call.terms)
    with request_context(explain_call.request).time_tokenising():
        text = text_processor(explain_call.request)
        return await text.run(
            explain_call.model, job, lambda: build_generated_subject(explain_call.model, prompt, first, tokens)
        )


async def build_generate(explain_call: ExplainCall, prompt: Prompt, max_tokens: int) -> Generate:
    """The generation request for a prompt, with at most `max_tokens` new tokens as far as there is room."""
    greedy = Sampling(temperature=0.0)
    generation = GenerationRequest(
        field="input", prompts=(prompt,), sampling=greedy, max_tokens=max_tokens, fits_context=True
    )
    state = server(explain_call.request)
    with request_context(explain_call.request).time_tokenising():
        [first] = await text_processor(explain_call.request).read_prompts(
            explain_call.model, generation, f"generate-{uuid.uuid4().hex}", explain_call.terms
        )
    check_token_count(first.prompt_tokens, state.settings)
    return first


async def collect_tokens(source: EventSource) -> list[int]:
    """The generated token ids."""
    tokens = list[int]()
    try:
        async for event in source:
            match event:
                case GeneratedToken(id=id):
                    tokens.append(id)
                case Failed():
                    raise event.error
    finally:
        source.close()
    return tokens
