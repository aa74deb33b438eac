"""The Open Inference Protocol, version 2, over REST: health, descriptions of models, tensors in and out, and the
generate extension, under /v2.

Its wire objects are `oip_wire`, its answers `oip_write`, tensors `oip_tensors`; models are changed by
`oip_repository`.
"""

import uuid
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import partial
from operator import attrgetter
from typing import Any, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import NotFound, PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....resources.request_memory import STEP
from ....text.detokenizer import whole
from ...operations import health
from ...shared import generation_calls as generating
from ...shared.dialect import Dialect, about, body, permitted, server, takes, visit
from ...shared.encoding_calls import Replies, apart, piece_size, read, size_of
from ...shared.generation_calls import Answers
from ...shared.json_body import received, sized, value_of
from ...shared.streaming import EventStream, JsonResponse, Parts, answer, events
from .tensors import HEADER, Body, split
from .wire import TAKES, GenerateRequest, InferRequest, TextRequest, columns, read_generate, read_text
from .wire import read as asked
from .write import (
    MODEL_VERSION,
    check_outputs,
    chunk_text,
    kept,
    weight,
    write,
    write_error,
    write_model,
    write_server,
    write_text,
)

ALL = get_args(Task)
GENERATORS: tuple[Task, ...] = ("generate",)
REPOSITORY = ("model_repository",)  # where administrators have a key
router = APIRouter(tags=["Open Inference Protocol"])


@router.get("/v2", summary="What the server is.")
async def described(request: Request) -> Response:
    return JsonResponse(write_server(REPOSITORY if server(request).administered else ()))


@router.get("/v2/health/live", summary="Is the process worth keeping?")
async def live(request: Request) -> Response:
    fine = not health.server(request).dying()
    return JsonResponse({"live": fine}, 200 if fine else 503)


@router.get("/v2/health/ready", summary="Can it answer?")
async def ready(request: Request) -> Response:
    fine = not health.server(request).unready()
    return JsonResponse({"ready": fine}, 200 if fine else 503)


# of several lines the last comes first: what is longer is looked for before what takes any name
@router.get("/v2/models/{name:path}/ready", summary="Can this model answer?")
@router.get("/v2/models/{name:path}/versions/{version}/ready", summary="The same of its only version.")
async def model_ready(request: Request) -> Response:
    return JsonResponse({"name": named(request).name, "ready": True})


@router.get("/v2/models/{name:path}", summary="The tensors of a model.")
@router.get("/v2/models/{name:path}/versions/{version}", summary="The same of its only version.")
async def model_described(request: Request) -> Response:
    return JsonResponse(write_model(named(request)))


@router.post("/v2/models/{name:path}/infer", openapi_extra=takes(InferRequest), summary="Tensors in, tensors out.")
@router.post(
    "/v2/models/{name:path}/versions/{version}/infer",
    openapi_extra=takes(InferRequest),
    summary="The same of its only version.",
)
async def infer(request: Request) -> Response:
    text, rest = split(await received(request), request.headers.get(HEADER, ""))
    value = await value_of(text)

    async def work() -> Response:
        model = about(request, named(request))
        wire = await sized(len(text), lambda: TAKES[model.task].wire.read(value))
        check_outputs(wire, model)
        replies = await replied(request, wire, model, rest)
        every, sizes = zip(*replies, strict=True)
        return sent(await apart(sum(sizes), partial(write, wire, model, every)))

    return await answer(request, work())


TEXT = takes(TextRequest)


@router.post("/v2/models/{name:path}/generate", openapi_extra=TEXT, summary="Continue a text.")
@router.post(
    "/v2/models/{name:path}/versions/{version}/generate", openapi_extra=TEXT, summary="The same of its version."
)
async def generate(request: Request) -> Response:
    wire = await body(request, TextRequest)
    return await answer(request, generated(request, wire, stream=False))


@router.post("/v2/models/{name:path}/generate_stream", openapi_extra=TEXT, summary="Continue a text, piece by piece.")
@router.post(
    "/v2/models/{name:path}/versions/{version}/generate_stream", openapi_extra=TEXT, summary="The same of its version."
)
async def generate_stream(request: Request) -> Response:
    wire = await body(request, TextRequest)
    return await answer(request, generated(request, wire, stream=True))


async def generated(request: Request, wire: TextRequest, *, stream: bool) -> Response:
    model, call = about(request, named(request, GENERATORS)), f"generate-{uuid.uuid4().hex}"
    asked, work = read_text(wire, stream=stream), wire.options.work
    count, answers = await generating.begun(request, work, model, asked, call)
    if stream:
        return await EventStream.open(events(text_chunks(wire, model, answers), write_error))
    pieces = await whole(count, generating.kept(request, answers))
    return await generating.json_of(pieces, lambda: write_text(wire, model, pieces))


async def text_chunks(wire: TextRequest, model: Model, answers: Answers) -> AsyncGenerator[dict[str, Any], None]:
    """A client may want its events to be one."""
    told = wire.options.model_fields_set
    if "stream" in told and not wire.options.stream:
        [piece] = await whole(1, answers)
        yield chunk_text(wire, model, piece)
        return
    async with aclosing(answers):
        async for _, piece in answers:
            if piece.text or piece.finish:
                yield chunk_text(wire, model, piece)


def named(request: Request, tasks: Collection[Task] = ALL) -> Model:
    """The model in the path.  NotFound for another version than the one there is."""
    params = request.path_params
    model = permitted(request).resolve(params["name"], tasks)
    if params.get("version", MODEL_VERSION) != MODEL_VERSION:
        message = f"{model.name} has version {MODEL_VERSION} only, got {params['version'][:60]!r}"
        raise NotFound(message, param="version")
    return model


async def replied(request: Request, wire: InferRequest, model: Model, rest: bytes) -> list[tuple[Any, int]]:
    """Of each text's answer what is written of it, and about how many numbers take as long to write."""
    found = columns(wire, TAKES[model.task], rest, server(request).settings.max_batch_texts)
    work = wire.parameters.work
    if isinstance(wire, GenerateRequest):
        call = f"infer-{uuid.uuid4().hex}"
        count, answers = await generating.begun(request, work, model, read_generate(wire, found[0]), call)
        return [(piece, piece_size(piece)) for piece in await whole(count, answers)]
    return await all_kept(request, model, await read(request, work, model, asked(wire, found)))


async def all_kept(request: Request, model: Model, answers: Replies) -> list[tuple[Any, int]]:
    """What takes much memory is dropped as the answers come; memory for the rest, and for its JSON, is claimed."""
    every, claim, size = list[tuple[Any, int]](), visit(request).claim, 0
    async with aclosing(answers):
        async for answer in answers:
            if isinstance(answer, PolyheadError):
                raise answer
            numbers = size_of(answer)
            one = await apart(numbers, partial(kept, model, answer))
            every.append((one, numbers))
            size += weight(one)
            if size > STEP:
                claim.grow(size, "the answer")
                size = 0
    claim.grow(size, "the answer")
    return every


def sent(body: Body) -> Response:
    if not body.binary:
        return Parts([body.content])
    return Parts([body.content], media_type="application/octet-stream", headers={HEADER: str(body.json_bytes)})


DIALECT = Dialect(
    name="Open Inference Protocol",
    prefixes=("/v2",),
    error=write_error,
    status=attrgetter("status"),
    router=router,
)
