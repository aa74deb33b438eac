"""Tools and thinking as OpenAI's chat is asked for them, by its own names and those of vLLM.

Knows no model and no answer.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ....core.errors import BadRequest
from ....text.chat_prompt import Reasoning, Tool, Tools
from ...shared.dialect import Neutral, Wire, at_most, between, described
from ...shared.tagged_unions import said_type
from ...shared.tool_options import EFFORTS, check_names, tool

MOST_TOOLS = 128
Effort = Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[
    Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")], described("1 to 64 letters, digits, underscores or dashes")
]


class Function(Wire):
    """`strict` or not, calls keep to the schema."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = True


class FunctionTool(Wire):
    unsupported: ClassVar[Neutral] = {"custom": ()}

    type: Literal["function"] = "function"
    function: Function


class Named(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"] = "function"
    function: Named


class Allowed(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), at_most(MOST_TOOLS)]


class ToolChoice(Wire):
    """One of the words, a function, or some of the tools."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: Named | None = None
    allowed_tools: Allowed | None = None


def chosen(value: Any) -> Any:
    """A word is short for an object that says it."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return {"type": value}
    kind = said_type(value)
    if kind in ("function", "allowed_tools") and value.get(kind) is not None:
        return value
    sentence = '"none", "auto", "required", an object that names a function, or one of the type "allowed_tools"'
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence})


ToolList = Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MOST_TOOLS)]
Choice = Annotated[ToolChoice, BeforeValidator(chosen)]
AUTO = ToolChoice(type="auto")


def read_tools(offered: Sequence[FunctionTool], choice: ToolChoice, *, parallel: bool) -> Tools:
    """BadRequest names what does not fit together."""
    tools = tuple(read_tool(each.function, f"tools[{index}].function") for index, each in enumerate(offered))
    check_names([each.name for each in tools], "tools[{}].function.name")
    if not tools and choice.type not in ("none", "auto"):
        raise BadRequest("tool_choice: only together with tools", param="tool_choice")
    kind, only = of_choice(choice)
    for place, name in only.items():
        if name not in {each.name for each in tools}:
            raise BadRequest(f"{place}: no tool is called {name!r}", param=place)
    return Tools(tools, kind, frozenset(only.values()), parallel)


def read_tool(function: Function, place: str) -> Tool:
    return tool(function.name, function.description, function.parameters, f"{place}.parameters")


def of_choice(choice: ToolChoice) -> tuple[Literal["none", "auto", "required"], dict[str, str]]:
    """What has to happen, and of which tools: the wire's names for the places where they are named, and the names."""
    if choice.function and choice.type == "function":
        return "required", {"tool_choice.function.name": choice.function.name}
    if choice.allowed_tools and choice.type == "allowed_tools":
        named = enumerate(choice.allowed_tools.tools)
        places = {
            f"tool_choice.allowed_tools.tools[{index}].function.name": each.function.name for index, each in named
        }
        return choice.allowed_tools.mode, places
    return ("none" if choice.type == "none" else "required" if choice.type == "required" else "auto"), {}


# Thinking

Budget = Annotated[int, between(0, (1 << 31) - 1)]


class Thinks(Wire):
    """What may be said of thinking; the shorter of two budgets holds."""

    reasoning_effort: Effort = ""
    thinking_budget: Budget = -1
    thinking_token_budget: Budget = -1


def read_reasoning(wire: Thinks) -> Reasoning:
    effort = wire.reasoning_effort
    budgets = (EFFORTS.get(effort, -1), wire.thinking_budget, wire.thinking_token_budget)
    budget = min((each for each in budgets if each >= 0), default=-1)
    mode: Literal["", "on", "off"] = "off" if effort == "none" else "on" if effort else ""
    return Reasoning(mode, budget, effort, "reasoning_effort")
