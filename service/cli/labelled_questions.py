"""Reads labelled questions: rows of JSON lines with a state, questions as /v1/systemone has them, and right answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyhead.models.core.errors import ModelError

from ..api.dialects.systemone.wire import SystemOneRequest, read_systemone
from ..config.yaml_file import YamlFileError, read_yaml
from ..core.errors import BadRequest
from ..decisions.question import Question
from .labelled_files import MAX_LISTED, LabelledRow, read_rows, shorten_repr

ROW_FIELDS = ("state", "instructions", "questions", "answers")


@dataclass(frozen=True)
class LabelledState:
    """One row: the body of its request, the text, and its questions with the numbers of their right options.

    Questions without an answer are not in the body.
    """

    row: LabelledRow
    body: Mapping[str, Any]
    text: str
    questions: Sequence[tuple[Question, int]]


def read_labelled_states(path: Path, questions: Path | None) -> list[LabelledState]:
    """Read all rows. Raises ModelError, which names the line and the field.

    `questions` is a YAML file of questions for rows that have none of their own.
    """
    common = read_questions(questions) if questions else {}
    return [read_state(row, common) for row in read_rows(path)]


def read_questions(path: Path) -> Mapping[str, Any]:
    """The questions of a YAML file, by name."""
    try:
        return read_yaml(str(path)).values
    except YamlFileError as error:
        raise ModelError(f"--questions: {error}") from None


def read_state(row: LabelledRow, common: Mapping[str, Any]) -> LabelledState:
    if unknown := sorted(row.values.keys() - set(ROW_FIELDS)):
        raise row.field_error(shorten_repr(unknown[0]), f"is not a known field; there are: {', '.join(ROW_FIELDS)}")
    answers, questions = (read_object(row, field) for field in ("answers", "questions"))
    known = {**common, **questions}
    for name in answers:
        if name not in known:
            there = ", ".join(list(known)[:MAX_LISTED]) or "none"
            raise row.field_error(f"answers.{name}", f"there is no question of this name; there are: {there}")
    if not answers:
        raise row.field_error("answers", "is empty; at least one answer is needed")
    body = {name: row.values[name] for name in ("state", "instructions") if row.has_field(name)}
    body |= {"questions": {name: known[name] for name in answers}}
    try:
        request = read_systemone(SystemOneRequest.read(body))
    except BadRequest as error:
        raise ModelError(f"{row.file}, line {row.line}: {error.message}") from None
    labels = [(question, read_answer(row, question, answers[question.name])) for question in request.questions]
    return LabelledState(row, body, f"{request.instructions}\n\n{request.state}", labels)


def read_object(row: LabelledRow, field: str) -> Mapping[str, Any]:
    value = row.values.get(field) or {}
    if not isinstance(value, dict):
        raise row.field_error(field, f"an object is expected, not {shorten_repr(value)}")
    return value


def read_answer(row: LabelledRow, question: Question, answer: Any) -> int:
    """The number of the right option: of a predicate true or false, of a choice a name, of a score a level."""
    names = [option.name for option in question.options]
    if question.kind == "predicate" and isinstance(answer, bool):
        return 0 if answer else 1
    if question.kind == "choice" and isinstance(answer, str) and answer in names:
        return names.index(answer)
    if question.kind == "score" and type(answer) is int and 0 <= answer < len(names):
        return answer
    more = ", ..." if len(names) > MAX_LISTED else ""
    expected = {
        "predicate": "true or false",
        "choice": f"one of {', '.join(names[:MAX_LISTED])}{more}",
        "score": f"a level from 0 to {len(names) - 1}",
    }[question.kind]
    raise row.field_error(f"answers.{question.name}", f"{expected} is expected, not {shorten_repr(answer)}")
