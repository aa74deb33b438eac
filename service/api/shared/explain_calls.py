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
from ...core.request import Explained, Failed, Generate, Sampling, Terms, Token
from ...explain import explain_response as explanation
from ...explain.explain_request import (
    Subject,
    Why,
    check_room,
    check_target,
    compared,
    reading_of,
    request_of,
    subject_of,
    told_of,
    written_subject,
)
from ...explain.explain_response import check_length
from ...text.detokenizer import EventSource, Submit
from ...text.inputs import Read
from ...text.pipelines import replies
from ...text.prompts import Chat, Continuation, Prompt
from ...text.tokenization import Job, length
from .dialect import Wire, Work, at_most, between, described, server, submitter, terms, visit
from .explain_options import Explaining

MOST_WRITTEN = 256  # tokens that are explained
MOST_MESSAGES = 1024
OFF = "this server explains no answers: its setting explain is off"


class Said(Wire):
    """A message for the checkpoint's template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(min_length=1)]


Messages = Annotated[list[Said], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]


class ExplainRequest(Work, Explaining):
    """`input` is what is read: a text, two of them, or messages."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=2, max_length=2)] | Messages,
        described("a text, a list of two texts or a list of messages"),
    ]
    max_tokens: Annotated[int, between(1, MOST_WRITTEN)] = 16


Given = str | tuple[str, str] | Chat


def spoken(message: Said) -> dict[str, str]:
    """As templates know it; they know developers as the system."""
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def given_of(wire: ExplainRequest, model: Model) -> Given:
    """Raises BadRequest where such a model does not read what came."""
    if isinstance(wire.input, str):
        return wire.input
    texts = [each for each in wire.input if isinstance(each, str)]
    if model.task == "generate" and not texts:
        return Chat(tuple(spoken(each) for each in wire.input if not isinstance(each, str)))
    if model.task == "generate" or not texts:
        reads = "a text or messages" if model.task == "generate" else "a text or two"
        raise BadRequest(f"input: {model.name} reads {reads}", param="input")
    return texts[0], texts[1]


@dataclass(frozen=True)
class Question:
    """Why `model` answers so, in whose request, and on the terms of which call."""

    request: Request
    wire: Work
    model: Model
    why: Why

    @property
    def terms(self) -> Terms:
        return terms(self.request, self.wire)

    @property
    def submit(self) -> Submit:
        return submitter(self.request, self.model)


async def explained(asked: Question, given: Given) -> dict[str, Any]:
    """What is said of why `given` is answered as it is."""
    check_target(asked.model, asked.why)
    if isinstance(given, tuple) or (isinstance(given, str) and asked.model.task != "generate"):
        return await looked_into(asked, await answered(asked, given))
    return await looked_into(asked, await continued(asked, given))


async def explained_writing(asked: Question, prompt: Prompt, tokens: Sequence[int]) -> dict[str, Any]:
    """The same of tokens that were written already."""
    check_target(asked.model, asked.why)
    first = await prompted(asked, prompt, max(len(tokens), 1))
    return await looked_into(asked, await written(asked, prompt, first, tokens))


def check_on(request: Request) -> None:
    """Raises BadRequest for the option `explain` of a server that explains no answers."""
    if not server(request).settings.explain:
        raise BadRequest(f"explain: {OFF}", param="explain")


async def looked_into(asked: Question, subject: Subject) -> dict[str, Any]:
    call, model, why = f"explain-{uuid.uuid4().hex}", asked.model, asked.why
    layout = await server(asked.request).watch(model)  # nothing is awaited between this and the submission
    explanation.check_size(why, subject, layout, server(asked.request).settings)
    visit(asked.request).claim.grow(explanation.memory_of(why, subject, layout), "the answer")
    [source] = asked.submit([request_of(model, why, subject, call, asked.terms)])
    return explanation.written(call, model, why, subject, await outcome(source))


async def outcome(source: EventSource) -> Explained:
    """Raises why there is none."""
    try:
        async for event in source:
            match event:
                case Explained():
                    return event
                case Failed():
                    raise event.error
    finally:
        source.close(answered=True)
    raise StepFailed("the engine ended a request without an answer")


# What is answered


async def answered(asked: Question, given: str | tuple[str, str]) -> Subject:
    """The text, and what a head says of it, which is only asked where it is to be explained."""
    model, why = asked.model, asked.why
    reading, call = reading_of(model, given, why), f"{model.task}-{uuid.uuid4().hex}"
    with visit(asked.request).tokenising():
        found = await server(asked.request).text.inputs(model, reading, call, asked.terms)
    reads = [each for each in found if isinstance(each, Read)]
    subject = subject_of(reads)
    if model.task == "embed":
        return replace(subject, told=compared(why) if why.attributes else ())
    if not why.needs_target:
        return subject
    check_length(len(subject.shown), server(asked.request).settings)  # before it is answered
    async with aclosing(replies(model, reading, reads[:1], asked.submit, len(subject.tokens))) as said:
        reply = await anext(said)
    assert not isinstance(reply, PolyheadError), "one text alone raises"
    return replace(subject, told=(told_of(model, why, reads[0], reply),))


async def continued(asked: Question, prompt: Prompt) -> Subject:
    """A prompt, and what the target says after it, or what is likeliest."""
    model, target = asked.model, asked.why.target.text
    first = await prompted(asked, prompt, asked.why.max_tokens)
    if target is None:
        return await written(asked, prompt, first, await drawn(asked.submit([first])[0]))
    here = visit(asked.request)
    with here.tokenising():
        [said] = await server(asked.request).text.tokens(model, [target], special=False, terms=here.terms)
    check_room(model, len(first.tokens), len(said))
    return await written(asked, prompt, first, said.ids)


async def written(asked: Question, prompt: Prompt, first: Generate, tokens: Sequence[int]) -> Subject:
    """A prompt and the tokens after it, with their places in the caller's texts: found on a thread for texts."""
    job = Job("input", length(prompt) + len(tokens), asked.terms)
    with visit(asked.request).tokenising():
        text = server(asked.request).text
        return await text.run(asked.model, job, lambda: written_subject(asked.model, prompt, first, tokens))


async def prompted(asked: Question, prompt: Prompt, most: int) -> Generate:
    """A prompt as the model has it, with as many of `most` tokens behind it as there is room for."""
    greedy = Sampling(temperature=0.0)
    reading = Continuation(field="input", prompts=(prompt,), sampling=greedy, max_tokens=most, within=True)
    here = server(asked.request)
    with visit(asked.request).tokenising():
        [first] = await here.text.prompts(asked.model, reading, f"generate-{uuid.uuid4().hex}", asked.terms)
    check_length(first.prompt_tokens, here.settings)
    return first


async def drawn(source: EventSource) -> list[int]:
    """The tokens that are written."""
    tokens = list[int]()
    try:
        async for event in source:
            match event:
                case Token(id=id):
                    tokens.append(id)
                case Failed():
                    raise event.error
    finally:
        source.close(answered=True)
    return tokens
