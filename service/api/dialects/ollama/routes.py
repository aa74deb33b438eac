"""Routes of Ollama's API, under /api.  Models are not pulled, created or deleted there: see /admin."""

import time
import uuid
from operator import attrgetter

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import BadRequest
from ....core.model import Model
from ....core.request import Task
from ....text.answer_stream import collect_deltas
from ....text.encoder_inputs import EncodingRequest
from ....text.encoder_outputs import ScoreOutput
from ....text.generation_request import GenerationRequest
from ...shared.dialect import (
    Dialect,
    answer_threads,
    authorized_models,
    describe_body,
    read_body,
    record_model,
)
from ...shared.encoding_calls import JsonListBody, ReplyWriter, max_vector_bytes, start_replies, write_body
from ...shared.generation_calls import start_answers, write_json
from ...shared.output_items import stream_items
from ...shared.streaming import (
    JsonResponse,
    LineStream,
    StreamWriter,
    as_float32,
    encode_events,
    frame_line,
    run_while_connected,
)
from .read import read_chat, read_embed, read_embeddings, read_generate
from .wire import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaRequest,
    OllamaShowRequest,
    served_name,
)
from .write import (
    AnswerInfo,
    OllamaEvents,
    write_answer,
    write_loaded,
    write_ollama_error,
    write_running,
    write_shown,
    write_tag,
)

API_VERSION = "0.12.11"  # the version of Ollama whose API this is; some clients refuse older ones
TASKS: tuple[Task, ...] = ("generate", "embed")
router = APIRouter(tags=["Ollama"])


@router.post("/api/chat", openapi_extra=describe_body(OllamaChatRequest), summary="Answer a conversation.")
async def chat(request: Request) -> Response:
    wire = await read_body(request, OllamaChatRequest)
    return await run_while_connected(request, answer_chat(request, wire))


async def answer_chat(request: Request, wire: OllamaChatRequest) -> Response:
    model = find_model(request, wire, "generate")
    call = AnswerInfo("message", wire.model)
    if not wire.messages:
        return JsonResponse(write_loaded(call))
    return await answer(request, wire, model, read_chat(wire), call)


@router.post("/api/generate", openapi_extra=describe_body(OllamaGenerateRequest), summary="Answer a prompt.")
async def generate(request: Request) -> Response:
    wire = await read_body(request, OllamaGenerateRequest)
    return await run_while_connected(request, answer_generate(request, wire))


async def answer_generate(request: Request, wire: OllamaGenerateRequest) -> Response:
    model = find_model(request, wire, "generate")
    call = AnswerInfo("response", wire.model)
    if not (wire.prompt or wire.suffix):
        return JsonResponse(write_loaded(call))
    return await answer(request, wire, model, read_generate(wire, model), call)


async def answer(
    request: Request, wire: OllamaGenerationRequest, model: Model, generation: GenerationRequest, call: AnswerInfo
) -> Response:
    answers = await start_answers(request, wire, model, generation, f"ollama-{uuid.uuid4().hex}")
    if wire.stream:
        parts = stream_items(OllamaEvents(call), answers)
        return await LineStream.open(
            encode_events(parts, StreamWriter(answer_threads(request), write_ollama_error, frame_line))
        )
    [deltas] = await collect_deltas(answers, on_delta=call.mark)
    return await write_json(request, deltas, lambda: write_answer(call, deltas))


@router.post("/api/embed", openapi_extra=describe_body(OllamaEmbedRequest), summary="Texts as vectors of length 1.")
async def embed(request: Request) -> Response:
    wire = await read_body(request, OllamaEmbedRequest)
    return await run_while_connected(request, answer_embed(request, wire))


async def answer_embed(request: Request, wire: OllamaEmbedRequest) -> Response:
    began = time.perf_counter_ns()
    body = await write_vectors(request, wire, read_embed(wire))
    ending = {
        "total_duration": time.perf_counter_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": body.prompt_tokens,
    }
    before = b'{"model":%s,"embeddings":[' % orjson.dumps(wire.model)
    return body.response(before, b"]," + orjson.dumps(ending)[1:])


@router.post("/api/embeddings", openapi_extra=describe_body(OllamaEmbeddingsRequest), summary="A text as a vector.")
async def embeddings(request: Request) -> Response:
    wire = await read_body(request, OllamaEmbeddingsRequest)
    return await run_while_connected(request, answer_embeddings(request, wire))


async def answer_embeddings(request: Request, wire: OllamaEmbeddingsRequest) -> Response:
    body = await write_vectors(request, wire, read_embeddings(wire))
    return body.response(b'{"embedding":', b"}")


async def write_vectors(request: Request, wire: OllamaRequest, encoding: EncodingRequest) -> JsonListBody:
    model = find_model(request, wire, "embed")
    writing = ReplyWriter(
        write_one=write_vector, write_error=write_ollama_error, max_bytes=max_vector_bytes(model.width)
    )
    return await write_body(request, await start_replies(request, wire, model, encoding), writing, len(encoding.inputs))


def write_vector(output: ScoreOutput) -> object:
    return as_float32(output.values)


@router.get("/api/tags", summary="The served models that generate or embed.")
async def tags(request: Request) -> Response:
    return JsonResponse({"models": [write_tag(model) for model in listed_models(request)]})


@router.get("/api/ps", summary="The same models; all of them are loaded.")
async def running(request: Request) -> Response:
    return JsonResponse({"models": [write_running(model) for model in listed_models(request)]})


def listed_models(request: Request) -> list[Model]:
    return [model for model in authorized_models(request).models() if model.task in TASKS]


@router.post("/api/show", openapi_extra=describe_body(OllamaShowRequest), summary="One of the models.")
async def show(request: Request) -> Response:
    wire = await read_body(request, OllamaShowRequest)
    name = wire.model or wire.name
    if not name:
        raise BadRequest("model: is required", param="model")
    model = authorized_models(request).resolve(served_name(name), TASKS)
    return JsonResponse(write_shown(record_model(request, model)))


@router.get("/api/version", summary="The version of Ollama whose API this is.")
async def version() -> Response:
    return JsonResponse({"version": API_VERSION})


def find_model(request: Request, wire: OllamaRequest, task: Task) -> Model:
    return record_model(request, authorized_models(request).resolve(wire.model_name, [task]))


DIALECT = Dialect(
    name="Ollama", prefixes=("/api",), error=write_ollama_error, status=attrgetter("status"), router=router
)
