"""Names of tools in earlier calls, which are written again with each result of the call."""

from typing import Any

import pytest

from polyhead.service.api.dialects.anthropic.wire import MessagesRequest
from polyhead.service.api.dialects.decisions.wire import DecisionsRequest
from polyhead.service.api.dialects.ollama.wire import OllamaChatRequest
from polyhead.service.api.dialects.openai.wire import ChatRequest
from polyhead.service.api.dialects.responses.wire import ResponseRequest
from polyhead.service.api.shared.dialect import Wire
from polyhead.service.api.shared.tool_options import MAX_CALLED_NAME_CHARS
from polyhead.service.core.errors import BadRequest

LONGEST = "n" * MAX_CALLED_NAME_CHARS
QUESTION = {"type": "predicate", "instructions": "a"}


def chat(name: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": name}}]}]}


def messages(name: str) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "a", "name": name, "input": {}}
    return {"model": "m", "max_tokens": 1, "messages": [{"role": "assistant", "content": [block]}]}


def items(name: str) -> dict[str, Any]:
    return {"model": "m", "input": [{"type": "function_call", "call_id": "a", "name": name, "arguments": "{}"}]}


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatRequest, chat, "messages[0].tool_calls[0].function.name"),
        (OllamaChatRequest, chat, "messages[0].tool_calls[0].function.name"),
        (MessagesRequest, messages, "messages[0].content[0].name"),
        (ResponseRequest, items, "input[0].name"),
        (DecisionsRequest, lambda name: items(name) | {"questions": [QUESTION]}, "input[0].name"),
    ],
)
def test_the_name_of_an_earlier_call_is_as_long_as_that_of_a_tool(kind: type[Wire], body: Any, field: str) -> None:
    kind.read(body(LONGEST))
    with pytest.raises(BadRequest) as error:
        kind.read(body(LONGEST + "n"))
    assert error.value.param == field
    assert error.value.message.startswith(f"{field}: must have at most 128 characters, got ")
