"""What the OpenAI dialect is asked: its wire objects, and the pure `read` of each.

Knows no engine and no answer.  The one idea: a field of the real API is done, or harmless, or refused by name at any
value that asks for something (the tables below); nothing that would change the answer is accepted and ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from service.api.dialect import Count, TextsOrIds, TokenId, Wire, Work, at_most, between, several
from service.api.options import INT64, Stops
from service.errors import BadRequest
from service.inputs import Reading
from service.prompts import Chat, Continuation, Prompt
from service.request import Sampling

MOST_MESSAGES, MOST_PARTS = 4096, 256

# fields of the real API that this server does not do -> the values at which they ask for nothing
NOT_FOR_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
}
NOT_FOR_CHAT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
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


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: bool = False  # harmless: there is nothing to hide the length of tokens from


class Sampled(Work):
    """What completions and chat have in common."""

    model: str
    max_tokens: Count = 0
    temperature: Annotated[float, between(0, 2)] = 1.0
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_k: Annotated[int, between(-1, (1 << 31) - 1)] = 0
    min_p: Annotated[float, between(0, 1)] = 0.0
    seed: Annotated[int, between(-INT64, INT64 - 1)] = 0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # harmless: nothing of the answer depends on them
    user: str = ""
    metadata: Annotated[dict[str, str], at_most(16)] = Field(default_factory=dict)
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""


class CompletionRequest(Sampled):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_FOR_COMPLETIONS

    prompt: TextsOrIds
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
    return continuation(wire, "prompt", several(wire.prompt), wire.max_tokens, wire.logprobs)


def read_chat(wire: ChatRequest) -> Continuation:
    if wire.top_logprobs and not wire.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs: true", param="top_logprobs")
    limits = {wire.max_tokens, wire.max_completion_tokens} - {0}
    if len(limits) > 1:
        message = "max_tokens: is the older name of max_completion_tokens; the two differ, give one"
        raise BadRequest(message, param="max_tokens")
    chat = Chat(tuple(spoken(message) for message in wire.messages))
    return continuation(wire, "messages", (chat,), max(limits, default=0), wire.top_logprobs if wire.logprobs else -1)


def continuation(
    wire: Sampled, field: str, prompts: tuple[Prompt, ...], max_tokens: int, logprobs: int
) -> Continuation:
    if "stream_options" in wire.model_fields_set and not wire.stream:
        raise BadRequest("stream_options: only together with stream: true", param="stream_options")
    return Continuation(
        field=field,
        prompts=prompts,
        sampling=Sampling(
            temperature=wire.temperature,
            top_k=max(wire.top_k, 0),
            top_p=wire.top_p,
            min_p=wire.min_p,
            seed=wire.seed % INT64,
        ),
        seeded="seed" in wire.model_fields_set,
        max_tokens=max_tokens,
        stops=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop),
        stop_tokens=frozenset(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        logprobs=logprobs,
    )


def spoken(message: Message) -> dict[str, str]:
    """As templates know messages; they know developers as the system."""
    role = "system" if message.role == "developer" else message.role
    said = {"role": role, "content": "\n".join(part.text for part in message.content)}
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return said | {key: value for key, value in named.items() if value}


def read_embedding(wire: EmbeddingRequest) -> Reading:
    return Reading(field="input", inputs=several(wire.input), dimensions=wire.dimensions)
