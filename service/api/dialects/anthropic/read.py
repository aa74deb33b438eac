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
from ....text.chat_prompt import Reasoning, Talk, Tools
from ....text.prompts import Chat, Continuation
from ...shared.response_formats import schema
from ...shared.tool_options import EFFORTS, check_tools, tool
from .wire import (
    Block,
    Conversation,
    CountRequest,
    Disabled,
    Enabled,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "any": "required",
    "tool": "required",
}


def read_messages(wire: MessagesRequest) -> Talk:
    thinking = wire.thinking
    if isinstance(thinking, Enabled) and thinking.budget_tokens >= wire.max_tokens:
        said = f"must be less than max_tokens, which is {wire.max_tokens}, got {thinking.budget_tokens}"
        raise BadRequest(f"thinking.budget_tokens: {said}", param="thinking.budget_tokens")
    asked = Continuation(
        field="messages",
        prompts=(chat(wire),),
        sampling=Sampling(temperature=wire.temperature, top_p=wire.top_p, top_k=wire.top_k),
        max_tokens=wire.max_tokens,
        within=True,
        stops=tuple(wire.stop_sequences),
        grammar=form(wire),
    )
    return Talk(asked, tools(wire), reasoning(wire))


def read_count(wire: CountRequest) -> Talk:
    """Nothing is to follow."""
    asked = Continuation(field="messages", prompts=(chat(wire),), sampling=Sampling(), grammar=form(wire), scoring=True)
    return Talk(asked, tools(wire), reasoning(wire))


def chat(wire: Conversation) -> Chat:
    return Chat(tuple(spoken(wire)), continued=wire.messages[-1].role == "assistant")


def form(wire: Conversation) -> Grammar | None:
    asked = wire.output_config.format
    return schema(asked.body, "output_config.format.schema") if asked else None


def tools(wire: Conversation) -> Tools:
    offered = (
        tool(each.name, each.description, each.input_schema, f"tools[{index}].input_schema")
        for index, each in enumerate(wire.tools)
    )
    choice = wire.tool_choice
    if (choice.type == "tool") != bool(choice.name):
        said = "is required" if choice.type == "tool" else "only together"
        raise BadRequest(f'tool_choice.name: {said} with type: "tool"', param="tool_choice.name")
    only = frozenset({choice.name}) if choice.type == "tool" else frozenset()
    parallel = not choice.disable_parallel_tool_use
    return check_tools(Tools(tuple(offered), CHOICES[choice.type], only, parallel), "tool_choice.name")


def reasoning(wire: Conversation) -> Reasoning:
    thinking = wire.thinking
    effort = wire.output_config.effort if wire.output_config.effort != "high" else ""  # as where none is said
    field = "thinking" if isinstance(thinking, Enabled) or not effort else "output_config.effort"
    if isinstance(thinking, Disabled):
        if effort:
            raise BadRequest(f"{field}: not where thinking is disabled", param=field)
        return Reasoning("off", field=field)
    budgets = [EFFORTS.get(effort, -1), thinking.budget_tokens if isinstance(thinking, Enabled) else -1]
    wanted = bool(effort) or isinstance(thinking, Enabled)
    if wanted and wire.messages[-1].role == "assistant":
        raise BadRequest(f"{field}: not where the last message begins the answer", param=field)
    budget = min((each for each in budgets if each >= 0), default=-1)
    return Reasoning("on" if wanted else "", budget, effort, field)


def spoken(wire: Conversation) -> list[dict[str, Any]]:
    """Turns of the same role, one after the other, are one.  BadRequest names what stands where it cannot."""
    check(wire.messages)
    names = {
        block.id: block.name for each in wire.messages for block in each.content if isinstance(block, ToolUseBlock)
    }
    messages: list[dict[str, Any]] = []
    before = [Message(role="system", content=[*wire.system])] if joined(wire.system) else []
    for role, turn in groupby([*before, *wire.messages], key=lambda message: message.role):
        said = [block for message in turn for block in message.content]
        match role:
            case "assistant":
                messages.append(answered(said))
            case "system":
                messages.append({"role": "system", "content": joined(said)})
            case "user":
                messages += asked(said, names)
    if messages[-1].get("tool_calls"):
        raise BadRequest("messages: the last turn calls tools, and nothing says what came of it", param="messages")
    return messages


def asked(turn: Sequence[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Results of tools, each a message; what is between them is said by the user."""
    for of_tools, blocks in groupby(turn, key=lambda block: isinstance(block, ToolResultBlock)):
        if of_tools:
            yield from (result(block, names) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": joined(list(blocks))}


def result(block: ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    """Templates know no failure but what is said of it."""
    said = joined(block.content)
    content = f"Error: {said}" if block.is_error else said
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id]}


def answered(turn: Sequence[Block]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in turn
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "\n".join(block.thinking for block in turn if isinstance(block, ThinkingBlock))
    message = {"role": "assistant", "content": joined(turn)}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def joined(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


# Which block may stand where

PLACES: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


def check(messages: Sequence[Message]) -> None:
    called: set[str] = set()
    for number, message in enumerate(messages):
        if not message.content and message.role != "assistant":  # who may have had nothing to say
            where = f"messages[{number}].content"
            raise BadRequest(f"{where}: must have at least 1 item(s), got []", param=where)
        for index, block in enumerate(message.content):
            where = f"messages[{number}].content[{index}]"
            if not isinstance(block, PLACES[message.role]):
                raise BadRequest(
                    f"{where}.type: no {block.type!r} is in a turn of the {message.role}", param=f"{where}.type"
                )
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                said = f"no tool_use before it has the id {block.tool_use_id[:60]!r}"
                raise BadRequest(f"{where}.tool_use_id: {said}", param=f"{where}.tool_use_id")
