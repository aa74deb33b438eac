"""Writes the answers of OpenAI's chat, whole or as stream chunks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....text.answer_delta import (
    AnswerDelta,
    AnswerPart,
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallStart,
    Usage,
)
from ...shared.openai_errors import write_logprobs
from .write import CompletionInfo, add_null_usage, write_completion_object, write_openai_usage, write_prompt_logprobs

UNFINISHED: Mapping[str, Any] = {"finish_reason": None}


def write_chat(call: CompletionInfo, answers: Sequence[AnswerDelta]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": write_message_object(answer.parts),
            "logprobs": write_chat_logprobs(answer.logprobs) if call.include_logprobs else None,
            **finish_fields(answer),
        }
        for index, answer in enumerate(answers)
    ]
    cost = sum((answer.usage for answer in answers), Usage())
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    response = write_completion_object(call, "chat.completion", choices) | {"usage": chat_usage(cost, reasoning)}
    return response | (prompt_fields(answers[0]) if call.include_prompt_logprobs else {})


def write_message_object(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    text = "".join(part.text for part in parts if isinstance(part, TextDelta))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": join_arguments(part, parts)}}
        for part in parts
        if isinstance(part, ToolCallStart)
    ]
    fields: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    return fields | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def join_arguments(call: ToolCallStart, parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ArgumentsDelta) and part.index == call.index)


def write_chat_chunks(
    call: CompletionInfo, index: int, answer: AnswerDelta, *, first: bool
) -> Iterator[dict[str, Any]]:
    """The chunks of one delta: the role if it is the `first`, the content, and the finish reason at the end."""
    if first:
        role_chunk = write_chunk(call, index, {"role": "assistant", "content": ""})
        yield role_chunk | (prompt_fields(answer) if call.include_prompt_logprobs and not index else {})
    deltas = [write_delta(part) for part in answer.parts] or ([{"content": ""}] if answer.logprobs else [])
    for number, each in enumerate(deltas):
        yield write_chunk(call, index, each, answer.logprobs if not number else ())
    if answer.finish:
        yield write_chunk(call, index, {}, ending=finish_fields(answer))


def write_delta(part: AnswerPart) -> dict[str, Any]:
    match part:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def write_chunk(
    call: CompletionInfo,
    index: int,
    fields: dict[str, Any],
    tokens: Sequence[TokenLogprobs] = (),
    ending: Mapping[str, Any] = UNFINISHED,
) -> dict[str, Any]:
    choice = {"index": index, "delta": fields, "logprobs": write_chat_logprobs(tokens) if tokens else None, **ending}
    return add_null_usage(call, write_completion_object(call, "chat.completion.chunk", [choice]))


def finish_fields(answer: AnswerDelta) -> dict[str, Any]:
    reason = "tool_calls" if answer.finish == "calls" else answer.finish or None
    return {"finish_reason": reason} | ({"stop_reason": answer.stop} if answer.stop != "" else {})


def prompt_fields(answer: AnswerDelta) -> dict[str, Any]:
    return {"prompt_logprobs": write_prompt_logprobs(answer.prompt_logprobs)}


def write_chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {"content": write_logprobs(tokens), "refusal": None}


def chat_usage(cost: Usage, reasoning: int) -> dict[str, Any]:
    return write_openai_usage(cost) | {"completion_tokens_details": {"reasoning_tokens": reasoning}}
