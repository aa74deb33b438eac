"""Chat prompts with tools and reasoning: the messages for the model's template, and the grammar of its answer.

A template that supports tools gets their list, and answers in its own call style. For any other template the tools are
described in a system message, and earlier calls and results become text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyhead.models.chat.chat_format import ChatFormat, ToolCallStyle
from polyhead.models.chat.template_functions import value_size

from ..core.errors import BadRequest
from ..core.grammar import MAX_REGEX_CHARS, MAX_TOOL_SCHEMA_CHARS, Grammar, Thinking
from ..core.model import Model
from ..structured.grammar_child import close_source, find_inexact_number, find_long_pattern
from .chat_parser import ExpectedOutput
from .generation_request import ChatMessages, GenerationRequest, ReasoningSettings, ToolDefinition, ToolOptions
from .prompts import reasoning_state

Message = Mapping[str, Any]
MAX_TOOL_CHARACTERS = 1 << 18  # characters of all tool definitions together
SPACE_REGEX = r"[ \n\r\t]*"
# the beginning of a call up to its name; some models write "type": "function" first
CALL_OPENING_REGEX = r'\{_("type"_:_"function"_,_)?"name"_:_"'.replace("_", SPACE_REGEX)
COMPACT_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON

INSTRUCTION = """You can call these functions, each described by a JSON object:
{tools}

To call one, answer with nothing but a JSON object: {{"name": <its name>, "arguments": <object of its arguments>}}
To call several, answer with a list of such objects. What they return comes in the next message."""


def fit_chat(request: GenerationRequest, model: Model) -> GenerationRequest:
    """Return the request of a conversation for this model's template. Raises BadRequest for what the model does not
    support.
    """
    [chat] = request.prompts
    assert isinstance(chat, ChatMessages)
    format = model.chat_format
    check_chat(request, chat, model)
    if ignores_reasoning(request, model):
        request = replace(request, reasoning=ReasoningSettings(is_shown=request.reasoning.is_shown))
    grammar = build_answer_grammar(request.tools, format, request.grammar)
    chat = add_tools(replace(chat, variables=template_variables(request.reasoning, chat)), request.tools, format)
    return replace(
        request, prompts=(chat,), grammar=grammar, thinking=choose_thinking(request.reasoning, format, grammar)
    )


def check_chat(request: GenerationRequest, chat: ChatMessages, model: Model) -> None:
    field, wanted = request.tools.field, request.reasoning.field
    check_tool_size([tool.as_template_object for tool in request.tools.offered], field)
    if request.reasoning.is_required and ignores_reasoning(request, model):
        raise BadRequest(f"{wanted}: the chat template of {model.name} knows no thinking", param=wanted)
    if chat.variables.get("documents") and not (model.chat and model.chat.uses_variable("documents")):
        raise BadRequest(f"documents: the chat template of {model.name} reads none", param="documents")


def check_tool_size(tools: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raise BadRequest if tools, or their schemas, have more characters together than a prompt may have of them."""
    if value_size(tools) > MAX_TOOL_CHARACTERS:
        raise BadRequest(f"{field}: may have at most {MAX_TOOL_CHARACTERS:,} characters", param=field)


def ignores_reasoning(request: GenerationRequest, model: Model) -> bool:
    """Whether the request asks for reasoning, which the model's template does not know."""
    return request.reasoning.mode == "on" and not model.chat_format.end


def expected_output(request: GenerationRequest, model: Model, tokens: Sequence[int]) -> ExpectedOutput | None:
    """Return what the answer to the prompt `tokens` may contain; None if it is text only, as outside of
    conversations.
    """
    [prompt, *_] = request.prompts
    if not isinstance(prompt, ChatMessages):
        return None
    names = frozenset(tool.name for tool in request.tools.callable)
    reasoning = reasoning_state(model, prompt, tokens)
    return (
        ExpectedOutput(model.chat_format, names, reasoning, request.reasoning.is_shown) if names or reasoning else None
    )


# Reasoning


