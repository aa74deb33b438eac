"""What OpenAI's chat answers: messages, whole or in deltas.

Knows no engine and no wire object.  The one idea: a streamed answer is the whole one cut up, so both are made of the
same parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....text.chat_parser import ArgumentsDelta, ChatDelta, ChatPart, ReasoningDelta, TextDelta
from ....text.chat_parser import ToolCallStart as ToolCall
from ....text.detokenizer import TokenLogprobs, Usage
from ...shared.openai_errors import write_scored_token
from .write import CompletionInfo, add_null_usage, write_completion_object, write_openai_usage, write_prompt_logprobs

UNFINISHED: Mapping[str, Any] = {"finish_reason": None}


def write_chat(call: CompletionInfo, answers: Sequence[ChatDelta]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": write_message_object(said.parts),
            "logprobs": write_logprobs(said.logprobs),
            **finish_fields(said),
        }
        for index, said in enumerate(answers)
    ]
    cost = sum((said.usage for said in answers), Usage())
    thought = sum(said.reasoning_tokens for said in answers)
    written = write_completion_object(call, "chat.completion", choices) | {"usage": chat_usage(cost, thought)}
    return written | (prompt_fields(answers[0]) if call.include_prompt_logprobs else {})


def write_message_object(parts: Sequence[ChatPart]) -> dict[str, Any]:
    words = "".join(part.text for part in parts if isinstance(part, TextDelta))
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": join_arguments(part, parts)}}
        for part in parts
        if isinstance(part, ToolCall)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": words or (None if calls else ""), "refusal": None}
    return said | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def join_arguments(call: ToolCall, parts: Sequence[ChatPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ArgumentsDelta) and part.index == call.index)


def write_chat_chunks(call: CompletionInfo, index: int, said: ChatDelta, *, first: bool) -> Iterator[dict[str, Any]]:
    """Who speaks, if this is the `first` of the answer; what is said; why it ends, if it does."""
    if first:
        speaks = write_chunk(call, index, {"role": "assistant", "content": ""})
        yield speaks | (prompt_fields(said) if call.include_prompt_logprobs and not index else {})
    deltas = [write_delta(part) for part in said.parts] or ([{"content": ""}] if said.logprobs else [])
    for place, each in enumerate(deltas):
        yield write_chunk(call, index, each, said.logprobs if not place else ())
    if said.finish:
        yield write_chunk(call, index, {}, ending=finish_fields(said))


def write_delta(part: ChatPart) -> dict[str, Any]:
    match part:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCall(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def write_chunk(
    call: CompletionInfo,
    index: int,
    said: dict[str, Any],
    drawn: Sequence[TokenLogprobs] = (),
    ending: Mapping[str, Any] = UNFINISHED,
) -> dict[str, Any]:
    choice = {"index": index, "delta": said, "logprobs": write_logprobs(drawn), **ending}
    return add_null_usage(call, write_completion_object(call, "chat.completion.chunk", [choice]))


def finish_fields(said: ChatDelta) -> dict[str, Any]:
    reason = "tool_calls" if said.finish == "calls" else said.finish or None
    return {"finish_reason": reason} | ({"stop_reason": said.stop} if said.stop != "" else {})


def prompt_fields(said: ChatDelta) -> dict[str, Any]:
    return {"prompt_logprobs": write_prompt_logprobs(said.prompt_logprobs)}


def write_logprobs(drawn: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    if not drawn:
        return None
    return {
        "content": [
            write_scored_token(each.token) | {"top_logprobs": [write_scored_token(one) for one in each.top]}
            for each in drawn
        ],
        "refusal": None,
    }


def chat_usage(cost: Usage, thought: int) -> dict[str, Any]:
    return write_openai_usage(cost) | {"completion_tokens_details": {"reasoning_tokens": thought}}
