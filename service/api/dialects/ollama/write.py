"""Writes the responses of Ollama's API: one object, or a line for each part of an answer."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ....core.errors import PolyheadError
from ....core.model import Model
from ....text.answer_delta import AnswerDelta, TokenLogprobs
from ...shared.openai_errors import write_logprobs
from ...shared.output_items import (
    ItemDelta,
    ItemEnded,
    ItemEvent,
    OutputItem,
    OutputItems,
    collect_items,
    parse_arguments,
)
from ...shared.timestamps import format_time

AnswerKind = Literal["response", "message"]  # the field of the text: of generate, and of chat


@dataclass
class AnswerInfo:
    """What all objects of one response have in common.  Times are in nanoseconds of `time.perf_counter_ns`."""

    kind: AnswerKind
    model: str
    began: int = field(default_factory=time.perf_counter_ns)
    first: int = 0  # when the first part of the answer came; 0: not yet

    def mark(self) -> None:
        """Record the time of the first part."""
        self.first = self.first or time.perf_counter_ns()


class OllamaEvents:
    """The objects of a streamed answer."""

    def __init__(self, call: AnswerInfo) -> None:
        self.call, self.items = call, OutputItems()

    def start_events(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def delta_events(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        self.call.mark()
        logprobs = delta.logprobs
        for item_event in self.items.push(delta):
            if text := event_fields(item_event):
                yield write_part(self.call, text, logprobs)
                logprobs = ()
        if delta.finish:
            yield write_part(self.call, {}, logprobs) | finish_fields(self.call, delta)


def event_fields(item_event: ItemEvent) -> dict[str, Any]:
    """What an event adds to a message.  A call is sent when it is complete."""
    match item_event:
        case ItemDelta(OutputItem(kind="text"), text):
            return {"content": text}
        case ItemDelta(OutputItem(kind="reasoning"), text):
            return {"thinking": text}
        case ItemEnded(OutputItem(kind="call") as item):
            return {"tool_calls": [write_call(item)]}
        case _:
            return {}


def write_answer(call: AnswerInfo, deltas: Sequence[AnswerDelta]) -> dict[str, Any]:
    """A whole answer."""
    items = collect_items(deltas)
    texts = {kind: "".join(item.text for item in items if item.kind == kind) for kind in ("text", "reasoning")}
    calls = [write_call(item) for item in items if item.kind == "call"]
    fields = {"content": texts["text"]}
    fields |= {"thinking": texts["reasoning"]} if texts["reasoning"] else {}
    tokens = tuple(token for delta in deltas for token in delta.logprobs)
    return write_part(call, fields | ({"tool_calls": calls} if calls else {}), tokens) | finish_fields(call, deltas[-1])


def write_loaded(call: AnswerInfo) -> dict[str, Any]:
    """The answer to a request without a prompt."""
    return write_part(call, {}, ()) | {"done": True, "done_reason": "load"}


def write_part(call: AnswerInfo, fields: Mapping[str, Any], tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    common = {"model": call.model, "created_at": format_time(time.time())}
    if call.kind == "message":
        text: dict[str, Any] = {"message": {"role": "assistant", "content": "", **fields}}
    else:
        text = {"response": fields.get("content", "")}
        text |= {name: value for name, value in fields.items() if name != "content"}
    logprobs = {"logprobs": write_logprobs(tokens)} if tokens else {}
    return {**common, **text, "done": False, **logprobs}


def write_call(item: OutputItem) -> dict[str, Any]:
    return {"id": item.id, "function": {"name": item.name, "arguments": parse_arguments(item.text)}}


def finish_fields(call: AnswerInfo, last: AnswerDelta) -> dict[str, Any]:
    """The end of an answer.  The prompt's time is that until the first part of the answer, the wait for others
    included."""
    now = time.perf_counter_ns()
    first = call.first or now
    return {
        "done": True,
        "done_reason": "length" if last.finish == "length" else "stop",
        "total_duration": now - call.began,
        "load_duration": 0,
        "prompt_eval_count": last.usage.prompt_tokens,
        "prompt_eval_duration": first - call.began,
        "eval_count": last.usage.completion_tokens,
        "eval_duration": now - first,
    }


def write_tag(model: Model) -> dict[str, Any]:
    """A model in a list.  Size and digest of the file are not known to the server."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": format_time(model.created),
        "size": 0,
        "digest": "",
        "details": model_details(model),
    }


def write_running(model: Model) -> dict[str, Any]:
    """A model in the list of loaded ones: all are, for ever."""
    forever = "2318-01-01T00:00:00Z"  # as Ollama writes a keep_alive of -1, about three centuries ahead
    return write_tag(model) | {"expires_at": forever, "size_vram": 0, "context_length": model.max_tokens}


def model_details(model: Model) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if model.source.endswith(".gguf") else "safetensors",
        "family": model.family,
        "families": [model.family],
        "parameter_size": "",
        "quantization_level": model.dtype,
    }


def write_shown(model: Model) -> dict[str, Any]:
    parameters = "\n".join(f"{name} {value}" for name, value in sorted(model.sampling.items()))
    return {
        "modelfile": "",
        "parameters": parameters,
        "template": "",
        "details": model_details(model),
        "model_info": {
            "general.architecture": model.family,
            f"{model.family}.context_length": model.max_tokens,
            f"{model.family}.embedding_length": model.width,
            f"{model.family}.vocab_size": model.vocab_size,
        },
        "capabilities": capabilities(model),
        "modified_at": format_time(model.created),
    }


def capabilities(model: Model) -> list[str]:
    if model.task == "embed":
        return ["embedding"]
    abilities = {
        "completion": True,
        "tools": model.chat is not None,
        "insert": model.tokenizer.fill_marks is not None,
        "thinking": bool(model.chat_format.end),
    }
    return [name for name, is_present in abilities.items() if is_present]


def write_ollama_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message}