def template_variables(reasoning: ReasoningSettings, chat: ChatMessages) -> dict[str, Any]:
    """Return the variables of the template for reasoning, under both names that are in use. Variables that the client
    sets itself take precedence.
    """
    on = reasoning.mode == "on"
    mode = {"enable_thinking": on, "thinking": on} if reasoning.mode else {}
    effort = {"reasoning_effort": reasoning.effort} if reasoning.effort else {}
    return {**mode, **effort, **chat.variables}


def choose_thinking(reasoning: ReasoningSettings, format: ChatFormat, grammar: Grammar | None) -> Thinking | None:
    """Return how the engine follows the reasoning; None unless its length is limited or a grammar applies to the text
    after it.
    """
    if not format.end or not (grammar or reasoning.mode == "off" or reasoning.budget >= 0):
        return None
    return Thinking(format.begin, format.end, 0 if reasoning.mode == "off" else reasoning.budget)


# Messages


def add_tools(chat: ChatMessages, tools: ToolOptions, format: ChatFormat) -> ChatMessages:
    """Add the tools to the chat, as the template supports them."""
    known = tools.offered if tools.choice != "none" else ()
    if format.listing:
        return replace(chat, tools=tuple(tool.as_template_object for tool in known))
    messages = tuple(calls_to_text(chat.messages, format.style))
    if not known:
        return replace(chat, messages=messages)
    instruction = INSTRUCTION.format(tools="\n".join(dump_json(tool.as_template_object["function"]) for tool in known))
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    system = {**first, "content": "\n\n".join(filter(None, (first["content"], instruction)))}
    return replace(chat, messages=(system, *(message for message in messages if message is not first)))


def calls_to_text(messages: Sequence[Message], style: ToolCallStyle) -> Iterator[Message]:
    """Write tool calls and their results as text. Several results become one message, since many templates require
    alternating roles.
    """
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
        yield message_to_text(message, style) if calls else message
    if returned:
        yield {"role": "user", "content": "\n\n".join(returned)}


