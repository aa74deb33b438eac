"""Converts the items of OpenAI's responses API to the messages of chat templates.

Consecutive reasoning, text and tool calls of the assistant become one message.
"""

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any, Literal

from ....core.errors import BadRequest
from ....core.model import Model
from ....core.request import Sampling
from ....text.chat_prompt import check_tool_size
from ....text.generation_request import ChatMessages, GenerationRequest, ReasoningSettings, ToolOptions
from ....text.prompts import apply_suggestions
from ...shared.dialect import Wire
from ...shared.json_body import check_arguments, read_arguments
from ...shared.open_options import open_options
from ...shared.response_formats import convert_format
from ...shared.tool_options import EFFORT_BUDGETS, check_tools, read_function
from .wire import (
    LOGPROBS,
    MAX_ITEMS,
    AllowedTools,
    ChosenTool,
    ContentPart,
    FunctionCall,
    FunctionOutput,
    InputItem,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    ToolMode,
)

ChoiceMode = Literal["none", "auto", "required"]


def read_response(wire: ResponseRequest, earlier: Sequence[InputItem] = ()) -> GenerationRequest:
    """`earlier` are the items of the conversation that the request continues."""
    with_logprobs = LOGPROBS in wire.include
    if wire.top_logprobs and not with_logprobs:
        raise BadRequest(f'top_logprobs: only together with include: ["{LOGPROBS}"]', param="top_logprobs")
    if "stream_options" in wire.model_fields_set and not wire.stream:
        raise BadRequest("stream_options: only together with stream: true", param="stream_options")
    return GenerationRequest(
        field="input",
        prompts=(ChatMessages(tuple(template_messages(wire, earlier))),),
        sampling=read_response_sampling(wire),
        open_options=open_options(wire),
        max_tokens=wire.max_output_tokens,
        limit_field="max_output_tokens",
        logprobs=wire.top_logprobs if with_logprobs else -1,
        grammar=convert_format(wire.text.format, "text.format"),
        tools=read_response_tools(wire),
        reasoning=read_effort(wire),
        drops_oldest=wire.truncation == "auto",
    )


def read_response_sampling(wire: ResponseRequest) -> Sampling:
    return Sampling(temperature=wire.temperature, top_p=wire.top_p)


def read_response_tools(wire: ResponseRequest) -> ToolOptions:
    check_tool_size([each.parameters for each in wire.tools], "tools")
    tools = (read_function(each, f"tools[{index}]") for index, each in enumerate(wire.tools))
    choice, only, field = read_tool_choice(wire.tool_choice)
    return check_tools(ToolOptions(tuple(tools), choice, only, wire.parallel_tool_calls), field)


def read_tool_choice(choice: ToolMode | ChosenTool | AllowedTools) -> tuple[ChoiceMode, frozenset[str], str]:
    """The mode, the chosen tools, and the field that names them."""
    match choice:
        case ToolMode(type=kind):
            return kind, frozenset(), "tool_choice"
        case ChosenTool(name=name):
            return "required", frozenset({name}), "tool_choice.name"
        case AllowedTools(mode=mode, tools=allowed):
            return mode, frozenset(each.name for each in allowed), "tool_choice.tools"


def read_effort(wire: ResponseRequest) -> ReasoningSettings:
    effort = wire.reasoning.effort
    mode: Literal["", "on", "off"] = "off" if effort == "none" else "on" if effort else ""
    return ReasoningSettings(mode, EFFORT_BUDGETS.get(effort, -1), effort, "reasoning.effort")


