"""Wire objects of OpenAI's decisions API.

The input is read as text: a message of the user alone as it is, several items each with its role. Images are refused by
the name of their type.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictStr

from ....decisions.question import MAX_OPTIONS, MAX_QUESTIONS
from ...shared.dialect import ClientName, EngineRequest, Wire, between, max_items, must_be
from ...shared.question_fields import AskedQuestion, CacheSalt, QuestionName, json_text
from ...shared.tagged_unions import TaggedUnion, parts_validator
from ...shared.tool_options import CalledName

MAX_ITEMS, MAX_PARTS = 4096, 256
Status = Literal["", "in_progress", "completed", "incomplete"]  # no effect, as ids, namespaces and phases


class CacheBreakpoint(Wire):
    mode: Literal["explicit"] = "explicit"


class CacheOptions(Wire):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class TextPart(Wire):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint = CacheBreakpoint()  # no effect: prefixes are always cached


class JsonPart(Wire):
    """An object, or a list of objects, which is read as JSON."""

    type: Literal["input_json"]
    data: Annotated[dict[str, Any] | list[dict[str, Any]], must_be("an object or a list of objects")]

    @property
    def text(self) -> str:
        return json_text(self.data)


class OutputTextPart(Wire):
    type: Literal["output_text"]
    text: str


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


InputPart = TextPart | JsonPart | OutputTextPart | RefusalPart
Parts = Annotated[
    list[Annotated[InputPart, TaggedUnion((TextPart, JsonPart, OutputTextPart, RefusalPart))]],
    Field(fail_fast=True),
    parts_validator("input_text"),
    max_items(MAX_PARTS),
]
QuestionParts = Annotated[
    list[Annotated[TextPart | JsonPart, TaggedUnion((TextPart, JsonPart))]],
    Field(fail_fast=True),
    parts_validator("input_text"),
    max_items(MAX_PARTS),
]


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["", "commentary", "final_answer"] = ""


class ToolCall(Wire):
    """A call of a function, or of a tool whose input is a text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: CalledName
    arguments: str = ""
    input: str = ""
    id: str = ""
    namespace: str = ""
    status: Status = ""


class ToolOutput(Wire):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts
    id: str = ""
    status: Status = ""


InputItem = MessageItem | ToolCall | ToolOutput
InputItems = Annotated[
    list[Annotated[InputItem, TaggedUnion((MessageItem, ToolCall, ToolOutput), default_type="message")]],
    Field(fail_fast=True),
    max_items(MAX_ITEMS),
]


def as_items(value: Any) -> Any:
    """A string stands for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class NamedQuestion(AskedQuestion):
    instructions: QuestionParts
    name: QuestionName = ""


class PredicateQuestion(NamedQuestion):
    """How likely it is that a statement about the input is true."""

    type: Literal["predicate"]


class ChoiceOption(Wire):
    """A string and a boolean of the same text are different values."""

    value: Annotated[StrictStr | StrictBool, must_be("a string, true or false")]
    description: str = ""


class ChoiceQuestion(NamedQuestion):
    """Which of some values fits the input."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, fail_fast=True), max_items(MAX_OPTIONS)]


class ScoreLevel(Wire):
    label: str
    description: str = ""


class ScoreQuestion(NamedQuestion):
    """Which of some levels, the lowest first, fits the input."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, fail_fast=True), max_items(MAX_OPTIONS)]


QUESTION_KINDS = (PredicateQuestion, ChoiceQuestion, ScoreQuestion)
WireQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionsRequest(EngineRequest):
    """Questions about one input. Extensions: `permutations` and `explain` of a question, `cache_salt`, and
    `min_confidence`: a question whose answer is less certain is answered by a refusal.
    """

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[InputItems, BeforeValidator(as_items)]
    questions: Annotated[
        list[Annotated[WireQuestion, TaggedUnion(QUESTION_KINDS)]],
        Field(min_length=1, fail_fast=True),
        max_items(MAX_QUESTIONS),
    ]
    min_confidence: Annotated[float, between(0, 1)] = 0.0
    cache_salt: CacheSalt = ""
    # no effect: the answer does not depend on them
    prompt_cache_key: ClientName = ""
    prompt_cache_options: CacheOptions = CacheOptions()
    safety_identifier: ClientName = ""