def message_to_text(message: Message, style: ToolCallStyle) -> Message:
    """Return a message with tool calls as a text message."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [dump_json({"name": each["name"], style.key: each["arguments"]}) for each in functions]
    text = calls[0] if len(calls) == 1 else f"[{style.between.join(calls)}]"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (message["content"], text)))}


def dump_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadRequest("tools: something is nested too deeply", param="tools") from None


# Grammar of the answer


def build_answer_grammar(tools: ToolOptions, format: ChatFormat, document: Grammar | None) -> Grammar | None:
    """Return a grammar of answers in which tool calls have the right form.

    An answer without calls is free text or matches `document`. If a call is required, only calls are possible.
    """
    if not tools.callable:
        return document
    style, start = format.style, "free"
    if tools.choice == "required":
        start = "GAP calls"
    elif document:
        start = f"GAP ( calls | {document_rule(document, style)} )"
    calls = tagged_call_rules(style, tools.parallel) if style.begin else bare_call_rules(style, tools)
    gap = rf"GAP: /[ \n]{{0,{2 if format.end else 0}}}/"
    rules = [f"start: {start}", *calls, *tool_rules(tools.callable, style), gap]
    source = "\n".join(rules) + "\n"
    check_size(tools, source)
    is_alternative = document is not None and document.kind in ("schema", "open_schema") and tools.choice != "required"
    check_numbers([*parameter_grammars(tools), *([document] if document and is_alternative else [])])
    return Grammar("calls", source, tools.field)


def check_size(tools: ToolOptions, source: str) -> None:
    """Raise BadRequest if the schemas of the tools are too large to be compiled."""
    if len(source) > MAX_TOOL_SCHEMA_CHARS:
        message = (
            f"tools: their schemas must have at most {MAX_TOOL_SCHEMA_CHARS} characters together, have {len(source)}"
        )
        raise BadRequest(message, param="tools")
    for each in parameter_grammars(tools) if len(source) > MAX_REGEX_CHARS else ():
        if place := find_long_pattern(each.source, MAX_REGEX_CHARS):
            where = f"{each.field}{place}"
            raise BadRequest(f"{where}: must have at most {MAX_REGEX_CHARS} characters", param=where)


def check_numbers(schemas: Sequence[Grammar]) -> None:
    """Raise BadRequest for a number in a schema that would be another one in the answer."""
    for each in schemas:
        if fault := find_inexact_number(each.source):
            where = f"{each.field}{fault.place}"
            raise BadRequest(f"{where}: {fault.wrong}", param=where)


def tagged_call_rules(style: ToolCallStyle, parallel: bool) -> list[str]:
    """Return the rules for calls between tags, which may follow any text. After a begin tag there must be a call."""
    begin, end = dump_json(style.begin), dump_json("\n" + style.end)
    more = f" ( {dump_json(style.between)} {begin} call )*" if parallel else ""
    return [
        f"calls: {begin} call{more}",
        f'call: "\\n" tool {end}',
        "free: ( head call )* text" if parallel else "free: text | head call",
        f"head[lazy]: /(?s:.)*{escape_regex(style.begin)}/",
        "text: /(?s:.)*/",
    ]


def bare_call_rules(style: ToolCallStyle, tools: ToolOptions) -> list[str]:
    """Return the rules for calls that are the whole answer. Free text may begin like a call, with any space; the first
    tool name decides.
    """
    more = f" ( {dump_json(style.between)} tool )*" if tools.parallel else ""
    alone, listed = ("", f'{more} "]"') if style.listed else (more, "")
    mark = f"({escape_regex(style.mark)}{SPACE_REGEX})?" if style.mark else ""
    first, bracket = f"{SPACE_REGEX}{mark}{CALL_OPENING_REGEX}", rf"{SPACE_REGEX}\[{SPACE_REGEX}{CALL_OPENING_REGEX}"
    names = "|".join(escape_regex(tool.name) for tool in tools.callable)
    return [
        f"calls: tool{alone}" + (f' | "[" tool{listed}' if listed else ""),
        f"free: TEXT | FIRST ( OTHER | named{alone} )" + (f" | BRACKET ( OTHER | named{listed} )" if listed else ""),
        f"TEXT: /(?s:.)*/ & ~/{f'({first}|{bracket})' if listed else first}(?s:.)*/",
        f"FIRST: /{first}/",
        f"BRACKET: /{bracket}/",
        f'OTHER: /(?s:.)*/ & ~/({names})"(?s:.)*/',
    ]


def tool_rules(tools: Sequence[ToolDefinition], style: ToolCallStyle) -> Iterator[str]:
    """Yield a rule for a call of each tool: its name, then its arguments."""
    yield r'tool: "{\"name\": \"" named'
    yield "named: " + " | ".join(f"named_{index}" for index in range(len(tools)))
    for index, tool in enumerate(tools):
        head = dump_json(f'{tool.name}", "{style.key}": ')
        schema = dump_json({**tool.parameters, "type": "object", "x-guidance": COMPACT_JSON})
        schema = schema if tool.is_open else close_source(schema)
        schema = schema.replace("::=", r"\u003a:=")  # which llguidance would take for another kind of grammar
        yield f'named_{index}: {head} %json {schema} "}}"'


def parameter_grammars(tools: ToolOptions) -> list[Grammar]:
    """Return the schemas of the tools, each under its field in the request."""
    return [
        Grammar(tool.grammar_kind, dump_json(tool.parameters), tool.schema_path)
        for tool in tools.callable
        if tool.schema_path
    ]


def document_rule(document: Grammar, style: ToolCallStyle) -> str:
    """Return the rule of a document that may stand in place of calls. Raises BadRequest if the two could not be
    distinguished.
    """
    match document.kind if style.begin else "":
        case "object":
            return '%json {"type": "object"}'
        case "schema":
            return f"%json {close_source(document.source)}"
        case "open_schema":
            return f"%json {document.source}"
        case "choice":
            return " | ".join(dump_json(choice) for choice in json.loads(document.source))
    reason = 'together with tools that may be called or not; tool_choice "none" or "required" says which'
    raise BadRequest(f"{document.field}: is not supported {reason}", param=document.field)


def escape_regex(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return re.sub(r"([^\w\s<>])", r"\\\1", text)
