"""Writes the responses of OpenAI's responses API, whole or as events.

A response repeats the request's fields and has the items of the answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import PolyheadError
from ....text.answer_delta import AnswerDelta, Usage
from ...shared.openai_errors import write_logprobs
from ...shared.output_items import ItemBegun, ItemDelta, ItemEnded, ItemEvent, OutputItem, OutputItems, collect_items

ITEM_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True)
class ResponseInfo:
    """What all objects of one response have in common.

    `request_fields` are the fields of the request, with defaults filled in.
    """

    id: str
    created: int  # seconds since 1970
    request_fields: Mapping[str, Any]


def write_response(call: ResponseInfo, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
    return write_ended(call, collect_items(deltas), deltas[-1])


def write_ended(call: ResponseInfo, items: Sequence[OutputItem], last: AnswerDelta) -> dict[str, Any]:
    cut = last.finish == "length"
    status = "incomplete" if cut else "completed"
    output = write_items_list(call, items, status)
    fields = {"status": status, "output": output, "usage": write_usage(last.usage, last.reasoning_tokens)}
    if cut:
        return write_response_object(call) | fields | {"incomplete_details": {"reason": "max_output_tokens"}}
    return write_response_object(call) | fields


def write_items_list(call: ResponseInfo, items: Sequence[OutputItem], status: str) -> list[dict[str, Any]]:
    """The items; `status` is that of the last one, the others are complete."""
    return [write_item(call, item, status if item is items[-1] else "completed") for item in items]


def write_response_object(call: ResponseInfo) -> dict[str, Any]:
    """A response that has just begun."""
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **call.request_fields,
    }


class ResponseEvents:
    """The stream events of one response."""

    def __init__(self, call: ResponseInfo) -> None:
        self.call, self.items, self.count = call, OutputItems(), 0

    def start_events(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self.number_event({"type": f"response.{name}", "response": write_response_object(self.call)})

    def delta_events(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        for item_event in self.items.push(delta):
            for event in write_item_event(self.call, item_event):
                yield self.number_event(event)
        if delta.finish:
            fields = write_ended(self.call, self.items.items, delta)
            yield self.number_event({"type": f"response.{fields['status']}", "response": fields})

    def failure_event(self, error: PolyheadError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        output = write_items_list(self.call, self.items.items, "incomplete")
        fields = {"status": "failed", "output": output, "error": {"code": code, "message": error.message}}
        return self.number_event({"type": "response.failed", "response": write_response_object(self.call) | fields})

    def number_event(self, event: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {**event, "sequence_number": self.count - 1}


def write_item_event(call: ResponseInfo, item_event: ItemEvent) -> Iterator[dict[str, Any]]:
    item = item_event.item
    output, place = {"output_index": item.index}, {"item_id": item_id(call, item), "output_index": item.index}
    if item.kind != "call":
        place["content_index"] = 0
    match item_event:
        case ItemBegun():
            started = replace(item, text="", logprobs=[])
            empty = write_item(call, started, "in_progress") | ({} if item.kind == "call" else {"content": []})
            yield {"type": "response.output_item.added", **output, "item": empty}
            if item.kind != "call":
                yield {"type": "response.content_part.added", **place, "part": write_part(started)}
        case ItemDelta(text=text, logprobs=tokens):
            scores = {"logprobs": write_logprobs(tokens)} if item.kind == "text" else {}
            yield {"type": f"response.{DELTA_NAMES[item.kind]}.delta", **place, "delta": text, **scores}
        case ItemEnded(cut=cut):
            status = "incomplete" if cut else "completed"
            yield {"type": f"response.{DELTA_NAMES[item.kind]}.done", **place, **final_fields(item)}
            if item.kind != "call":
                yield {"type": "response.content_part.done", **place, "part": write_part(item)}
            yield {"type": "response.output_item.done", **output, "item": write_item(call, item, status)}


DELTA_NAMES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def final_fields(item: OutputItem) -> dict[str, Any]:
    match item.kind:
        case "reasoning":
            return {"text": item.text}
        case "text":
            return {"text": item.text, "logprobs": write_logprobs(item.logprobs)}
        case "call":
            return {"arguments": item.text, "name": item.name}


def write_item(call: ResponseInfo, item: OutputItem, status: str) -> dict[str, Any]:
    named = {"id": item_id(call, item), "status": status}
    match item.kind:
        case "reasoning":
            return {
                "type": "reasoning",
                **named,
                "summary": [],
                "content": [write_part(item)],
                "encrypted_content": None,
            }
        case "text":
            return {"type": "message", **named, "role": "assistant", "content": [write_part(item)]}
        case "call":
            return {"type": "function_call", **named, "call_id": item.id, "name": item.name, "arguments": item.text}


def write_part(item: OutputItem) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": write_logprobs(item.logprobs)}


def item_id(call: ResponseInfo, item: OutputItem) -> str:
    return f"{ITEM_ID_PREFIXES[item.kind]}_{call.id.partition('_')[2]}_{item.index}"


def write_usage(cost: Usage, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": cost.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cost.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": cost.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
    }
