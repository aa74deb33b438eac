"""Routes of Hugging Face's inference tasks: POST /models/{name}, and / if exactly one served model fits.

A model has the tasks that its head can do.  Without a task in the path it is the model's first task, or the one whose
inputs or parameters the body has.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import cycle
from operator import attrgetter
from typing import Any, get_args

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import BadRequest, NotFound, PolyheadError, TooMany, WrongTask
from ....core.model import TASK_VERBS, Model
from ....core.request import Task
from ....text import similarity, zero_shot
from ....text.answer_delta import Usage
from ....text.encoder_inputs import EncoderInput, EncodingRequest, is_text
from ....text.encoder_outputs import EncoderOutput, ScoreOutput
from ...shared import generation_calls, pipeline_outputs
from ...shared.dialect import Dialect, answer_threads, authorized_models, describe_body, record_model, server
from ...shared.encoding_calls import (
    INLINE_NUMBERS,
    Replies,
    ReplyWriter,
    check_reply,
    compare_replies,
    reply_response,
    run_off_loop,
    start_replies,
    write_items,
)
from ...shared.explain_calls import ExplainCall, check_explain_enabled, compute_explanation, read_subject
from ...shared.hf_generation_write import stream_events, write_hf_error
from ...shared.json_body import receive_json
from ...shared.streaming import (
    EventStream,
    PartsResponse,
    StreamWriter,
    dump_chunks,
    encode_events,
    run_while_connected,
)
from ...shared.task_names import TASK_HEADS, TEXT2TEXT_FIELDS, TEXT_GENERATION, ZERO_SHOT, model_tasks
from . import wire as hf_wire
from . import write as hf_write

ReplyTransform = Callable[[Any, Model, Replies], Replies]
MAX_LISTED_LABELS, MAX_LISTED_CHARS = 20, 500  # labels in a message, and their characters
ALL_TASKS: tuple[Task, ...] = get_args(Task)


def keep_replies(wire: Any, model: Model, answers: Replies) -> Replies:  # noqa: ARG001
    return answers


async def score_classes(wire: hf_wire.ZeroShotRequest, model: Model, answers: Replies) -> Replies:
    """Combine the answers to each text's hypotheses into one: a score for each class."""
    entails, count = model.entailment_label, len(wire.parameters.classes)
    assert entails is not None, "the model has the task"
    async with aclosing(answers):
        async for group in batch_replies(answers, count):
            failed = next((one for one in group if isinstance(one, PolyheadError)), None)
            if failed is not None:
                yield failed
                continue
            replies = [check_reply(one, ScoreOutput) for one in group]
            logits = np.array([one.values for one in replies])
            scores = zero_shot.class_probabilities(logits, entails, several=wire.parameters.multi_label)
            yield ScoreOutput(scores, sum((one.usage for one in replies), Usage()))


async def score_labels(wire: hf_wire.LabelTextRequest, model: Model, answers: Replies) -> Replies:  # noqa: ARG001
    """The probabilities of each text's labels: they sum to 1, or each is on its own."""
    close = pipeline_outputs.sigmoid if wire.parameters.multi_label else zero_shot.softmax
    async with aclosing(answers):
        async for one in answers:
            if isinstance(one, ScoreOutput):
                yield ScoreOutput(close(np.asarray(one.values, np.float64)).tolist(), one.usage)
            else:
                yield one


async def score_choices(wire: hf_wire.MultipleChoiceRequest, model: Model, answers: Replies) -> Replies:  # noqa: ARG001
    """Combine the scores of each text's choices into one answer: their probabilities."""
    async with aclosing(answers):
        async for group in batch_replies(answers, *(len(each.choices) for each in wire.questions)):
            failed = next((one for one in group if isinstance(one, PolyheadError)), None)
            if failed is not None:
                yield failed
                continue
            replies = [check_reply(one, ScoreOutput) for one in group]
            shares = zero_shot.softmax(np.array([one.values[0] for one in replies]))
            yield ScoreOutput(shares.tolist(), sum((one.usage for one in replies), Usage()))