def template_messages(wire: ResponseRequest, earlier: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages for the chat template.  Raises BadRequest for an item in a wrong place."""
    if len(earlier) + len(wire.input) > MAX_ITEMS:
        count = f"the conversation before it has {len(earlier)} items, and the input {len(wire.input)}"
        raise BadRequest(f"input: {count}; together they must be at most {MAX_ITEMS}", param="input")
    places = list(enumerate((*earlier, *wire.input), -len(earlier)))
    check_arguments(
        (item.arguments, item_field(index, "arguments")) for index, item in places if isinstance(item, FunctionCall)
    )
    names: dict[str, str] = {}
    messages = [{"role": "system", "content": wire.instructions}] if wire.instructions else []
    for assistant, run in groupby(places, key=lambda place: is_assistant_item(place[1])):
        items = list(run)
        names |= {item.call_id: item.name for _, item in items if isinstance(item, FunctionCall)}
        if assistant:
            messages.append(assistant_message(items))
        else:
            messages += [convert_item(item, index, names) for index, item in items]
    if messages[-1].get("tool_calls"):
        raise BadRequest("input: the last items call tools, and their results are missing", param="input")
    first = [*takewhile(lambda message: message["role"] == "system", messages)]
    if len(first) > 1:  # templates take one system message
        joined = "\n".join(message["content"] for message in first)
        messages[: len(first)] = [{"role": "system", "content": joined}]
    return messages


def item_field(index: int, name: str) -> str:
    """The path of a field of an item in messages; items of the conversation before the input have negative numbers."""
    return f"input[{index}].{name}" if index >= 0 else "previous_response_id"


def is_assistant_item(item: InputItem) -> bool:
    return isinstance(item, FunctionCall | ReasoningItem) or (
        isinstance(item, MessageItem) and item.role == "assistant"
    )


def convert_item(item: InputItem, index: int, names: dict[str, str]) -> dict[str, Any]:
    """A message for the chat template.  The role "developer" becomes "system"."""
    if isinstance(item, MessageItem):
        return {"role": "system" if item.role == "developer" else item.role, "content": join_text(item.content)}
    assert isinstance(item, FunctionOutput), "the rest is the assistant's"
    if item.call_id not in names:
        field = item_field(index, "call_id")
        raise BadRequest(f"{field}: no function_call before it has the id {item.call_id[:60]!r}", param=field)
    call_fields = {"tool_call_id": item.call_id, "name": names[item.call_id]}
    return {"role": "tool", "content": join_text(item.output), **call_fields}


def assistant_message(run: Sequence[tuple[int, InputItem]]) -> dict[str, Any]:
    texts = [join_text(item.content) for _, item in run if isinstance(item, MessageItem)]
    thoughts = [reasoning_text(item) for _, item in run if isinstance(item, ReasoningItem)]
    calls = [convert_call(item, index) for index, item in run if isinstance(item, FunctionCall)]
    message = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [text for text in thoughts if text]
    return (
        message
        | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def convert_call(item: FunctionCall, index: int) -> dict[str, Any]:
    arguments = read_arguments(item.arguments, item_field(index, "arguments"))
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}


def reasoning_text(item: ReasoningItem) -> str:
    return "\n".join(part.text for part in item.content or item.summary)


def join_text(parts: Sequence[ContentPart]) -> str:
    return "\n".join(part.text for part in parts)


def echo_request(wire: ResponseRequest, model: Model, *, stored: bool) -> dict[str, Any]:
    """The request's fields that a response repeats; sampling options as they are applied."""
    choice = wire.tool_choice
    sampling = apply_suggestions(model, read_response_sampling(wire), open_options(wire))
    return {
        "model": wire.model,
        "instructions": wire.instructions or None,
        "max_output_tokens": wire.max_output_tokens or None,
        "max_tool_calls": wire.max_tool_calls or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": wire.top_logprobs,
        "text": {"format": dump_set_fields(wire.text.format), "verbosity": "medium"},
        "tools": [dump_set_fields(tool) for tool in wire.tools],
        "tool_choice": choice.type if isinstance(choice, ToolMode) else dump_set_fields(choice),
        "parallel_tool_calls": wire.parallel_tool_calls,
        "reasoning": {"effort": wire.reasoning.effort or None, "summary": None},
        "truncation": wire.truncation,
        "background": False,
        "store": stored,
        "previous_response_id": wire.previous_response_id or None,
        "service_tier": "default",
        "metadata": wire.metadata,
        "prompt_cache_key": wire.prompt_cache_key or None,
        "safety_identifier": wire.safety_identifier or None,
        "user": wire.user or None,
    }


def dump_set_fields(wire: Wire) -> dict[str, Any]:
    return wire.model_dump(by_alias=True, exclude_unset=True)
