"""What dialects that offer tools and ask for thinking have in common.

Knows no dialect: each says what its fields are called.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import BadRequest
from ...text.chat_prompt import ToolDefinition, ToolOptions
from .dialect import quote_json

# an effort that is asked for -> tokens of thoughts; -1: as many as the model likes
EFFORT_BUDGETS: Mapping[str, int] = {"minimal": 256, "low": 1024, "medium": 4096, "high": -1, "xhigh": -1, "max": -1}


def make_tool(name: str, description: str, schema: Mapping[str, Any], place: str) -> ToolDefinition:
    """`place` is the wire's name for the schema of the arguments, which are an object whatever it says."""
    if not schema:
        return ToolDefinition(name, description)
    kind = schema.get("type", "object")
    if kind != "object":
        raise BadRequest(f'{place}.type: must be "object", got {quote_json(kind)}', param=f"{place}.type")
    return ToolDefinition(name, description, schema, place)


def check_tools(tools: ToolOptions, named: str) -> ToolOptions:
    """`named` is the wire's name for where some are chosen.  BadRequest for what does not fit together."""
    names = [each.name for each in tools.offered]
    check_tool_names(names, "tools[{}].name")
    if unknown := tools.only - set(names):
        raise BadRequest(f"{named}: no tool is called {min(unknown)[:60]!r}", param=named)
    if tools.choice == "required" and not names:
        raise BadRequest("tool_choice: only together with tools", param="tool_choice")
    return tools


def check_tool_names(names: Sequence[str], place: str) -> None:
    """`place` is the wire's name for one, with its number left open."""
    for index, name in enumerate(names):
        if name in names[:index]:
            where = place.format(index)
            raise BadRequest(f"{where}: {name!r} is the name of another tool, too", param=where)
