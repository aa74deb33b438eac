"""Routes of the Open Inference Protocol, version 2, over REST, under /v2.

They are health, model metadata, inference with tensors, and the generate extension.
"""

import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from operator import attrgetter
from typing import Any, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import NotFound, PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....resources.request_memory import ANSWER_CLAIM_STEP
from ....text.answer_stream import AnswerStream, collect_deltas, join_answers
from ...operations import health
from ...shared import generation_calls
from ...shared.dialect import (
    Dialect,
    answer_threads,
    authorized_models,
    check_path_model,
    describe_body,
    read_body,
    record_model,
    request_context,
    server,
)
from ...shared.encoding_calls import Replies, answer_size, json_response, reply_size, run_off_loop, start_replies
from ...shared.json_body import open_json, receive_body_in_turn
from ...shared.streaming import (
    EventStream,
    JsonResponse,
    PartsResponse,
    StreamWriter,
    encode_events,
    run_while_connected,
)
from ...shared.task_names import label_cost
from .tensors import LENGTH_HEADER, TensorBody, split_body
from .wire import (
    HEAD_INPUTS,
    InferRequest,
    OipGenerateRequest,
    TextRequest,
    read_columns,
    read_infer,
    read_oip_generate,
    read_text_request,
)
from .write import (
    MODEL_VERSION,
    check_outputs,
    class_bytes,
    keep_reply,
    row_bytes,
    write_config,
    write_infer,
    write_oip_error,
    write_oip_model,
    write_server,
    write_statistics,
    write_text_chunk,
    write_text_response,
)

ALL_TASKS: tuple[Task, ...] = get_args(Task)
TENSOR_TASKS: tuple[Task, ...] = tuple(HEAD_INPUTS)
GENERATORS: tuple[Task, ...] = ("generate",)
STATISTICS_BYTES = 64 << 10  # of a model, as Python objects and as JSON
REPOSITORY_EXTENSION = ("model_repository",)  # with an admin key
router = APIRouter(tags=["Open Inference Protocol"])


@router.get("/v2", summary="What the server is.")
async def described(request: Request) -> Response:
    return JsonResponse(write_server(REPOSITORY_EXTENSION if server(request).has_admin_key else ()))


@router.get("/v2/health/live", summary="Is the process worth keeping?")
async def live(request: Request) -> Response:
    fine = not health.app_state(request).fatal_reasons()
    return JsonResponse({"live": fine}, 200 if fine else 503)


@router.get("/v2/health/ready", summary="Can it answer?")
async def ready(request: Request) -> Response:
    fine = not health.app_state(request).unready_reasons()
    return JsonResponse({"ready": fine}, 200 if fine else 503)


# decorators run from the last to the first: the longer paths must be matched before {name:path}
@router.get("/v2/models/{name:path}/ready", summary="Can this model answer?")
@router.get("/v2/models/{name:path}/versions/{version}/ready", summary="The same of its only version.")
async def model_ready(request: Request) -> Response:
    return JsonResponse({"name": find_model(request, ALL_TASKS).name, "ready": True})


@router.get("/v2/models/{name:path}/config", summary="The configuration of a model, as Triton writes it.")
@router.get("/v2/models/{name:path}/versions/{version}/config", summary="The same of its only version.")
async def model_configured(request: Request) -> Response:
    return JsonResponse(write_config(find_model(request)))


@router.get("/v2/models/{name:path}/stats", summary="What was counted of a model, as Triton's statistics.")
@router.get("/v2/models/{name:path}/versions/{version}/stats", summary="The same of its only version.")
async def model_statistics(request: Request) -> Response:
    check_statistics_access(request)
    return write_all_statistics(request, [find_model(request, ALL_TASKS)])


@router.get("/v2/models/stats", summary="The same of every model.")
async def all_statistics(request: Request) -> Response:
    check_statistics_access(request)
    return write_all_statistics(request, authorized_models(request).models())


def check_statistics_access(request: Request) -> None:
    """Statistics are metrics.  Raises Forbidden where these need a key with a scope that the request's has not."""
    keys = health.app_state(request).keys
    keys.authorize(request_context(request).key, keys.apply_rule("metrics"))


def write_all_statistics(request: Request, models: Sequence[Model]) -> Response:
    request_context(request).claim.grow(STATISTICS_BYTES * len(models), "the list")
    metrics = server(request).metrics
    return JsonResponse(
        {"model_stats": [write_statistics(model, metrics.inference_counts(model.name)) for model in models]}
    )


@router.get("/v2/models/{name:path}", summary="The tensors of a model.")
@router.get("/v2/models/{name:path}/versions/{version}", summary="The same of its only version.")
async def model_described(request: Request) -> Response:
    model = find_model(request)
    return await json_response(request, label_cost(model), lambda: write_oip_model(model))


