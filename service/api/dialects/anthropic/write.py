"""Writes the responses of the Anthropic dialect: messages, whole or as events, and errors.

Each item of an answer is a content block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import PolyheadError
from ....text.answer_delta import AnswerDelta, Usage
from ...shared.output_items import (
    ItemBegun,
    ItemDelta,
    ItemEnded,
    ItemEvent,
    OutputItem,
    OutputItems,
    collect_items,
    parse_arguments,
)

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PING = {"type": "ping"}  # allowed anywhere in a stream


@dataclass(frozen=True)
class MessageInfo:
    """What all objects of one response have in common; `max_tokens` is the limit in the request."""

    id: str
    model: str
    max_tokens: int


def write_message(call: MessageInfo, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
    last = deltas[-1]
    content = [write_block(item) for item in collect_items(deltas)]
    return write_envelope(call, content, write_usage(last.usage, last.reasoning_tokens)) | stop_fields(call, last)


class MessageEvents:
    """The stream events of one message; the prompt has `length` tokens."""

    def __init__(self, call: MessageInfo, length: int) -> None:
        self.call, self.length, self.items = call, length, OutputItems()

    def start_events(self) -> Iterator[dict[str, Any]]:
        """The first events.  The number of cached prompt tokens is not known yet; the last event has it."""
        yield {"type": "message_start", "message": write_envelope(self.call, [], write_usage(Usage(self.length)))}
        yield PING

    def delta_events(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        for item_event in self.items.push(delta):
            yield from write_item_event(item_event)
        if delta.finish:
            cost = write_usage(delta.usage, delta.reasoning_tokens)
            yield {"type": "message_delta", "delta": stop_fields(self.call, delta), "usage": cost}
            yield {"type": "message_stop"}


def write_count(tokens: int) -> dict[str, int]:
    return {"input_tokens": tokens}


def write_envelope(call: MessageInfo, content: list[dict[str, Any]], cost: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**cost, "service_tier": "standard"},
    }


def write_item_event(item_event: ItemEvent) -> Iterator[dict[str, Any]]:
    place = {"index": item_event.item.index}
    match item_event:
        case ItemBegun(item):
            yield {"type": "content_block_start", **place, "content_block": write_block(replace(item, text=""))}
        case ItemDelta(item, text):
            yield {"type": "content_block_delta", **place, "delta": write_delta(item, text)}
        case ItemEnded(item):
            if item.kind == "reasoning":
                signature = {"type": "signature_delta", "signature": ""}
                yield {"type": "content_block_delta", **place, "delta": signature}
            yield {"type": "content_block_stop", **place}


def write_delta(item: OutputItem, text: str) -> dict[str, Any]:
    match item.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def write_block(item: OutputItem) -> dict[str, Any]:
    """A content block.  Thinking blocks are not signed."""
    match item.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": item.text, "signature": ""}
        case "text":
            return {"type": "text", "text": item.text}
        case "call":
            return {"type": "tool_use", "id": item.id, "name": item.name, "input": parse_arguments(item.text)}


def stop_fields(call: MessageInfo, last: AnswerDelta) -> dict[str, Any]:
    match last.finish:
        case "calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        case "length":
            full = last.usage.completion_tokens < call.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        case _ if isinstance(last.stop, str) and last.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        case _:
            return {"stop_reason": "end_turn", "stop_sequence": None}


def write_usage(cost: Usage, reasoning: int = 0) -> dict[str, Any]:
    """Cached prompt tokens are counted separately; writing to the cache is free."""
    return {
        "input_tokens": cost.prompt_tokens - cost.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cost.cached_tokens,
        "output_tokens": cost.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning},
    }


def write_anthropic_error(error: PolyheadError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": error_type(error.status), "message": error.message}}


def error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
