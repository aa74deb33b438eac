"""Converts the items and questions of OpenAI's decisions API."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....core.errors import BadRequest, EmptyInput
from ....decisions.question import DecisionRequest, Option, Question
from ...shared.question_fields import json_text
from .wire import (
    ChoiceOption,
    ChoiceQuestion,
    DecisionsRequest,
    InputItem,
    InputPart,
    MessageItem,
    PredicateQuestion,
    ScoreQuestion,
    ToolCall,
    ToolOutput,
    WireQuestion,
)

YES_OR_NO: tuple[Option, ...] = (Option("true"), Option("false"))


def count_options(wire: DecisionsRequest) -> int:
    """How many options all questions have, which are read from as many objects."""
    listed = (
        each.choices
        if isinstance(each, ChoiceQuestion)
        else each.levels
        if isinstance(each, ScoreQuestion)
        else YES_OR_NO
        for each in wire.questions
    )
    return sum(map(len, listed))


def read_decisions(wire: DecisionsRequest) -> DecisionRequest:
    """The request below the dialect. Raises EmptyInput for an input without text, and BadRequest."""
    text = "\n\n".join(write_items(wire.input))
    if not text.strip():
        raise EmptyInput("input: is empty, there is nothing to decide about", param="input")
    questions = tuple(read_question(f"questions[{index}]", each) for index, each in enumerate(wire.questions))
    return DecisionRequest("input", text, questions, salt=wire.cache_salt, min_confidence=wire.min_confidence)


def write_items(items: Sequence[InputItem]) -> Iterator[str]:
    """The text of each item: a message of the user alone as it is, several with their roles."""
    if len(items) == 1 and isinstance(items[0], MessageItem) and items[0].role == "user":
        yield join_text(items[0].content)
        return
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        match item:
            case MessageItem(role=role, content=content):
                yield f"{role}: {join_text(content)}"
            case ToolCall(name=name, arguments=arguments, input=given):
                names[item.call_id] = name
                yield f"call of {name}: {arguments or given}"
            case ToolOutput(call_id=call, output=output):
                if call not in names:
                    where = f"input[{index}].call_id"
                    raise BadRequest(f"{where}: no call before it has the id {call[:60]!r}", param=where)
                yield f"result of {names[call]}: {join_text(output)}"


def join_text(parts: Sequence[InputPart]) -> str:
    return "\n".join(part.text for part in parts)


def read_question(field: str, wire: WireQuestion) -> Question:
    instructions = join_text(wire.instructions)
    if not instructions.strip():
        raise EmptyInput(f"{field}.instructions: is empty, there is nothing to ask", param=f"{field}.instructions")
    match wire:
        case PredicateQuestion():
            options, options_field = YES_OR_NO, ""
        case ChoiceQuestion(choices=choices):
            options, options_field = tuple(name_options(f"{field}.choices", choices)), "choices"
        case ScoreQuestion(levels=levels):
            options, options_field = tuple(Option(level.label, level.description) for level in levels), "levels"
    asked = Question(field, wire.name, wire.type, instructions, options, wire.permutations, wire.explain_parameters)
    return replace(asked, options_field=options_field)


def name_options(field: str, choices: Sequence[ChoiceOption]) -> Iterator[Option]:
    """Options by their values: a text as it is, but as JSON where it would be read as a boolean."""
    seen = set[tuple[type, str | bool]]()
    for index, choice in enumerate(choices):
        where = f"{field}[{index}].value"
        if (key := (type(choice.value), choice.value)) in seen:
            raise BadRequest(f"{where}: occurs twice; each must be different", param=where)
        seen.add(key)
        is_plain = isinstance(choice.value, str) and choice.value not in ("true", "false")
        yield Option(str(choice.value) if is_plain else json_text([choice.value])[1:-1], choice.description)
