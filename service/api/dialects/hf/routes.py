"""The dialect of Hugging Face's inference tasks: POST /models/{name}, and / when one served model fits.

Its wire objects and what they ask are `hf_wire`, its answers `hf_write`.  The one idea: a table of tasks, of which a
model has those that its head can do; an address without a task means the model's first, or the one that its inputs or
parameters have the shape of.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, get_args

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ....concurrency.outcome import on_thread
from ....core.errors import BadRequest, NotFound, PolyheadError, TooMany, WrongTask
from ....core.model import Model
from ....core.request import Task
from ....text import similarity, zero_shot
from ....text.detokenizer import Usage, whole
from ....text.inputs import Input, Reading, is_text
from ....text.pipelines import Reply, Scores
from ...shared import generation_calls as generating
from ...shared.dialect import Dialect, about, permitted, server, takes
from ...shared.encoding_calls import Replies, Writing, items_of, kinded, read, written
from ...shared.explain_calls import Question, check_on, explained
from ...shared.hf_generation_write import chunks, write_error
from ...shared.json_body import received, sized, value_of
from ...shared.streaming import EventStream, Parts, answer, dumps_sliced, events
from ...shared.task_names import GENERATION, HEADS, WRITTEN, ZERO_SHOT, tasks_of
from . import wire as asked
from . import write as said

Through = Callable[[Any, Model, Replies], Replies]
MOST_LISTED, LONGEST_LISTED = 20, 500  # labels in a message, and their characters
ALL: tuple[Task, ...] = get_args(Task)


def untouched(wire: Any, model: Model, answers: Replies) -> Replies:  # noqa: ARG001
    return answers


async def by_class(wire: asked.ZeroShotCall, model: Model, answers: Replies) -> Replies:
    """The answers to a text's hypotheses, made one: a score for each class."""
    entails, count = zero_shot.entailment(model.labels), len(wire.parameters.classes)
    assert entails is not None, "the model has the task"
    async with aclosing(answers):
        async for some in gathered(answers, count):
            failed = next((one for one in some if isinstance(one, PolyheadError)), None)
            if failed is not None:
                yield failed
                continue
            known = [kinded(one, Scores) for one in some]
            logits = np.array([one.values for one in known])
            scores = zero_shot.probabilities(logits, entails, several=wire.parameters.multi_label)
            yield Scores(scores, sum((one.usage for one in known), Usage()))


async def gathered(answers: Replies, count: int) -> AsyncGenerator[list[Reply | PolyheadError], None]:
    """`count` at a time."""
    some: list[Reply | PolyheadError] = []
    async for one in answers:
        some.append(one)
        if len(some) == count:
            yield some
            some = []


async def nearness(wire: Any, model: Model, answers: Replies) -> Replies:  # noqa: ARG001
    """How near the first vector the others are; all have length one."""
    async with aclosing(answers):
        known = [kinded(one, Scores) async for one in answers]
    yield Scores(similarity.cosines(known), sum((one.usage for one in known), Usage()))


@dataclass(frozen=True)
class Pipeline:
    """A task of encoders: how it is asked, what becomes of the replies, how it is answered."""

    wire: type[asked.Call]
    read: Callable[[Any], Reading]
    write: Callable[[Any, Model], Writing]
    through: Through = untouched


PIPELINES: Mapping[str, Pipeline] = {
    "text-classification": Pipeline(asked.ClassifyCall, asked.read_classify, said.write_classify),
    ZERO_SHOT: Pipeline(asked.ZeroShotCall, asked.read_zero_shot, said.write_zero_shot, by_class),
    "token-classification": Pipeline(asked.LabelCall, asked.read_label, said.write_label),
    "question-answering": Pipeline(asked.AnswerCall, asked.read_answer, said.write_answer),
    "fill-mask": Pipeline(asked.FillCall, asked.read_fill, said.write_fill),
    "feature-extraction": Pipeline(asked.EmbedCall, asked.read_embed, said.write_vector),
    "sentence-similarity": Pipeline(asked.LikenessCall, asked.read_likeness, said.write_vector, nearness),
}


# Which task


def check_task(name: str) -> None:
    if name and name not in HEADS:
        raise NotFound(f"no task is called {name[:100]!r}; there are: {', '.join(HEADS)}")


def meant(value: Any, model: Model) -> str:
    """The model's task, by the shape of what came where it has two."""
    tasks = tasks_of(model)
    if "sentence-similarity" in tasks and has(value, "inputs", "sentences"):
        return "sentence-similarity"
    if has(value, "parameters", "candidate_labels") and model.task == "classify":
        return ZERO_SHOT
    return tasks[0]


def has(value: Any, field: str, name: str) -> bool:
    inner = value.get(field) if isinstance(value, dict) else None
    return isinstance(inner, dict) and name in inner


def check_has(model: Model, task: str) -> None:
    """Raises WrongTask with the tasks that the model has, if this is not among them."""
    tasks = tasks_of(model)
    if task in tasks:
        return
    message = f"{model.name} has {listed(tasks)}, not {task}"
    if model.task in HEADS[task] and model.task != "generate":
        labels = ", ".join(model.labels[:MOST_LISTED])[:LONGEST_LISTED]
        message += f", which needs a label that starts with entail; there are: {labels}"
    raise WrongTask(message, param="model")