async def batch_replies(answers: Replies, *counts: int) -> AsyncGenerator[list[EncoderOutput | PolyheadError], None]:
    """Lists of as many answers as `counts` say, again and again."""
    group: list[EncoderOutput | PolyheadError] = []
    sizes = cycle(counts)
    size = next(sizes, 0)
    async for one in answers:
        group.append(one)
        if len(group) == size:
            yield group
            group, size = [], next(sizes)


async def score_similarity(request: Request, answers: Replies) -> Replies:
    """The cosine of the first vector and each other one; all have length one."""
    scores, tokens = await compare_replies(request, answers, ScoreOutput, similarity.cosine_similarities)
    yield ScoreOutput(scores, Usage(tokens))


@dataclass(frozen=True)
class Pipeline:
    """A task of encoders: its wire object, its request, the transformation of the replies, and its writer.  With
    `compares` the replies are compared with the first one.
    """

    wire: type[hf_wire.PipelineRequest]
    read: Callable[[Any], EncodingRequest]
    write: Callable[[Any, Model], ReplyWriter]
    transform: ReplyTransform = keep_replies
    compares: bool = False


PIPELINES: Mapping[str, Pipeline] = {
    "text-classification": Pipeline(hf_wire.ClassifyRequest, hf_wire.read_classify, hf_write.classify_writer),
    ZERO_SHOT: Pipeline(hf_wire.ZeroShotRequest, hf_wire.read_zero_shot, hf_write.zero_shot_writer, score_classes),
    "multiple-choice": Pipeline(
        hf_wire.MultipleChoiceRequest, hf_wire.read_multiple_choice, hf_write.choice_writer, score_choices
    ),
    "token-classification": Pipeline(
        hf_wire.TokenClassifyRequest, hf_wire.read_token_classify, hf_write.token_classify_writer
    ),
    "question-answering": Pipeline(hf_wire.QuestionRequest, hf_wire.read_question, hf_write.question_writer),
    "fill-mask": Pipeline(hf_wire.FillMaskRequest, hf_wire.read_fill_mask, hf_write.fill_mask_writer),
    "feature-extraction": Pipeline(hf_wire.FeatureRequest, hf_wire.read_feature, hf_write.feature_writer),
    "sentence-similarity": Pipeline(
        hf_wire.SentenceSimilarityRequest, hf_wire.read_sentence_similarity, hf_write.feature_writer, compares=True
    ),
}

# Of models that read labels of the request, by what their head answers.
LABEL_PIPELINES: Mapping[Task, Pipeline] = {
    "label_texts": Pipeline(
        hf_wire.LabelTextRequest, hf_wire.read_label_texts, hf_write.zero_shot_writer, score_labels
    ),
    "label_spans": Pipeline(hf_wire.LabelSpanRequest, hf_wire.read_label_spans, hf_write.token_classify_writer),
}


def choose_pipeline(task: str, model: Model) -> Pipeline:
    return LABEL_PIPELINES.get(model.task) or PIPELINES[task]


# Task selection


def check_task_name(name: str) -> None:
    if name and name not in TASK_HEADS:
        raise NotFound(f"no task is called {name[:100]!r}; there are: {', '.join(TASK_HEADS)}")


def infer_task(value: Any, model: Model) -> str:
    """The model's task; if it has two, the fields of the body decide."""
    tasks = model_tasks(model)
    if "sentence-similarity" in tasks and has_field(value, "inputs", "sentences"):
        return "sentence-similarity"
    if has_field(value, "parameters", "candidate_labels") and model.task == "classify":
        return ZERO_SHOT
    return tasks[0]


def has_field(value: Any, field: str, name: str) -> bool:
    inner = value.get(field) if isinstance(value, dict) else None
    return isinstance(inner, dict) and name in inner


