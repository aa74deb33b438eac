"""Tools that an answer may call, and thoughts before it: how the model is told, and what its answer must look like.

Knows no HTTP and no dialect's words.  The one idea: a template that lists tools is given them and calls them in its
own style; to any other they are told in a system message, and what was called before in words.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polyhead.models.chat.chat_format import Format, Style
from polyhead.models.chat.template_functions import weight

from ..core.errors import BadRequest
from ..core.grammar import LONGEST_REGEX, LONGEST_TOOLS, Grammar, Thinking
from ..core.model import Model
from ..structured.grammar_child import long_pattern
from .chat_parser import Expected
from .prompts import Chat, Continuation, thinks

Message = Mapping[str, Any]
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LARGEST = 1 << 18  # characters of all tools together
SPACE = r"[ \n\r\t]*"
# of a call, until its name; some models say first that it is of a function
OPENING = r'\{_("type"_:_"function"_,_)?"name"_:_"'.replace("_", SPACE)
TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON

INSTRUCTION = """You can call these functions, each described by a JSON object:
{tools}

To call one, answer with nothing but a JSON object: {{"name": <its name>, "arguments": <object of its arguments>}}
To call several, answer with a list of such objects. What they return comes in the next message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, with the JSON schema of its arguments, which calls keep to; `place` is the wire's name for that."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    place: str = ""

    @property
    def told(self) -> dict[str, Any]:
        """As templates know it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call: any of `offered`, or of those in `only`; at most once unless `parallel`.

    `field` is the wire's name for them.  With the choice "none" the model is not told of any.
    """

    offered: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    only: frozenset[str] = frozenset()
    parallel: bool = True
    field: str = "tools"

    @property
    def callable(self) -> tuple[Tool, ...]:
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.offered if not self.only or tool.name in self.only)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Whether the model thinks before it answers ("": as its template says), for at most `budget` tokens.

    `field` is the wire's name for what asks for it, `effort` what templates are told of it.
    """

    mode: Literal["", "on", "off"] = ""
    budget: int = -1
    effort: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation to be gone on with: `asked` has one prompt, a Chat."""

    asked: Continuation
    tools: Tools = Tools()
    reasoning: Reasoning = Reasoning()


def fitted(talk: Talk, model: Model) -> Continuation:
    """`talk` in the words of the model's template.  BadRequest for what cannot be asked of it."""
    [chat] = talk.asked.prompts
    assert isinstance(chat, Chat)
    format = model.format
    check(talk, chat, model)
    grammar = called(talk.tools, format, talk.asked.grammar)
    chat = told(replace(chat, variables=variables(talk.reasoning, chat)), talk.tools, format)
    return replace(talk.asked, prompts=(chat,), grammar=grammar, thinking=thinking(talk.reasoning, format, grammar))


def check(talk: Talk, chat: Chat, model: Model) -> None:
    field, wanted = talk.tools.field, talk.reasoning.field
    if weight([tool.told for tool in talk.tools.offered]) > LARGEST:
        raise BadRequest(f"{field}: may have at most {LARGEST:,} characters", param=field)
    if talk.reasoning.mode == "on" and not model.format.end:
        raise BadRequest(f"{wanted}: the chat template of {model.name} knows no thinking", param=wanted)
    if chat.variables.get("documents") and not (model.chat and model.chat.reads("documents")):
        raise BadRequest(f"documents: the chat template of {model.name} reads none", param="documents")


def expected(asked: Continuation, tools: Tools, model: Model, tokens: Sequence[int]) -> Expected:
    """What may be in an answer to `tokens`, which are the prompt."""
    names = frozenset(tool.name for tool in tools.callable)
    return Expected(model.format, names, thinks(model, asked.prompts[0], tokens))


# Thoughts


def variables(reasoning: Reasoning, chat: Chat) -> dict[str, Any]:
    """What templates are told, by the two names they have for it; what was said to the template itself comes first."""
    on = reasoning.mode == "on"
    mode = {"enable_thinking": on, "thinking": on} if reasoning.mode else {}
    effort = {"reasoning_effort": reasoning.effort} if reasoning.effort else {}
    return {**mode, **effort, **chat.variables}


def thinking(reasoning: Reasoning, format: Format, grammar: Grammar | None) -> Thinking | None:
    """Of no interest to the engine unless it is to end in time, or something is to come after it."""
    if not format.end or not (grammar or reasoning.mode == "off" or reasoning.budget >= 0):
        return None
    return Thinking(format.begin, format.end, 0 if reasoning.mode == "off" else reasoning.budget)


# Messages


def told(chat: Chat, tools: Tools, format: Format) -> Chat:
    """With the tools, as the template has them."""
    known = tools.offered if tools.choice != "none" else ()
    if format.listing:
        return replace(chat, tools=tuple(tool.told for tool in known))
    messages = tuple(worded(chat.messages, format.style))
    if not known:
        return replace(chat, messages=messages)
    instruction = INSTRUCTION.format(tools="\n".join(written(tool.told["function"]) for tool in known))
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    system = {**first, "content": "\n\n".join(filter(None, (first["content"], instruction)))}
    return replace(chat, messages=(system, *(message for message in messages if message is not first)))