@router.post(
    "/v2/models/{name:path}/infer", openapi_extra=describe_body(InferRequest), summary="Tensors in, tensors out."
)
@router.post(
    "/v2/models/{name:path}/versions/{version}/infer",
    openapi_extra=describe_body(InferRequest),
    summary="The same of its only version.",
)
async def infer(request: Request) -> Response:
    content, rest = split_body(await receive_body_in_turn(request), request.headers.get(LENGTH_HEADER, ""))
    text = await open_json(request, content)
    value = await text.run(text.parse)

    async def work() -> Response:
        model = record_model(request, find_model(request))
        wire = await text.run(lambda: HEAD_INPUTS[model.task].wire.read(value))
        check_path_model(wire.model_name, request.path_params["name"], "model_name")
        check_outputs(wire, model)
        replies = await collect_rows(request, wire, model, rest)
        every, sizes = zip(*replies, strict=True)
        return tensor_response(await run_off_loop(request, sum(sizes), partial(write_infer, wire, model, every)))

    return await run_while_connected(request, work())


TEXT_BODY = describe_body(TextRequest)


@router.post("/v2/models/{name:path}/generate", openapi_extra=TEXT_BODY, summary="Continue a text.")
@router.post(
    "/v2/models/{name:path}/versions/{version}/generate", openapi_extra=TEXT_BODY, summary="The same of its version."
)
async def generate(request: Request) -> Response:
    wire = await read_body(request, TextRequest)
    return await run_while_connected(request, answer_generation(request, wire, stream=False))


@router.post(
    "/v2/models/{name:path}/generate_stream", openapi_extra=TEXT_BODY, summary="Continue a text, piece by piece."
)
@router.post(
    "/v2/models/{name:path}/versions/{version}/generate_stream",
    openapi_extra=TEXT_BODY,
    summary="The same of its version.",
)
async def generate_stream(request: Request) -> Response:
    wire = await read_body(request, TextRequest)
    return await run_while_connected(request, answer_generation(request, wire, stream=True))


async def answer_generation(request: Request, wire: TextRequest, *, stream: bool) -> Response:
    model, call = record_model(request, find_model(request, GENERATORS)), f"generate-{uuid.uuid4().hex}"
    generation, work = read_text_request(wire, stream=stream), wire.options.engine_request
    answers = await generation_calls.start_answers(request, work, model, generation, call)
    if stream:
        return await EventStream.open(
            encode_events(stream_text(wire, model, answers), StreamWriter(answer_threads(request), write_oip_error))
        )
    pieces = await generation_calls.collect_answers(request, generation, answers)
    return await generation_calls.write_json(request, pieces, lambda: write_text_response(wire, model, pieces))


async def stream_text(wire: TextRequest, model: Model, answers: AnswerStream) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as events; a client may request a single event."""
    given = wire.options.model_fields_set
    if "stream" in given and not wire.options.stream:
        [piece] = await join_answers(await collect_deltas(answers))
        yield write_text_chunk(wire, model, piece)
        return
    async with aclosing(answers):
        async for _, piece in answers:
            if piece.text or piece.finish:
                yield write_text_chunk(wire, model, piece)


def find_model(request: Request, tasks: Collection[Task] = TENSOR_TASKS) -> Model:
    """The model in the path.  Raises NotFound for a version that does not exist."""
    params = request.path_params
    model = authorized_models(request).resolve(params["name"], tasks)
    if params.get("version", MODEL_VERSION) != MODEL_VERSION:
        message = f"{model.name} has version {MODEL_VERSION} only, got {params['version'][:60]!r}"
        raise NotFound(message, param="version")
    return model


async def collect_rows(request: Request, wire: InferRequest, model: Model, rest: bytes) -> list[tuple[Any, int]]:
    """What is kept of each text's answer, with the approximate cost of writing it in numbers."""
    found = read_columns(wire, HEAD_INPUTS[model.task], rest, server(request).settings.max_batch_texts)
    work = wire.parameters.engine_request
    if isinstance(wire, OipGenerateRequest):
        call = f"infer-{uuid.uuid4().hex}"
        generation = read_oip_generate(wire, found[0])
        answers = await generation_calls.start_answers(request, work, model, generation, call)
        pieces = await generation_calls.collect_answers(request, generation, answers)
        return [(piece, answer_size(piece)) for piece in pieces]
    replies = await start_replies(request, work, model, read_infer(wire, found))
    return await collect_encoder_rows(request, model, replies, class_bytes(wire, model))


async def collect_encoder_rows(
    request: Request, model: Model, answers: Replies, more_bytes: int
) -> list[tuple[Any, int]]:
    """Convert answers as they come, to free memory early; claims memory for the rest and for its JSON, and `more_bytes`
    for each text.
    """
    every, claim, size = list[tuple[Any, int]](), request_context(request).claim, 0
    async with aclosing(answers):
        async for answer in answers:
            if isinstance(answer, PolyheadError):
                raise answer
            numbers = reply_size(answer)
            one = await run_off_loop(request, numbers, partial(keep_reply, model, answer))
            every.append((one, numbers))
            size += row_bytes(one) + more_bytes
            if size > ANSWER_CLAIM_STEP:
                claim.grow(size, "the answer")
                size = 0
    claim.grow(size, "the answer")
    return every


def tensor_response(body: TensorBody) -> Response:
    if not body.binary:
        return PartsResponse(body.parts)
    return PartsResponse(
        body.parts, media_type="application/octet-stream", headers={LENGTH_HEADER: str(body.json_bytes)}
    )


DIALECT = Dialect(
    name="Open Inference Protocol",
    prefixes=("/v2",),
    error=write_oip_error,
    status=attrgetter("status"),
    router=router,
)
