"""What the OpenAI dialect is asked: its wire objects, and the pure `read` of each.

Knows no engine and no answer.  The one idea: a field of the real API is done, or harmless, or refused by name at any
value that asks for something (the tables below); nothing that would change the answer is accepted and ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.api.dialect import Count, TextsOrIds, Wire, Work, at_most, between, several
from service.api.openai_sampling import Sampled, continuation
from service.errors import BadRequest
from service.inputs import Reading
from service.prompts import Chat, Continuation

MOST_MESSAGES, MOST_PARTS = 4096, 256

# fields of the real API that this server does not do -> the values at which they ask for nothing
NOT_FOR_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
}
NOT_FOR_CHAT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NOT_FOR_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
}


class CompletionRequest(Sampled):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_FOR_COMPLETIONS

    prompt: TextsOrIds
    echo: bool = False
    max_tokens: Annotated[int, between(0, (1 << 31) - 1)] = -1  # 0, which is the prompt alone, only with echo
    logprobs: Annotated[int, between(0, 20)] = -1


class TextPart(Wire):
    type: Literal["text"]
    text: str


def parts(content: Any) -> Any:
    """A string is short for one part of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of text parts"})


class Message(Wire):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_FOR_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(parts), at_most(MOST_PARTS)]
    name: str = ""
    tool_call_id: str = ""


class ChatRequest(Sampled):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_FOR_CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MOST_MESSAGES)]
    max_completion_tokens: Count = 0
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, 20)] = 0
    parallel_tool_calls: bool = False  # harmless: there are no tools


class EmbeddingRequest(Work):
    model: str
    input: TextsOrIds
    dimensions: Count = 0
    encoding_format: Literal["float", "base64"] = "float"
    user: str = ""


# What is asked


def read_completion(wire: CompletionRequest) -> Continuation:
    if not wire.max_tokens and not wire.echo:
        raise BadRequest("max_tokens: must be at least 1, or 0 together with echo: true, got 0", param="max_tokens")
    asked = continuation(wire, "prompt", several(wire.prompt), max(wire.max_tokens, 0), wire.logprobs)
    scores = wire.logprobs if wire.echo and wire.prompt_logprobs < 0 else wire.prompt_logprobs
    return replace(asked, scoring=not wire.max_tokens, prompt_logprobs=scores)


def read_chat(wire: ChatRequest) -> Continuation:
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs: true", param="top_logprobs")
    limits = {wire.max_tokens, wire.max_completion_tokens} - {0}
    if len(limits) > 1:
        message = "max_tokens: is the older name of max_completion_tokens; the two differ, give one"
        raise BadRequest(message, param="max_tokens")
    chat = Chat(tuple(spoken(message) for message in wire.messages))
    return continuation(wire, "messages", (chat,), max(limits, default=0), wire.top_logprobs if wire.logprobs else -1)


def spoken(message: Message) -> dict[str, str]:
    """As templates know messages; they know developers as the system."""
    role = "system" if message.role == "developer" else message.role
    said = {"role": role, "content": "\n".join(part.text for part in message.content)}
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return said | {key: value for key, value in named.items() if value}


def read_embedding(wire: EmbeddingRequest) -> Reading:
    return Reading(field="input", inputs=several(wire.input), dimensions=wire.dimensions)
