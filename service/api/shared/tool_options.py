"""Options of tools and reasoning that several dialects have in common."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

from ...core.errors import BadRequest
from ...text.generation_request import ToolDefinition, ToolOptions
from .dialect import quote_json
from .response_formats import StrictFields, check_strict_schema, says_strict

MAX_CALLED_NAME_CHARS = 128  # as many as the longest name of a tool in any dialect has
# The name of the tool in an earlier call.  It is written again with each result of the call.
CalledName = Annotated[str, Field(max_length=MAX_CALLED_NAME_CHARS)]

# effort -> limit of reasoning tokens; -1: unlimited
EFFORT_BUDGETS: Mapping[str, int] = {"minimal": 256, "low": 1024, "medium": 4096, "high": -1, "xhigh": -1, "max": -1}


class FunctionFields(StrictFields, Protocol):
    """A function in OpenAI's dialects."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]: ...


def read_function(function: FunctionFields, place: str) -> ToolDefinition:
    """`place` is the name of its object in the body.  Raises BadRequest if the schema is called strict and is not."""
    name, schema, place = function.name, function.parameters, f"{place}.parameters"
    tool = make_tool(name, function.description, schema, place, is_open=not function.strict)
    if says_strict(function):
        check_strict_schema(schema, f"function {name!r}", place)
    return tool


def make_tool(
    name: str, description: str, schema: dict[str, Any], place: str, *, is_open: bool = False
) -> ToolDefinition:
    """`place` is the name of the arguments' schema in the body.  Arguments are always an object.

    Objects in them may have keys that the schema does not name if it `is_open`.
    """
    if not schema:
        return ToolDefinition(name, description)
    kind = schema.get("type", "object")
    if kind != "object":
        raise BadRequest(f'{place}.type: must be "object", got {quote_json(kind)}', param=f"{place}.type")
    return ToolDefinition(name, description, schema, place, is_open=is_open)


def check_tools(tools: ToolOptions, named: str) -> ToolOptions:
    """Raises BadRequest for tools and choice that do not fit together.  `named` is the field of chosen names."""
    names = [each.name for each in tools.offered]
    check_tool_names(names, "tools[{}].name")
    if unknown := tools.only - set(names):
        raise BadRequest(f"{named}: no tool is called {min(unknown)[:60]!r}", param=named)
    if tools.choice == "required" and not names:
        raise BadRequest("tool_choice: only together with tools", param="tool_choice")
    return tools


def check_tool_names(names: Sequence[str], place: str) -> None:
    """Raises BadRequest for a duplicate name.  `place` is the field of a name, with a placeholder for the index."""
    for index, name in enumerate(names):
        if name in names[:index]:
            where = place.format(index)
            raise BadRequest(f"{where}: {name!r} is the name of another tool, too", param=where)
