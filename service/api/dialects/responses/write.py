"""What the dialect of OpenAI's responses answers: a response, whole or as events.

Knows no engine and no wire object.  The one idea: a response is what was asked, repeated, and the items of an answer;
a streamed one tells how they grow, numbering what it tells.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import PolyheadError
from ....text.chat_parser import Utterance
from ....text.detokenizer import Drawn, Usage
from ...shared.openai_errors import scored
from ...shared.output_items import Begun, Ended, Happening, Item, Items, More, whole

PREFIXES = {"thought": "rs", "words": "msg", "call": "fc"}


@dataclass(frozen=True)
class Call:
    """What every object of one answer repeats; `asked` is what the client said, with what it left out filled in."""

    id: str
    created: int  # seconds since 1970
    asked: Mapping[str, Any]


def write_response(call: Call, utterances: Sequence[Utterance]) -> dict[str, Any]:
    return ended(call, whole(utterances), utterances[-1])


def ended(call: Call, items: Sequence[Item], last: Utterance) -> dict[str, Any]:
    cut = last.finish == "length"
    status = "incomplete" if cut else "completed"
    output = every(call, items, status)
    said = {"status": status, "output": output, "usage": usage(last.usage, last.thought_tokens)}
    if cut:
        return response(call) | said | {"incomplete_details": {"reason": "max_output_tokens"}}
    return response(call) | said


def every(call: Call, items: Sequence[Item], status: str) -> list[dict[str, Any]]:
    """`status` is that of the last; those before it are complete."""
    return [written(call, item, status if item is items[-1] else "completed") for item in items]


def response(call: Call) -> dict[str, Any]:
    """One that has only begun."""
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **call.asked,
    }


class Events:
    """The events of one response as it is written."""

    def __init__(self, call: Call) -> None:
        self.call, self.items, self.count = call, Items(), 0

    def start(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield self.numbered({"type": f"response.{name}", "response": response(self.call)})

    def chunks(self, utterance: Utterance) -> Iterator[dict[str, Any]]:
        for happening in self.items.push(utterance):
            for event in told(self.call, happening):
                yield self.numbered(event)
        if utterance.finish:
            said = ended(self.call, self.items.every, utterance)
            yield self.numbered({"type": f"response.{said['status']}", "response": said})

    def failed(self, error: PolyheadError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        output = every(self.call, self.items.every, "incomplete")
        said = {"status": "failed", "output": output, "error": {"code": code, "message": error.message}}
        return self.numbered({"type": "response.failed", "response": response(self.call) | said})

    def numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        return {**event, "sequence_number": self.count - 1}


def told(call: Call, happening: Happening) -> Iterator[dict[str, Any]]:
    item = happening.item
    output, place = {"output_index": item.index}, {"item_id": name(call, item), "output_index": item.index}
    if item.kind != "call":
        place["content_index"] = 0
    match happening:
        case Begun():
            started = replace(item, text="", drawn=[])
            empty = written(call, started, "in_progress") | ({} if item.kind == "call" else {"content": []})
            yield {"type": "response.output_item.added", **output, "item": empty}
            if item.kind != "call":
                yield {"type": "response.content_part.added", **place, "part": part(started)}
        case More(text=text, drawn=drawn):
            scores = {"logprobs": logprobs(drawn)} if item.kind == "words" else {}
            yield {"type": f"response.{STREAMED[item.kind]}.delta", **place, "delta": text, **scores}
        case Ended(cut=cut):
            status = "incomplete" if cut else "completed"
            yield {"type": f"response.{STREAMED[item.kind]}.done", **place, **final(item)}
            if item.kind != "call":
                yield {"type": "response.content_part.done", **place, "part": part(item)}
            yield {"type": "response.output_item.done", **output, "item": written(call, item, status)}


STREAMED = {"thought": "reasoning_text", "words": "output_text", "call": "function_call_arguments"}


def final(item: Item) -> dict[str, Any]:
    match item.kind:
        case "thought":
            return {"text": item.text}
        case "words":
            return {"text": item.text, "logprobs": logprobs(item.drawn)}
        case "call":
            return {"arguments": item.text, "name": item.name}


def written(call: Call, item: Item, status: str) -> dict[str, Any]:
    named = {"id": name(call, item), "status": status}
    match item.kind:
        case "thought":
            return {"type": "reasoning", **named, "summary": [], "content": [part(item)], "encrypted_content": None}
        case "words":
            return {"type": "message", **named, "role": "assistant", "content": [part(item)]}
        case "call":
            return {"type": "function_call", **named, "call_id": item.id, "name": item.name, "arguments": item.text}


def part(item: Item) -> dict[str, Any]:
    if item.kind == "thought":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs(item.drawn)}


def name(call: Call, item: Item) -> str:
    return f"{PREFIXES[item.kind]}_{call.id.partition('_')[2]}_{item.index}"


def logprobs(drawn: Sequence[Drawn]) -> list[dict[str, Any]]:
    return [scored(each.token) | {"top_logprobs": [scored(one) for one in each.top]} for each in drawn]


def usage(cost: Usage, thought: int) -> dict[str, Any]:
    return {
        "input_tokens": cost.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cost.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": cost.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
    }
