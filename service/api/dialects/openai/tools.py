"""Tools and reasoning options of OpenAI's chat, by its own names and those of vLLM."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ....core.errors import BadRequest
from ....text.chat_prompt import check_tool_size
from ....text.generation_request import ReasoningSettings, ToolOptions
from ...shared.dialect import NeutralValues, Wire, between, max_items, must_be
from ...shared.tagged_unions import read_type
from ...shared.tool_options import EFFORT_BUDGETS, check_tool_names, read_function

MAX_TOOLS = 128
Effort = Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[
    Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")], must_be("1 to 64 letters, digits, underscores or dashes")
]


class ToolFunction(Wire):
    """Calls follow the schema.  With `strict: false` objects may have keys that it does not name."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = True


class FunctionTool(Wire):
    unsupported: ClassVar[NeutralValues] = {"custom": ()}

    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedToolList(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), max_items(MAX_TOOLS)]


class ChatToolChoice(Wire):
    """A mode, a function, or some of the tools."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedToolList | None = None


def as_tool_choice(value: Any) -> Any:
    """A string stands for an object with that type."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return {"type": value}
    kind = read_type(value)
    if kind in ("function", "allowed_tools") and value.get(kind) is not None:
        return value
    sentence = '"none", "auto", "required", an object that names a function, or one of the type "allowed_tools"'
    raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence})


ToolList = Annotated[list[FunctionTool], Field(fail_fast=True), max_items(MAX_TOOLS)]
ToolChoiceField = Annotated[ChatToolChoice, BeforeValidator(as_tool_choice)]
AUTO_CHOICE = ChatToolChoice(type="auto")


def read_tools(definitions: Sequence[FunctionTool], choice: ChatToolChoice, *, parallel: bool) -> ToolOptions:
    """Raises BadRequest for tools and choice that do not fit together."""
    check_tool_size([each.function.parameters for each in definitions], "tools")
    tools = tuple(read_function(each.function, f"tools[{index}].function") for index, each in enumerate(definitions))
    check_tool_names([each.name for each in tools], "tools[{}].function.name")
    if not tools and choice.type not in ("none", "auto"):
        raise BadRequest("tool_choice: only together with tools", param="tool_choice")
    kind, only = read_choice(choice)
    for place, name in only.items():
        if name not in {each.name for each in tools}:
            raise BadRequest(f"{place}: no tool is called {name!r}", param=place)
    return ToolOptions(tools, kind, frozenset(only.values()), parallel)


def read_choice(choice: ChatToolChoice) -> tuple[Literal["none", "auto", "required"], dict[str, str]]:
    """The mode, and the chosen tools: by the path of each name in the body, the name."""
    if choice.function and choice.type == "function":
        return "required", {"tool_choice.function.name": choice.function.name}
    if choice.allowed_tools and choice.type == "allowed_tools":
        named = enumerate(choice.allowed_tools.tools)
        places = {
            f"tool_choice.allowed_tools.tools[{index}].function.name": each.function.name for index, each in named
        }
        return choice.allowed_tools.mode, places
    return ("none" if choice.type == "none" else "required" if choice.type == "required" else "auto"), {}


# Reasoning

ThinkingBudget = Annotated[int, between(0, (1 << 31) - 1)]


class ReasoningFields(Wire):
    """Options of reasoning; the shorter of two budgets applies."""

    reasoning_effort: Effort = ""
    thinking_budget: ThinkingBudget = -1
    thinking_token_budget: ThinkingBudget = -1


def read_reasoning(wire: ReasoningFields) -> ReasoningSettings:
    effort = wire.reasoning_effort
    budgets = (EFFORT_BUDGETS.get(effort, -1), wire.thinking_budget, wire.thinking_token_budget)
    budget = min((each for each in budgets if each >= 0), default=-1)
    mode: Literal["", "on", "off"] = "off" if effort == "none" else "on" if effort else ""
    return ReasoningSettings(mode, budget, effort, "reasoning_effort")
