"""What OpenAI's chat answers: messages, whole or in deltas.

Knows no engine and no wire object.  The one idea: a streamed answer is the whole one cut up, so both are made of the
same parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....text.chat_parser import Arguments, Part, Thought, Utterance, Words
from ....text.chat_parser import Call as ToolCall
from ....text.detokenizer import Drawn, Usage
from ...shared.openai_errors import scored
from .write import Call, envelope, prompt_logprobs, streamed, usage

GOES_ON: Mapping[str, Any] = {"finish_reason": None}


def write_chat(call: Call, answers: Sequence[Utterance]) -> dict[str, Any]:
    choices = [
        {"index": index, "message": message(said.parts), "logprobs": logprobs(said.drawn), **ending(said)}
        for index, said in enumerate(answers)
    ]
    cost = sum((said.usage for said in answers), Usage())
    thought = sum(said.thought_tokens for said in answers)
    written = envelope(call, "chat.completion", choices) | {"usage": chat_usage(cost, thought)}
    return written | (prompt(answers[0]) if call.scores else {})


def message(parts: Sequence[Part]) -> dict[str, Any]:
    words = "".join(part.text for part in parts if isinstance(part, Words))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": arguments(part, parts)}}
        for part in parts
        if isinstance(part, ToolCall)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": words or (None if calls else ""), "refusal": None}
    return said | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def arguments(call: ToolCall, parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Arguments) and part.index == call.index)


def chunks_chat(call: Call, index: int, said: Utterance, *, first: bool) -> Iterator[dict[str, Any]]:
    """Who speaks, if this is the `first` of the answer; what is said; why it ends, if it does."""
    if first:
        speaks = chunk(call, index, {"role": "assistant", "content": ""})
        yield speaks | (prompt(said) if call.scores and not index else {})
    deltas = [delta(part) for part in said.parts] or ([{"content": ""}] if said.drawn else [])
    for place, each in enumerate(deltas):
        yield chunk(call, index, each, said.drawn if not place else ())
    if said.finish:
        yield chunk(call, index, {}, ending=ending(said))


def delta(part: Part) -> dict[str, Any]:
    match part:
        case Words(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case ToolCall(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chunk(
    call: Call, index: int, said: dict[str, Any], drawn: Sequence[Drawn] = (), ending: Mapping[str, Any] = GOES_ON
) -> dict[str, Any]:
    choice = {"index": index, "delta": said, "logprobs": logprobs(drawn), **ending}
    return streamed(call, envelope(call, "chat.completion.chunk", [choice]))


def ending(said: Utterance) -> dict[str, Any]:
    reason = "tool_calls" if said.finish == "calls" else said.finish or None
    return {"finish_reason": reason} | ({"stop_reason": said.stop} if said.stop != "" else {})


def prompt(said: Utterance) -> dict[str, Any]:
    return {"prompt_logprobs": prompt_logprobs(said.prompt)}


def logprobs(drawn: Sequence[Drawn]) -> dict[str, Any] | None:
    if not drawn:
        return None
    return {
        "content": [scored(each.token) | {"top_logprobs": [scored(one) for one in each.top]} for each in drawn],
        "refusal": None,
    }


def chat_usage(cost: Usage, thought: int) -> dict[str, Any]:
    return usage(cost) | {"completion_tokens_details": {"reasoning_tokens": thought}}
