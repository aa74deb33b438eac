"""Converts the messages of Anthropic's API to the messages of chat templates.

A tool result, which is part of a user's turn, becomes a message of the role "tool".  Thinking and tool calls become
fields of the assistant's message.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from ....core.errors import BadRequest
from ....core.grammar import Grammar
from ....core.request import Sampling
from ....text.chat_prompt import check_tool_size
from ....text.generation_request import ChatMessages, GenerationRequest, ReasoningSettings, ToolDefinition, ToolOptions
from ...shared.open_options import open_options
from ...shared.response_formats import check_closed_schema, says_strict, schema_grammar
from ...shared.tool_options import EFFORT_BUDGETS, check_tools, make_tool
from .wire import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    Conversation,
    CountRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
)

TOOL_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "any": "required",
    "tool": "required",
}


def read_messages(wire: MessagesRequest) -> GenerationRequest:
    thinking = wire.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= wire.max_tokens:
        problem = f"must be less than max_tokens, which is {wire.max_tokens}, got {thinking.budget_tokens}"
        raise BadRequest(f"thinking.budget_tokens: {problem}", param="thinking.budget_tokens")
    return GenerationRequest(
        field="messages",
        prompts=(read_conversation(wire),),
        sampling=Sampling(temperature=wire.temperature, top_p=wire.top_p, top_k=wire.top_k),
        open_options=open_options(wire),
        max_tokens=wire.max_tokens,
        fits_context=True,
        stops=tuple(wire.stop_sequences),
        grammar=read_output_format(wire),
        tools=read_anthropic_tools(wire),
        reasoning=read_thinking(wire),
    )


def read_count(wire: CountRequest) -> GenerationRequest:
    """The prompt alone, without generation."""
    return GenerationRequest(
        field="messages",
        prompts=(read_conversation(wire),),
        sampling=Sampling(),
        grammar=read_output_format(wire),
        only_scores=True,
        tools=read_anthropic_tools(wire),
        reasoning=read_thinking(wire),
    )


def read_conversation(wire: Conversation) -> ChatMessages:
    return ChatMessages(tuple(template_messages(wire)), continues_last=wire.messages[-1].role == "assistant")


def read_output_format(wire: Conversation) -> Grammar | None:
    output_format = wire.output_config.format
    return schema_grammar(output_format.body, "output_config.format.schema") if output_format else None


def read_tool(tool: AnthropicTool, place: str) -> ToolDefinition:
    if says_strict(tool):
        check_closed_schema(tool.input_schema, place)
    return make_tool(tool.name, tool.description, tool.input_schema, place, is_open=not tool.strict)


def read_anthropic_tools(wire: Conversation) -> ToolOptions:
    check_tool_size([each.input_schema for each in wire.tools], "tools")
    tools = (read_tool(each, f"tools[{index}].input_schema") for index, each in enumerate(wire.tools))
    choice = wire.tool_choice
    if (choice.type == "tool") != bool(choice.name):
        problem = "is required" if choice.type == "tool" else "only together"
        raise BadRequest(f'tool_choice.name: {problem} with type: "tool"', param="tool_choice.name")
    only = frozenset({choice.name}) if choice.type == "tool" else frozenset()
    parallel = not choice.disable_parallel_tool_use
    return check_tools(ToolOptions(tuple(tools), TOOL_CHOICES[choice.type], only, parallel), "tool_choice.name")


def read_thinking(wire: Conversation) -> ReasoningSettings:
    thinking = wire.thinking
    effort = wire.output_config.effort if wire.output_config.effort != "high" else ""  # the same as without an effort
    field = "thinking" if isinstance(thinking, ThinkingEnabled) or not effort else "output_config.effort"
    if isinstance(thinking, ThinkingDisabled):
        if effort:
            raise BadRequest(f"{field}: not where thinking is disabled", param=field)
        return ReasoningSettings("off", field=field)
    budgets = [EFFORT_BUDGETS.get(effort, -1), thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else -1]
    is_requested = bool(effort) or isinstance(thinking, ThinkingEnabled)
    if is_requested and wire.messages[-1].role == "assistant":
        raise BadRequest(f"{field}: not where the last message begins the answer", param=field)
    budget = min((each for each in budgets if each >= 0), default=-1)
    return ReasoningSettings("on" if is_requested else "", budget, effort, field)


def template_messages(wire: Conversation) -> list[dict[str, Any]]:
    """Consecutive turns of the same role become one message.  Raises BadRequest for a block in a wrong place."""
    check_blocks(wire.messages)
    names = {
        block.id: block.name for each in wire.messages for block in each.content if isinstance(block, ToolUseBlock)
    }
    messages: list[dict[str, Any]] = []
    before = [AnthropicMessage(role="system", content=[*wire.system])] if join_text(wire.system) else []
    for role, turn in groupby([*before, *wire.messages], key=lambda message: message.role):
        blocks = [block for message in turn for block in message.content]
        match role:
            case "assistant":
                messages.append(assistant_message(blocks))
            case "system":
                messages.append({"role": "system", "content": join_text(blocks)})
            case "user":
                messages += user_messages(blocks, names)
    if messages[-1].get("tool_calls"):
        raise BadRequest("messages: the last turn calls tools, and their results are missing", param="messages")
    return messages


def user_messages(turn: Sequence[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One message for each tool result, and one for each run of other blocks between them."""
    for are_results, blocks in groupby(turn, key=lambda block: isinstance(block, ToolResultBlock)):
        if are_results:
            yield from (tool_message(block, names) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": join_text(list(blocks))}


def tool_message(block: ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    """A tool result as a message.  Templates have no field for failure; the text says so."""
    text = join_text(block.content)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id]}


def assistant_message(turn: Sequence[Block]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in turn
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "\n".join(block.thinking for block in turn if isinstance(block, ThinkingBlock))
    message = {"role": "assistant", "content": join_text(turn)}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def join_text(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


# The blocks that each role may have

ALLOWED_BLOCKS: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def check_blocks(messages: Sequence[AnthropicMessage]) -> None:
    """Raises BadRequest for a block that its role cannot have, and a tool result without its call."""
    call_ids: set[str] = set()
    for number, message in enumerate(messages):
        if not message.content and message.role != "assistant":  # the assistant may have answered nothing
            where = f"messages[{number}].content"
            raise BadRequest(f"{where}: must have at least 1 item(s), got []", param=where)
        for index, block in enumerate(message.content):
            where = f"messages[{number}].content[{index}]"
            if not isinstance(block, ALLOWED_BLOCKS[message.role]):
                raise BadRequest(
                    f"{where}.type: no {block.type!r} is in a turn of the {message.role}", param=f"{where}.type"
                )
            if isinstance(block, ToolUseBlock):
                call_ids.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in call_ids:
                problem = f"no tool_use before it has the id {block.tool_use_id[:60]!r}"
                raise BadRequest(f"{where}.tool_use_id: {problem}", param=f"{where}.tool_use_id")