def check_has_tasks(model: Model) -> None:
    """Raises WrongTask for a model that no task of this API is for."""
    if not model_tasks(model):
        raise WrongTask(f"{model.name} can {TASK_VERBS[model.task]}, which is no task of this API", param="model")


def check_model_has(model: Model, task: str) -> None:
    """Raises WrongTask, with the model's tasks, if `task` is not among them."""
    tasks = model_tasks(model)
    if task in tasks:
        return
    message = f"{model.name} has {join_task_names(tasks)}, not {task}"
    if model.task in TASK_HEADS[task] and model.task != "generate":
        labels = ", ".join(model.labels[:MAX_LISTED_LABELS])[:MAX_LISTED_CHARS]
        message += f", which needs a label that starts with entail; there are: {labels}"
    raise WrongTask(message, param="model")


def join_task_names(tasks: list[str]) -> str:
    return f"the task{'s' if len(tasks) > 1 else ''} {' and '.join(tasks)}"


def read_wire(value: Any, model: Model, task: str) -> Any:
    """The wire object of a task.  If the inputs are not valid, the message names the model's tasks."""
    kind: type[hf_wire.PipelineRequest] = hf_wire.HfGenerateRequest
    if task in PIPELINES:
        kind = choose_pipeline(task, model).wire
    elif task in TEXT2TEXT_FIELDS:
        kind = hf_wire.Text2TextRequest
    try:
        return kind.read(value)
    except BadRequest as error:
        if not error.param.startswith("inputs"):
            raise
        raise BadRequest(
            f"{error.message}; {model.name} has {join_task_names(model_tasks(model))}", param=error.param
        ) from None


# Routes


router = APIRouter(tags=["Hugging Face"])
INFER_BODY = describe_body(
    *(pipeline.wire for pipeline in (*PIPELINES.values(), *LABEL_PIPELINES.values())),
    hf_wire.HfGenerateRequest,
    hf_wire.Text2TextRequest,
)


# decorators run from the last to the first: the longer paths must be matched before {name:path}
@router.post("/models/{name:path}", openapi_extra=INFER_BODY, summary="What the model's head can do.")
@router.post("/models/{name:path}/pipeline/{task}", openapi_extra=INFER_BODY, summary="One of a model's tasks.")
@router.post("/pipeline/{task}", openapi_extra=INFER_BODY, summary="A task, of the only model that has it.")
@router.post("/", openapi_extra=INFER_BODY, summary="The task of the only model.")
async def infer(request: Request) -> Response:
    text = await receive_json(request)
    value = await text.run(text.parse)
    task = request.path_params.get("task", "")
    check_task_name(task)

    async def work() -> Response:
        model = find_model(request, task)
        check_has_tasks(model)
        task_name = task or infer_task(value, model)
        check_model_has(model, task_name)
        wire = await text.run(lambda: read_wire(value, model, task_name))
        if task_name == TEXT_GENERATION:
            return await answer_generation(request, wire, model)
        if task_name in TEXT2TEXT_FIELDS:
            return await answer_text2text(request, wire, model, TEXT2TEXT_FIELDS[task_name])
        return await answer_pipeline(request, wire, model, choose_pipeline(task_name, model))

    return await run_while_connected(request, work())


def find_model(request: Request, task: str) -> Model:
    """The model in the path, or the only one that fits."""
    registry, name = authorized_models(request), request.path_params.get("name", "")
    if name:
        return record_model(request, registry.resolve(name, ALL_TASKS))
    return record_model(request, registry.resolve_only(TASK_HEADS[task] if task else ALL_TASKS))