def worded(messages: Sequence[Message], style: Style) -> Iterator[Message]:
    """Calls and what they returned in words; what several returned is one message, since many templates want turns."""
    names: dict[str, str] = {}
    returned: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "The function")
            returned.append(f"{name} returned:\n{message['content']}")
            continue
        if returned:
            yield {"role": "user", "content": "\n\n".join(returned)}
            returned = []
        calls = message.get("tool_calls", ())
        names |= {call.get("id", ""): call["function"]["name"] for call in calls}
        yield spelled(message, style) if calls else message
    if returned:
        yield {"role": "user", "content": "\n\n".join(returned)}


def spelled(message: Message, style: Style) -> Message:
    """A message that calls tools as text that does."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [written({"name": each["name"], style.key: each["arguments"]}) for each in functions]
    text = calls[0] if len(calls) == 1 else f"[{style.between.join(calls)}]"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message["content"], text)))}


def written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadRequest("tools: something is nested too deeply", param="tools") from None


# What an answer must look like


def called(tools: Tools, format: Format, document: Grammar | None) -> Grammar | None:
    """A grammar of the answers that call tools as they may be called.

    An answer that calls none is free, or a `document`; where it must call one there is no room for that.
    """
    if not tools.callable:
        return document
    style, start = format.style, "free"
    if tools.choice == "required":
        start = "GAP calls"
    elif document:
        start = f"GAP ( calls | {form(document, style)} )"
    calls = tagged(style, tools.parallel) if style.begin else bare(style, tools)
    gap = rf"GAP: /[ \n]{{0,{2 if format.end else 0}}}/"
    rules = [f"start: {start}", *calls, *spellings(tools.callable, style), gap]
    source = "\n".join(rules) + "\n"
    check_size(tools, source)
    return Grammar("lark", source, tools.field)


def check_size(tools: Tools, source: str) -> None:
    """BadRequest where the schemas are too much to be compiled."""
    if len(source) > LONGEST_TOOLS:
        message = f"tools: their schemas must have at most {LONGEST_TOOLS} characters together, have {len(source)}"
        raise BadRequest(message, param="tools")
    for each in parts(tools) if len(source) > LONGEST_REGEX else ():
        if place := long_pattern(each.source, LONGEST_REGEX):
            where = f"{each.field}{place}"
            raise BadRequest(f"{where}: must have at most {LONGEST_REGEX} characters", param=where)


def tagged(style: Style, parallel: bool) -> list[str]:
    """Calls between tags, in the middle of anything: once one has begun it is a call."""
    begin, end = written(style.begin), written("\n" + style.end)
    more = f" ( {written(style.between)} {begin} call )*" if parallel else ""
    return [
        f"calls: {begin} call{more}",
        f'call: "\\n" tool {end}',
        "free: ( head call )* text" if parallel else "free: text | head call",
        f"head[lazy]: /(?s:.)*{expression(style.begin)}/",
        "text: /(?s:.)*/",
    ]


def bare(style: Style, tools: Tools) -> list[str]:
    """Calls that are the whole answer.  A free one may begin as they do, with any space: the first name tells."""
    more = f" ( {written(style.between)} tool )*" if tools.parallel else ""
    alone, listed = ("", f'{more} "]"') if style.listed else (more, "")
    mark = f"({expression(style.mark)}{SPACE})?" if style.mark else ""
    first, bracket = f"{SPACE}{mark}{OPENING}", rf"{SPACE}\[{SPACE}{OPENING}"
    names = "|".join(expression(tool.name) for tool in tools.callable)
    return [
        f"calls: tool{alone}" + (f' | "[" tool{listed}' if listed else ""),
        f"free: TEXT | FIRST ( OTHER | named{alone} )" + (f" | BRACKET ( OTHER | named{listed} )" if listed else ""),
        f"TEXT: /(?s:.)*/ & ~/{f'({first}|{bracket})' if listed else first}(?s:.)*/",
        f"FIRST: /{first}/",
        f"BRACKET: /{bracket}/",
        f'OTHER: /(?s:.)*/ & ~/({names})"(?s:.)*/',
    ]


def spellings(tools: Sequence[Tool], style: Style) -> Iterator[str]:
    """A rule for a call of each, its name and arguments in this order."""
    yield r'tool: "{\"name\": \"" named'
    yield "named: " + " | ".join(f"named_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        head = written(f'{tool.name}", "{style.key}": ')
        schema = written({**tool.parameters, "type": "object", "x-guidance": TIGHT})
        schema = schema.replace("::=", r"\u003a:=")  # which would make it another kind of grammar
        yield f'named_{index}: {head} %json {schema} "}}"'


def parts(tools: Tools) -> list[Grammar]:
    """The schemas of the tools, each by the name of its place."""
    return [Grammar("schema", written(tool.parameters), tool.place) for tool in tools.callable if tool.place]


def form(document: Grammar, style: Style) -> str:
    """A document that may stand in the place of calls.  BadRequest where the two could not be told apart."""
    match document.kind if style.begin else "":
        case "object":
            return '%json {"type": "object"}'
        case "schema":
            return f"%json {document.source}"
        case "choice":
            return " | ".join(written(choice) for choice in json.loads(document.source))
    said = 'together with tools that may be called or not; tool_choice "none" or "required" says which'
    raise BadRequest(f"{document.field}: is not done {said}", param=document.field)


def expression(text: str) -> str:
    """A regular expression of `text` alone."""
    return re.sub(r"([^\w\s<>])", r"\\\1", text)
