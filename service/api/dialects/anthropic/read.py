"""From turns of blocks, as the Anthropic dialect has them, to messages as templates know them.

Knows no engine and no answer.  The one idea: what the user's turn says of a tool's result is a message of the tool, and
what the assistant thought and called are fields of its message.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from ....core.errors import BadRequest
from ....core.grammar import Grammar
from ....core.request import Sampling
from ....text.chat_prompt import ChatPrompt, ReasoningSettings, ToolOptions
from ....text.prompts import ChatMessages, GenerationRequest
from ...shared.response_formats import schema_grammar
from ...shared.tool_options import EFFORT_BUDGETS, check_tools, make_tool
from .wire import (
    AnthropicMessage,
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


def read_messages(wire: MessagesRequest) -> ChatPrompt:
    thinking = wire.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= wire.max_tokens:
        said = f"must be less than max_tokens, which is {wire.max_tokens}, got {thinking.budget_tokens}"
        raise BadRequest(f"thinking.budget_tokens: {said}", param="thinking.budget_tokens")
    asked = GenerationRequest(
        field="messages",
        prompts=(read_conversation(wire),),
        sampling=Sampling(temperature=wire.temperature, top_p=wire.top_p, top_k=wire.top_k),
        max_tokens=wire.max_tokens,
        fits_context=True,
        stops=tuple(wire.stop_sequences),
        grammar=read_output_format(wire),
    )
    return ChatPrompt(asked, read_anthropic_tools(wire), read_thinking(wire))


def read_count(wire: CountRequest) -> ChatPrompt:
    """Nothing is to follow."""
    asked = GenerationRequest(
        field="messages",
        prompts=(read_conversation(wire),),
        sampling=Sampling(),
        grammar=read_output_format(wire),
        only_scores=True,
    )
    return ChatPrompt(asked, read_anthropic_tools(wire), read_thinking(wire))


def read_conversation(wire: Conversation) -> ChatMessages:
    return ChatMessages(tuple(template_messages(wire)), continues_last=wire.messages[-1].role == "assistant")


def read_output_format(wire: Conversation) -> Grammar | None:
    asked = wire.output_config.format
    return schema_grammar(asked.body, "output_config.format.schema") if asked else None


def read_anthropic_tools(wire: Conversation) -> ToolOptions:
    offered = (
        make_tool(each.name, each.description, each.input_schema, f"tools[{index}].input_schema")
        for index, each in enumerate(wire.tools)
    )
    choice = wire.tool_choice
    if (choice.type == "tool") != bool(choice.name):
        said = "is required" if choice.type == "tool" else "only together"
        raise BadRequest(f'tool_choice.name: {said} with type: "tool"', param="tool_choice.name")
    only = frozenset({choice.name}) if choice.type == "tool" else frozenset()
    parallel = not choice.disable_parallel_tool_use
    return check_tools(ToolOptions(tuple(offered), TOOL_CHOICES[choice.type], only, parallel), "tool_choice.name")


def read_thinking(wire: Conversation) -> ReasoningSettings:
    thinking = wire.thinking
    effort = wire.output_config.effort if wire.output_config.effort != "high" else ""  # as where none is said
    field = "thinking" if isinstance(thinking, ThinkingEnabled) or not effort else "output_config.effort"
    if isinstance(thinking, ThinkingDisabled):
        if effort:
            raise BadRequest(f"{field}: not where thinking is disabled", param=field)
        return ReasoningSettings("off", field=field)
    budgets = [EFFORT_BUDGETS.get(effort, -1), thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else -1]
    wanted = bool(effort) or isinstance(thinking, ThinkingEnabled)
    if wanted and wire.messages[-1].role == "assistant":
        raise BadRequest(f"{field}: not where the last message begins the answer", param=field)
    budget = min((each for each in budgets if each >= 0), default=-1)
    return ReasoningSettings("on" if wanted else "", budget, effort, field)


def template_messages(wire: Conversation) -> list[dict[str, Any]]:
    """Turns of the same role, one after the other, are one.  BadRequest names what stands where it cannot."""
    check_blocks(wire.messages)
    names = {
        block.id: block.name for each in wire.messages for block in each.content if isinstance(block, ToolUseBlock)
    }
    messages: list[dict[str, Any]] = []
    before = [AnthropicMessage(role="system", content=[*wire.system])] if join_text(wire.system) else []
    for role, turn in groupby([*before, *wire.messages], key=lambda message: message.role):
        said = [block for message in turn for block in message.content]
        match role:
            case "assistant":
                messages.append(assistant_message(said))
            case "system":
                messages.append({"role": "system", "content": join_text(said)})
            case "user":
                messages += user_messages(said, names)
    if messages[-1].get("tool_calls"):
        raise BadRequest("messages: the last turn calls tools, and nothing says what came of it", param="messages")
    return messages


def user_messages(turn: Sequence[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Results of tools, each a message; what is between them is said by the user."""
    for of_tools, blocks in groupby(turn, key=lambda block: isinstance(block, ToolResultBlock)):
        if of_tools:
            yield from (tool_message(block, names) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": join_text(list(blocks))}


def tool_message(block: ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    """Templates know no failure but what is said of it."""
    said = join_text(block.content)
    content = f"Error: {said}" if block.is_error else said
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


# Which block may stand where

ALLOWED_BLOCKS: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def check_blocks(messages: Sequence[AnthropicMessage]) -> None:
    called: set[str] = set()
    for number, message in enumerate(messages):
        if not message.content and message.role != "assistant":  # who may have had nothing to say
            where = f"messages[{number}].content"
            raise BadRequest(f"{where}: must have at least 1 item(s), got []", param=where)
        for index, block in enumerate(message.content):
            where = f"messages[{number}].content[{index}]"
            if not isinstance(block, ALLOWED_BLOCKS[message.role]):
                raise BadRequest(
                    f"{where}.type: no {block.type!r} is in a turn of the {message.role}", param=f"{where}.type"
                )
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                said = f"no tool_use before it has the id {block.tool_use_id[:60]!r}"
                raise BadRequest(f"{where}.tool_use_id: {said}", param=f"{where}.tool_use_id")
