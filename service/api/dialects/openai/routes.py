"""Routes of the OpenAI dialect: completions, chat, embeddings and models, under /v1."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import PolyheadError
from ....core.model import Model
from ....core.request import OutputForm, Task
from ....resources.request_memory import BYTES_PER_WRITTEN_BYTE, json_size
from ....text.answer_delta import TokenLogprobs, Usage
from ....text.answer_stream import AnswerStream
from ....text.encoder_outputs import EncoderOutput, SeveralOutputs
from ....text.tokenization import Decoding
from ...shared import generation_calls
from ...shared.dialect import (
    Dialect,
    answer_threads,
    authorized_models,
    normalize_inputs,
    record_model,
    request_context,
    server,
    text_processor,
)
from ...shared.encoding_calls import (
    INLINE_NUMBERS,
    ReplyWriter,
    json_response,
    max_vector_bytes,
    run_off_loop,
    start_replies,
    write_body,
)
from ...shared.explain_calls import ExplainCall, check_explain_enabled, explain_completion
from ...shared.openai_errors import write_openai_error
from ...shared.openai_sampling import SampledRequest
from ...shared.post_routes import add_post_routes
from ...shared.streaming import EventStream, JsonResponse, StreamWriter, encode_events
from ...shared.task_names import label_cost
from .chat_answers import chat_usage, write_chat, write_chat_chunks
from .wire import (
    EMBEDDING_FIELDS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    choose_prompt,
    read_chat,
    read_completion,
    read_embedding,
)
from .write import (
    CompletionInfo,
    system_fingerprint,
    write_completion,
    write_completion_chunk,
    write_embedding,
    write_models,
    write_openai_model,
    write_openai_usage,
    write_usage_chunk,
)

OVERHEAD_BYTES = 64  # bytes of an embedding's object without its numbers
DONE = b"data: [DONE]\n\n"
router = APIRouter(tags=["OpenAI"])


@add_post_routes(router, "/v1/completions", CompletionRequest, "Continue prompts.")
async def answer_completion(request: Request, wire: CompletionRequest) -> Response:
    generation, options = read_completion(wire), wire.read_explain()
    if options is not None:
        check_explain_enabled(request)
    echo_texts = await read_echoes(request, wire) if wire.echo else ()
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    call = replace(make_info("cmpl", wire, model), echoes=echo_texts, include_logprobs=wire.logprobs >= 0)
    answers = await generation_calls.start_answers(request, wire, model, generation, call.id)
    if wire.stream:
        return await EventStream.open(encode_events(stream_completion(call, answers), stream_writer(request)))
    pieces = await generation_calls.collect_answers(request, generation, answers, wire.n)

    def write() -> dict[str, Any]:
        return write_completion(
            call, pieces if call.include_logprobs else [replace(piece, logprobs=()) for piece in pieces]
        )

    if options is not None:
        tokens = [token.id for token in pieces[0].logprobs]
        explain_call = ExplainCall(request, wire, model, options)
        explanation = await explain_completion(explain_call, normalize_inputs(wire.prompt)[0], tokens)
        # weights are many numbers: write them on a thread
        return await json_response(request, INLINE_NUMBERS + 1, lambda: write() | {"explanation": explanation})
    return await generation_calls.write_json(request, pieces, write)


async def read_echoes(request: Request, wire: CompletionRequest) -> tuple[str, ...]:
    """The prompts as text."""
    model = authorized_models(request).resolve(wire.model, ["generate"])
    prompts = normalize_inputs(wire.prompt)
    given = [prompt for prompt in prompts if not isinstance(prompt, str)]
    text, claim, terms = text_processor(request), request_context(request).claim, request_context(request).terms
    decoded = await text.decode(model, Decoding(given, "prompt"), terms) if given else []
    remaining = iter(decoded)
    found = tuple(prompt if isinstance(prompt, str) else next(remaining) for prompt in prompts)
    size = await run_off_loop(request, sum(map(len, found)) // 8, lambda: sum(map(json_size, found)))
    claim.grow(BYTES_PER_WRITTEN_BYTE * wire.n * size, "the prompts that each answer repeats")
    return found


@add_post_routes(router, "/v1/chat/completions", ChatRequest, "Answer a conversation.")
async def answer_chat(request: Request, wire: ChatRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    call = replace(make_info("chatcmpl", wire, model), include_logprobs=wire.logprobs)
    generation = read_chat(wire)
    answers = await generation_calls.start_answers(request, wire, model, generation, call.id)
    if wire.stream:
        return await EventStream.open(encode_events(stream_chat(call, answers), stream_writer(request)))
    pieces = await generation_calls.collect_answers(request, generation, answers)
    return await generation_calls.write_json(request, pieces, lambda: write_chat(call, pieces))


def make_info(kind: str, wire: SampledRequest, model: Model) -> CompletionInfo:
    usage = wire.stream_options.include_usage
    return CompletionInfo(
        id=f"{kind}-{uuid.uuid4().hex}",
        model=wire.model,
        created=int(time.time()),
        fingerprint=system_fingerprint(model),
        include_usage=usage,
        answers_per_prompt=wire.n,
        include_prompt_logprobs=wire.prompt_logprobs >= 0,
    )


def stream_writer(request: Request) -> StreamWriter:
    return StreamWriter(answer_threads(request), write_openai_error, last=DONE)


async def stream_completion(call: CompletionInfo, answers: AnswerStream) -> AsyncGenerator[dict[str, Any], None]:
    cost, started = Usage(), set[int]()
    prompts: dict[int, tuple[TokenLogprobs, ...]] = {}  # later answers to a prompt take it from the first
    async with aclosing(answers):
        async for index, piece in answers:
            cost += piece.usage
            first, number = index not in started, index // call.answers_per_prompt
            if piece.prompt_logprobs:
                prompts[number] = piece.prompt_logprobs
            scored = replace(piece, prompt_logprobs=prompts.get(number, ()) if first else ())
            yield write_completion_chunk(call, index, scored, first=first)
            started.add(index)
    if call.include_usage:
        yield write_usage_chunk(call, "text_completion", write_openai_usage(cost))


async def stream_chat(call: CompletionInfo, answers: AnswerStream) -> AsyncGenerator[dict[str, Any], None]:
    cost, reasoning, started = Usage(), 0, set[int]()
    async with aclosing(answers):
        async for index, delta in answers:
            cost += delta.usage
            reasoning += delta.reasoning_tokens
            for chunk in write_chat_chunks(call, index, delta, first=index not in started):
                yield chunk
            started.add(index)
    if call.include_usage:
        yield write_usage_chunk(call, "chat.completion.chunk", chat_usage(cost, reasoning))


@dataclass(frozen=True)
class EmbeddingWriter(ReplyWriter):
    """Each object has its index.  The first error ends the call."""

    def build_item(self, index: int, reply: EncoderOutput | PolyheadError) -> Any:
        if isinstance(reply, PolyheadError):
            raise reply
        return {"object": "embedding", "index": index, **self.write_one(reply)}


def make_embedding_writer(
    model: Model, forms: Sequence[OutputForm], encoding: Literal["float", "base64"]
) -> EmbeddingWriter:
    def write(reply: Any) -> dict[str, Any]:
        outputs = reply.outputs if isinstance(reply, SeveralOutputs) else (reply,)
        return {
            EMBEDDING_FIELDS[form]: write_embedding(output, encoding)
            for form, output in zip(forms, outputs, strict=True)
        }

    max_bytes = OVERHEAD_BYTES + (max_vector_bytes(model.width) if "" in forms else 0)
    return EmbeddingWriter(write_one=write, write_error=write_openai_error, max_bytes=max_bytes)


def embedding_envelope(model: str, tokens: int) -> tuple[bytes, bytes]:
    """The JSON before and after the list of embeddings."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    after = orjson.dumps({"model": model, "usage": usage})[1:]
    return b'{"object":"list","data":[', b"]," + after


