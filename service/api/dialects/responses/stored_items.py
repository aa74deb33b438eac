"""The items of kept responses as JSON: written when a response is kept, read when a request continues it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import TypeAdapter

from ...shared.output_items import OutputItem
from ...shared.streaming import dumps_sliced
from .wire import (
    ITEM_UNION,
    FunctionCall,
    FunctionOutput,
    InputItem,
    MessageItem,
    ReasoningItem,
    Refusal,
)
from .write import ResponseInfo, write_items_list

ITEM_CHARACTERS = 128  # of an item, or of a part of one, beside its text
ITEMS = TypeAdapter(list[Annotated[InputItem, ITEM_UNION]])


def dump_input(call: ResponseInfo, items: Sequence[InputItem]) -> list[bytes]:
    """Items of a request.  Those without an id get one."""
    number = call.id.partition("_")[2]
    return [dumps_sliced(write_input_item(item, f"{number}_in{index}")) for index, item in enumerate(items)]


def dump_output(call: ResponseInfo, items: Sequence[OutputItem], status: str) -> list[bytes]:
    """Items of an answer, without log-probabilities."""
    plain = [replace(item, logprobs=[]) for item in items]
    return [dumps_sliced(item) for item in write_items_list(call, plain, status)]


def read_items(values: Any) -> list[InputItem]:
    """What the functions above have written."""
    return ITEMS.validate_python(values)


def count_characters(items: Sequence[InputItem]) -> int:
    """The characters of items of a request as JSON, about: of their texts, and some for each text and each item."""
    texts = (text for item in items for text in texts_of(item))
    return ITEM_CHARACTERS * len(items) + sum(ITEM_CHARACTERS + len(text) for text in texts)


def texts_of(item: InputItem) -> Iterator[str]:
    match item:
        case MessageItem():
            yield from (part.text for part in item.content)
        case FunctionOutput():
            yield from (part.text for part in item.output)
        case FunctionCall(arguments=arguments):
            yield arguments
        case ReasoningItem():
            yield from (part.text for part in item.summary)
            yield from (part.text for part in item.content)


def write_input_item(item: InputItem, number: str) -> dict[str, Any]:
    match item:
        case MessageItem(role=role):
            named = {"type": "message", "id": item.id or f"msg_{number}", "status": "completed", "role": role}
            return named | {"content": list(write_parts(item))}
        case FunctionCall(call_id=call_id):
            named = {"type": "function_call", "id": item.id or f"fc_{number}", "status": "completed"}
            return named | {"call_id": call_id, "name": item.name, "arguments": item.arguments}
        case FunctionOutput(call_id=call_id):
            named = {"type": "function_call_output", "id": item.id or f"fco_{number}", "status": "completed"}
            output = [{"type": "input_text", "text": part.text} for part in item.output]
            return named | {"call_id": call_id, "output": output}
        case ReasoningItem():
            named = {"type": "reasoning", "id": item.id or f"rs_{number}", "status": "completed"}
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary]
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content]
            return named | {"summary": summary, "content": content, "encrypted_content": None}


def write_parts(item: MessageItem) -> Iterator[dict[str, Any]]:
    for part in item.content:
        if isinstance(part, Refusal):
            yield {"type": "refusal", "refusal": part.refusal}
        elif item.role == "assistant":
            yield {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        else:
            yield {"type": "input_text", "text": part.text}
