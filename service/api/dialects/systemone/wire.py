"""Wire objects of /v1/systemone, with the extensions of vLLM's server."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ....core.errors import BadRequest, EmptyInput
from ....decisions.question import MAX_OPTIONS, MAX_QUESTIONS, DecisionRequest, Option, Question
from ...shared.dialect import EngineRequest, NeutralValues, Wire, between, max_items, must_be
from ...shared.question_fields import MAX_NAME_CHARS, AskedQuestion, CacheSalt, json_text
from ...shared.tagged_unions import TaggedUnion

Content = Annotated[str | dict[str, Any] | list[Any], must_be("a text, an object or a list")]
YES, NO = "yes", "no"
MAX_ID_CHARS = 1000
StateId = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class NoulCriteria(Wire):
    """What counts as a yes and as a no."""

    true: Content = ""
    false: Content = ""


class NoulQuestion(AskedQuestion):
    """A question to be answered by yes or no, or a statement that is true or false."""

    type: Literal["noul"]
    instructions: Content = ""
    criteria: NoulCriteria = NoulCriteria()

    @property
    def options(self) -> tuple[Option, ...]:
        return Option(YES, json_text(self.criteria.true)), Option(NO, json_text(self.criteria.false))


class ChoiceQuestion(AskedQuestion):
    """One of several options: `criteria` has a description, or null, for each name."""

    type: Literal["choice"]
    instructions: Content = ""
    criteria: Annotated[dict[str, Content | None], Field(min_length=1), max_items(MAX_OPTIONS)]

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(Option(name, json_text(description)) for name, description in self.criteria.items())


class ScoreQuestion(AskedQuestion):
    """A level: `criteria` describes each, the lowest first."""

    type: Literal["score"]
    instructions: Content = ""
    criteria: Annotated[list[Content], Field(min_length=1), max_items(MAX_OPTIONS)]

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(Option(json_text(level)) for level in self.criteria)


QUESTION_KINDS = (NoulQuestion, ChoiceQuestion, ScoreQuestion)
WireQuestion = Annotated[NoulQuestion | ChoiceQuestion | ScoreQuestion, TaggedUnion(QUESTION_KINDS)]


class SystemOneRequest(EngineRequest):
    """Questions about one state. Two fields of a question are extensions: over `permutations` orders of its options the
    probabilities are averaged, and `explain` explains the chosen one.
    """

    unsupported: ClassVar[NeutralValues] = {
        "assets": ({},),
        "images": ([],),
        "audio": ([],),
        "videos": ([],),
        "temperature": (1,),
        "chat_template_kwargs": ({}, {"enable_thinking": False}),
    }

    model: str = ""
    state: Content
    questions: Annotated[dict[str, WireQuestion], Field(min_length=1), max_items(MAX_QUESTIONS)]
    instructions: str = ""
    cache_salt: CacheSalt = ""
    joint: bool = False
    request_id: str = ""  # no effect: the header X-Request-Id has it


class SystemOneBatch(SystemOneRequest):
    """The first line of a body with many states, which are on the lines after it."""

    state: Annotated[Literal[""], must_be("on the lines after this one")] = ""


LineNumber = Annotated[int, between(-(1 << 63), (1 << 63) - 1)]


class StateLine(Wire):
    """A line after the first. `id` names the state in the answer."""

    state: Content
    id: Annotated[StateId | LineNumber, must_be(f"a string of at most {MAX_ID_CHARS} characters or a number")] = ""


def count_options(wire: SystemOneRequest) -> int:
    """How many options all questions have, which are read from as many values."""
    return sum(2 if isinstance(asked, NoulQuestion) else len(asked.criteria) for asked in wire.questions.values())


def read_systemone(wire: SystemOneRequest) -> DecisionRequest:
    """The request below the dialect. Raises EmptyInput for an empty state, and BadRequest for a bad name."""
    return replace(read_questions(wire), state=read_state(wire.state))


def read_questions(wire: SystemOneRequest) -> DecisionRequest:
    """The same without a state."""
    questions = tuple(read_question(name, question) for name, question in wire.questions.items())
    return DecisionRequest("state", "", questions, wire.instructions, wire.cache_salt, is_joint=wire.joint)


def read_state(given: Content) -> str:
    """The state as text. Raises EmptyInput if it is empty."""
    state = json_text(given)
    if not state.strip():
        raise EmptyInput("state: is empty, there is nothing to decide about", param="state")
    return state


def read_question(name: str, wire: NoulQuestion | ChoiceQuestion | ScoreQuestion) -> Question:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        message = f"names of questions must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}"
        raise BadRequest(f"questions: {message}", param="questions")
    field = f"questions.{name}"
    kind: Literal["predicate", "choice", "score"] = "predicate" if wire.type == "noul" else wire.type
    return Question(
        field, name, kind, json_text(wire.instructions), wire.options, wire.permutations, wire.explain_parameters
    )
