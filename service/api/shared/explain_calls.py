"""Answers explained, for every dialect that does so: from what is answered to what is said of it.

Knows no dialect's words.  The one idea: an explanation is a second question about the same text, whose answer is the
same object wherever it is asked.
"""

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from ...core.errors import BadRequest, PolyheadError, StepFailed
from ...core.model import Model
from ...core.request import ExplanationResult, Failed, Generate, GeneratedToken, Sampling, Terms
from ...explain import explain_response as explanation
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
    similarity_goals,
)
from ...explain.explain_response import check_token_count
from ...text.detokenizer import EventSource, Submit
from ...text.encoder_inputs import EncodedInput
from ...text.encoder_outputs import stream_outputs
from ...text.prompts import ChatMessages, GenerationRequest, Prompt
from ...text.tokenization import TokenizerJob, text_length
from .dialect import EngineRequest, Wire, between, max_items, must_be, read_terms, request_context, server, submitter
from .explain_options import ExplainFields

MAX_EXPLAINED_TOKENS = 256  # tokens that are explained
MAX_EXPLAIN_MESSAGES = 1024
EXPLAIN_OFF = "this server explains no answers: its setting explain is off"


class ExplainMessage(Wire):
    """A message for the checkpoint's template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(min_length=1)]


ExplainMessages = Annotated[list[ExplainMessage], Field(min_length=1, fail_fast=True), max_items(MAX_EXPLAIN_MESSAGES)]


class ExplainRequest(EngineRequest, ExplainFields):
    """`input` is what is read: a text, two of them, or messages."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=2, max_length=2)] | ExplainMessages,
        must_be("a text, a list of two texts or a list of messages"),
    ]
    max_tokens: Annotated[int, between(1, MAX_EXPLAINED_TOKENS)] = 16


ExplainInput = str | tuple[str, str] | ChatMessages


def convert_message(message: ExplainMessage) -> dict[str, str]:
    """As templates know it; they know developers as the system."""
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def read_explain_input(wire: ExplainRequest, model: Model) -> ExplainInput:
    """Raises BadRequest where such a model does not read what came."""
    if isinstance(wire.input, str):
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
    """Why `model` answers so, in whose request, and on the terms of which call."""

    request: Request
    wire: EngineRequest
    model: Model
    why: ExplainParameters

    @property
    def terms(self) -> Terms:
        return read_terms(self.request, self.wire)

    @property
    def submit(self) -> Submit:
        return submitter(self.request, self.model)


async def explain_input(asked: ExplainCall, given: ExplainInput) -> dict[str, Any]:
    """What is said of why `given` is answered as it is."""
    check_target(asked.model, asked.why)
    if isinstance(given, tuple) or (isinstance(given, str) and asked.model.task != "generate"):
        return await compute_explanation(asked, await encode_subject(asked, given))
    return await compute_explanation(asked, await generate_subject(asked, given))


async def explain_completion(asked: ExplainCall, prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    """The same of tokens that were written already."""
    check_target(asked.model, asked.why)
    first = await build_generate(asked, prompt, max(len(tokens), 1))
    return await compute_explanation(asked, await written(asked, prompt, first, tokens))


def check_explain_enabled(request: Request) -> None:
    """Raises BadRequest for the option `explain` of a server that explains no answers."""
    if not server(request).settings.explain:
        raise BadRequest(f"explain: {EXPLAIN_OFF}", param="explain")


async def compute_explanation(asked: ExplainCall, subject: ExplainSubject) -> dict[str, Any]:
    call, model, why = f"explain-{uuid.uuid4().hex}", asked.model, asked.why
    layout = await server(asked.request).load_explainer(model)  # nothing is awaited between this and the submission
    explanation.check_size(why, subject, layout, server(asked.request).settings)
    request_context(asked.request).claim.grow(explanation.memory_of(why, subject, layout), "the answer")
    [source] = asked.submit([build_explain_request(model, why, subject, call, asked.terms)])
    return explanation.explanation_object(call, model, why, subject, await wait_explained(source))


async def wait_explained(source: EventSource) -> ExplanationResult:
    """Raises why there is none."""
    try:
        async for event in source:
            match event:
                case ExplanationResult():
                    return event
                case Failed():
                    raise event.error
    finally:
        source.close(answered=True)
    raise StepFailed("the engine ended a request without an answer")


# What is answered


async def encode_subject(asked: ExplainCall, given: str | tuple[str, str]) -> ExplainSubject:
    """The text, and what a head says of it, which is only asked where it is to be explained."""
    model, why = asked.model, asked.why
    reading, call = build_encoding_call(model, given, why), f"{model.task}-{uuid.uuid4().hex}"
    with request_context(asked.request).time_tokenising():
        found = await server(asked.request).text.read_inputs(model, reading, call, asked.terms)
    reads = [each for each in found if isinstance(each, EncodedInput)]
    subject = build_subject(reads)
    if model.task == "embed":
        return replace(subject, goals=similarity_goals(why) if why.is_attribution else ())
    if not why.needs_target:
        return subject
    check_token_count(len(subject.shown_tokens), server(asked.request).settings)  # before it is answered
    async with aclosing(stream_outputs(model, reading, reads[:1], asked.submit, len(subject.tokens))) as said:
        reply = await anext(said)
    assert not isinstance(reply, PolyheadError), "one text alone raises"
    return replace(subject, goals=(choose_goal(model, why, reads[0], reply),))


async def generate_subject(asked: ExplainCall, prompt: Prompt) -> ExplainSubject:
    """A prompt, and what the target says after it, or what is likeliest."""
    model, target = asked.model, asked.why.target.text
    first = await build_generate(asked, prompt, asked.why.max_tokens)
    if target is None:
        return await written(asked, prompt, first, await collect_tokens(asked.submit([first])[0]))
    here = request_context(asked.request)
    with here.time_tokenising():
        [said] = await server(asked.request).text.tokenize(model, [target], special=False, terms=here.terms)
    check_context(model, len(first.tokens), len(said))
    return await written(asked, prompt, first, said.ids)


async def written(asked: ExplainCall, prompt: Prompt, first: Generate, tokens: Sequence[int]) -> ExplainSubject:
    """A prompt and the tokens after it, with their places in the caller's texts: found on a thread for texts."""
    job = TokenizerJob("input", text_length(prompt) + len(tokens), asked.terms)
    with request_context(asked.request).time_tokenising():
        text = server(asked.request).text
        return await text.run(asked.model, job, lambda: build_generated_subject(asked.model, prompt, first, tokens))


async def build_generate(asked: ExplainCall, prompt: Prompt, most: int) -> Generate:
    """A prompt as the model has it, with as many of `most` tokens behind it as there is room for."""
    greedy = Sampling(temperature=0.0)
    reading = GenerationRequest(field="input", prompts=(prompt,), sampling=greedy, max_tokens=most, fits_context=True)
    here = server(asked.request)
    with request_context(asked.request).time_tokenising():
        [first] = await here.text.read_prompts(asked.model, reading, f"generate-{uuid.uuid4().hex}", asked.terms)
    check_token_count(first.prompt_tokens, here.settings)
    return first


async def collect_tokens(source: EventSource) -> list[int]:
    """The tokens that are written."""
    tokens = list[int]()
    try:
        async for event in source:
            match event:
                case GeneratedToken(id=id):
                    tokens.append(id)
                case Failed():
                    raise event.error
    finally:
        source.close(answered=True)
    return tokens
