"""The messages of OpenAI's chat, and their conversion to the messages of chat templates."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ....core.errors import BadRequest
from ...shared.dialect import Position, Wire, max_items
from ...shared.json_body import check_arguments, read_arguments
from ...shared.tagged_unions import read_type
from ...shared.tool_options import CalledName

MAX_MESSAGES, MAX_PARTS, MAX_CALLS = 4096, 256, 128

UNSUPPORTED_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}


class ChatCacheBreakpoint(Wire):
    """No effect: every prefix that comes again is found in the cache."""

    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m", "12h"] = "30m"


class TextPart(Wire):
    """Text.  Images, audio and files are rejected by the name of their type."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""
    prompt_cache_breakpoint: ChatCacheBreakpoint = ChatCacheBreakpoint()

    @model_validator(mode="before")
    @classmethod
    def check_text(cls, value: Any) -> Any:
        kind = read_type(value)
        if kind and kind not in ("text", "refusal"):
            raise PydanticCustomError("unsupported", "is not supported", {"field": "type", "value": kind})
        if not kind or not isinstance(value.get(kind), str):
            raise PydanticCustomError("described", "must be {sentence}", {"sentence": "an object with a type and text"})
        return value


def as_parts(content: Any) -> Any:
    """A string stands for one text part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": "a string or a list of text parts"})


TextParts = Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(as_parts), max_items(MAX_PARTS)]


class CalledFunction(Wire):
    name: CalledName
    arguments: str | dict[str, Any] = ""


class ChatToolCall(Wire):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Position = 0  # ignored: chunks of a stream have it, and some clients send it back


class ChatMessage(Wire):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextParts = Field(default_factory=list)
    name: str = ""
    tool_call_id: str = ""
    tool_calls: Annotated[list[ChatToolCall], Field(fail_fast=True), max_items(MAX_CALLS)] = Field(default_factory=list)
    refusal: str = ""
    reasoning_content: str = ""
    reasoning: str = ""


ChatMessageList = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), max_items(MAX_MESSAGES)]
ASSISTANT_FIELDS = ("tool_calls", "refusal", "reasoning_content", "reasoning")


def check_call_arguments(messages: Sequence[ChatMessage]) -> None:
    """Raises BadRequest if the arguments of the tool calls have too many values."""
    check_arguments(
        (call.function.arguments, f"messages[{index}].tool_calls[{number}].function.arguments")
        for index, message in enumerate(messages)
        for number, call in enumerate(message.tool_calls)
        if isinstance(call.function.arguments, str)
    )


def template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    """A message for the chat template.  `place` is its path in the body.  The role "developer" becomes "system"."""
    check_message(message, place)
    role = "system" if message.role == "developer" else message.role
    texts = [part.text or part.refusal for part in message.content] or [message.refusal]
    calls = [template_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)]
    optional_fields = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {"role": role, "content": "\n".join(texts)} | {key: value for key, value in optional_fields.items() if value}


def check_message(message: ChatMessage, place: str) -> None:
    given = message.model_fields_set
    if message.role != "assistant":
        field = next((f"{place}.{name}" for name in ASSISTANT_FIELDS if getattr(message, name)), "")
        if field:
            raise BadRequest(f"{field}: only in messages of the assistant", param=field)
    if "content" not in given and not (message.tool_calls or message.refusal):
        raise BadRequest(f"{place}.content: is required", param=f"{place}.content")


def template_call(call: ChatToolCall, place: str) -> dict[str, Any]:
    """A tool call for the chat template, with its arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, f"{place}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def check_continuable(messages: Sequence[ChatMessage]) -> None:
    """Raises BadRequest unless the last message can be continued."""
    if messages[-1].role != "assistant" or messages[-1].tool_calls:
        problem = "only where the last message is text of the assistant"
        raise BadRequest(f"continue_final_message: {problem}", param="continue_final_message")