async def answer_pipeline(
    request: Request, wire: hf_wire.PipelineRequest, model: Model, pipeline: Pipeline
) -> Response:
    if isinstance(wire, hf_wire.LabelledRequest):
        check_pair_count(wire, server(request).settings.max_batch_texts)
    if isinstance(wire, hf_wire.MultipleChoiceRequest):
        check_choice_count(wire, server(request).settings.max_batch_texts)
    encoding = replace(pipeline.read(wire), partial=wire.partial and not wire.is_single)
    options = wire.read_explain() if isinstance(wire, hf_wire.ExplainableRequest) else None
    if options is not None:
        check_explain_enabled(request)
    answers, writing = await start_replies(request, wire, model, encoding), pipeline.write(wire, model)
    if options is None:
        count = len(wire.inputs) if isinstance(wire.inputs, list) else 1
        replies = score_similarity(request, answers) if pipeline.compares else pipeline.transform(wire, model, answers)
        return await reply_response(request, replies, writing, count)
    result = await anext(answers)
    [given] = encoding.inputs
    explain_call = ExplainCall(request, wire, model, options)
    explanation = await compute_explanation(explain_call, await read_subject(explain_call, as_text(given)))
    # weights are many numbers: write them on a thread
    return await run_off_loop(request, INLINE_NUMBERS + 1, lambda: add_explanation(writing, result, explanation))


def add_explanation(
    writing: ReplyWriter, result: EncoderOutput | PolyheadError, explanation: dict[str, Any]
) -> Response:
    """The answer to the one input together with its explanation."""
    items = write_items(writing, 0, [result])
    result_items = items if writing.is_single else [b"[", *items, b"]"]
    return PartsResponse([b'{"result":', *result_items, *dump_chunks(explanation, b',"explanation":', b"}")])


def as_text(given: EncoderInput) -> str | tuple[str, str]:
    assert is_text(given), "pipelines read no token ids"
    return given


def check_pair_count(wire: hf_wire.LabelledRequest, limit: int) -> None:
    """Raises TooMany if there are too many pairs of texts and labels, before any pair is made."""
    texts, classes = len(hf_wire.list_texts(wire.inputs)), len(hf_wire.read_classes(wire))
    if texts * classes > limit:
        message = f"inputs: {texts} texts with {classes} labels are {texts * classes} pairs, at most {limit} a call"
        raise TooMany(message, param="inputs")


def check_choice_count(wire: hf_wire.MultipleChoiceRequest, limit: int) -> None:
    """Raises TooMany if the texts have too many choices in all, before any pair is made."""
    count = sum(len(each.choices) for each in wire.questions)
    if count > limit:
        raise TooMany(f"inputs: the texts have {count} choices together, at most {limit} a call", param="inputs")


async def answer_generation(request: Request, wire: hf_wire.HfGenerateRequest, model: Model) -> Response:
    if wire.parameters.adapter_id:
        registry, adapter = authorized_models(request), wire.parameters.adapter_id
        model = record_model(request, generation_calls.resolve_adapter(registry, model.name, adapter))
    call = f"generate-{uuid.uuid4().hex}"
    generation = generation_calls.set_default_length(request, hf_wire.read_hf_generate(wire))
    answers = await generation_calls.start_answers(request, wire, model, generation, call)
    if isinstance(wire.inputs, str) and wire.stream:
        parts = stream_events(wire.parameters, model, wire.inputs, answers, generation.token_limit)
        return await EventStream.open(encode_events(parts, StreamWriter(answer_threads(request), write_hf_error)))
    found = await generation_calls.collect_answers(request, generation, answers)
    return await generation_calls.write_json(request, found, lambda: hf_write.write_hf_generate(wire, model, found))


async def answer_text2text(request: Request, wire: hf_wire.Text2TextRequest, model: Model, field: str) -> Response:
    assert model.generation_defaults is not None
    call = f"write-{uuid.uuid4().hex}"
    generation = hf_wire.read_text2text(wire, model.generation_defaults)
    answers = await generation_calls.start_answers(request, wire, model, generation, call)
    found = await generation_calls.collect_answers(request, generation, answers)
    return await generation_calls.write_json(request, found, lambda: hf_write.write_text2text(wire, field, found))


DIALECT = Dialect(
    name="Hugging Face",
    prefixes=("/", "/models", "/pipeline"),
    error=write_hf_error,
    status=attrgetter("status"),
    router=router,
)