def listed(tasks: list[str]) -> str:
    return f"the task{'s' if len(tasks) > 1 else ''} {' and '.join(tasks)}"


def wire_of(value: Any, model: Model, task: str) -> Any:
    """The wire object of a task.  What is wrong with the inputs may be that they are another task's."""
    kind = PIPELINES[task].wire if task in PIPELINES else asked.WriteCall if task in WRITTEN else asked.GenerateCall
    try:
        return kind.read(value)
    except BadRequest as error:
        if not error.param.startswith("inputs"):
            raise
        raise BadRequest(f"{error.message}; {model.name} has {listed(tasks_of(model))}", param=error.param) from None


# The way between


router = APIRouter(tags=["Hugging Face"])
TAKES = takes(*(pipeline.wire for pipeline in PIPELINES.values()), asked.GenerateCall, asked.WriteCall)


# the last line comes first: what is longer is looked for before what takes any name
@router.post("/models/{name:path}", openapi_extra=TAKES, summary="What the model's head can do.")
@router.post("/models/{name:path}/pipeline/{task}", openapi_extra=TAKES, summary="One of a model's tasks.")
@router.post("/pipeline/{task}", openapi_extra=TAKES, summary="A task, of the only model that has it.")
@router.post("/", openapi_extra=TAKES, summary="The task of the only model.")
async def infer(request: Request) -> Response:
    content = await received(request)
    value = await value_of(content)
    task = request.path_params.get("task", "")
    check_task(task)

    async def work() -> Response:
        model = named(request, task)
        mine = task or meant(value, model)
        check_has(model, mine)
        wire = await sized(len(content), lambda: wire_of(value, model, mine))
        if mine == GENERATION:
            return await generated(request, wire, model)
        if mine in WRITTEN:
            return await rewritten(request, wire, model, WRITTEN[mine])
        return await piped(request, wire, model, PIPELINES[mine])

    return await answer(request, work())


def named(request: Request, task: str) -> Model:
    """The model in the path, or the only one that fits."""
    registry, name = permitted(request), request.path_params.get("name", "")
    return about(request, registry.resolve(name, ALL) if name else registry.only(HEADS[task] if task else ALL))


async def piped(request: Request, wire: asked.Call, model: Model, pipeline: Pipeline) -> Response:
    if isinstance(wire, asked.ZeroShotCall):
        check_pairs(wire, server(request).settings.max_batch_texts)
    reading = replace(pipeline.read(wire), partial=wire.partial and not wire.is_one)
    why = wire.why() if isinstance(wire, asked.Explainable) else None
    if why is not None:
        check_on(request)
    answers, writing = await read(request, wire, model, reading), pipeline.write(wire, model)
    if why is None:
        count = len(wire.inputs) if isinstance(wire.inputs, list) else 1
        return await written(request, pipeline.through(wire, model, answers), writing, count)
    result = await anext(answers)
    [given] = reading.inputs
    said = await explained(Question(request, wire, model, why), texts(given))
    return await on_thread(lambda: beside(writing, result, said))  # weights are many numbers: not on the event loop


def beside(writing: Writing, result: Reply | PolyheadError, explanation: dict[str, Any]) -> Response:
    """The answer to the one input, and why it is so."""
    written = items_of(writing, 0, [result])
    before = b'{"result":%s,"explanation":' % (written if writing.alone else b"[%s]" % written)
    return Parts([before, dumps_sliced(explanation), b"}"])


def texts(given: Input) -> str | tuple[str, str]:
    assert is_text(given), "pipelines read no token ids"
    return given


def check_pairs(wire: asked.ZeroShotCall, most: int) -> None:
    """Raises TooMany before any pair is made: each of the two lists may be short enough, and all pairs too many."""
    texts, classes = len(asked.texts_of(wire.inputs)), len(asked.classes_of(wire))
    if texts * classes > most:
        message = f"inputs: {texts} texts with {classes} labels are {texts * classes} pairs, at most {most} a call"
        raise TooMany(message, param="inputs")


async def generated(request: Request, wire: asked.GenerateCall, model: Model) -> Response:
    if wire.parameters.adapter_id:
        model = about(request, generating.adapted(permitted(request), model.name, wire.parameters.adapter_id))
    call = f"generate-{uuid.uuid4().hex}"
    continuation = generating.lasting(request, asked.read_generate(wire))
    count, answers = await generating.begun(request, wire, model, continuation, call)
    if isinstance(wire.inputs, str) and wire.stream:
        parts = chunks(wire.parameters, model, wire.inputs, answers, continuation.longest)
        return await EventStream.open(events(parts, write_error))
    found = await whole(count, generating.kept(request, answers))
    return await generating.json_of(found, lambda: said.write_generate(wire, model, found))


async def rewritten(request: Request, wire: asked.WriteCall, model: Model, field: str) -> Response:
    assert model.customs is not None
    call = f"write-{uuid.uuid4().hex}"
    count, answers = await generating.begun(request, wire, model, asked.read_write(wire, model.customs), call)
    found = await whole(count, answers)
    return await generating.json_of(found, lambda: said.write_text(wire, field, found))


DIALECT = Dialect(
    name="Hugging Face",
    prefixes=("/", "/models", "/pipeline"),
    error=write_error,
    status=attrgetter("status"),
    router=router,
)