@add_post_routes(router, "/v1/embeddings", EmbeddingRequest, "Texts as vectors.")
async def answer_embedding(request: Request, wire: EmbeddingRequest) -> Response:
    encoding = read_embedding(wire)
    tasks: list[Task] = ["embed"] if wire.return_dense else ["embed", "fill"]
    model = record_model(request, authorized_models(request).resolve(wire.model, tasks))
    encoding = replace(encoding, prompt=choose_prompt(wire, model.prompts))
    writing = make_embedding_writer(model, wire.forms, wire.encoding_format)
    replies = await start_replies(request, wire, model, encoding)
    vectors = await write_body(request, replies, writing, len(encoding.inputs))
    return vectors.response(*embedding_envelope(wire.model, vectors.prompt_tokens))


@router.get("/v1/models", summary="What is served and ready.")
async def models(request: Request) -> Response:
    explained = server(request).settings.explain
    return JsonResponse(write_models(authorized_models(request).models(), explained=explained))


@router.get("/models/{name:path}/v1/models", summary="The model of the path, as a list.")
async def path_models(request: Request) -> Response:
    found = authorized_models(request).resolve(request.path_params["name"], get_args(Task))
    return JsonResponse(write_models([found], explained=server(request).settings.explain))


@router.get("/v1/models/{name:path}", summary="One of what is served.")
async def model(request: Request) -> Response:
    found = authorized_models(request).resolve(request.path_params["name"], get_args(Task))
    explained = server(request).settings.explain
    return await json_response(
        request, label_cost(found), lambda: write_openai_model(found, explained=explained, whole=True)
    )


DIALECT = Dialect(
    name="OpenAI", prefixes=("/v1",), error=write_openai_error, status=attrgetter("status"), router=router
)
