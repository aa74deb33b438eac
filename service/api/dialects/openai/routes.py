"""The OpenAI dialect: completions, chat, embeddings and models, under /v1.

Its wire objects and what they ask are `openai_wire`, its answers `openai_write`; here is only the way between them.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_args

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....resources.request_memory import WRITTEN
from ....text.chat_parser import Utterance, Utterances, silent, whole_utterances
from ....text.detokenizer import Drawn, Usage, whole
from ....text.pipelines import Reply
from ....text.prompts import Continuation
from ....text.tokenization import Decoding
from ...shared import generation_calls as generating
from ...shared.dialect import Dialect, about, body, permitted, server, several, takes, visit
from ...shared.encoding_calls import FEW, Writing, body_of, most_numbers, read, spelled
from ...shared.explain_calls import Question, check_on, explained_writing
from ...shared.generation_calls import Answers, chunk_of
from ...shared.openai_errors import write_error
from ...shared.openai_sampling import Sampled
from ...shared.streaming import EventStream, JsonResponse, answer, events
from .chat_answers import chat_usage, chunks_chat, write_chat
from .wire import ChatRequest, CompletionRequest, EmbeddingRequest, read_chat, read_completion, read_embedding
from .write import (
    Call,
    chunk_completion,
    chunk_usage,
    spelled_base64,
    spelled_float,
    usage,
    write_completion,
    write_model,
    write_models,
)

BESIDE = 64  # bytes of an embedding's object beside its numbers
DONE = b"data: [DONE]\n\n"
router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest), summary="Continue prompts.")
async def completions(request: Request) -> Response:
    wire = await body(request, CompletionRequest)
    return await answer(request, complete(request, wire))


async def complete(request: Request, wire: CompletionRequest) -> Response:
    asked, why = read_completion(wire), wire.why()
    if why is not None:
        check_on(request)
    echoed = await echoes(request, wire) if wire.echo else ()
    call = replace(called("cmpl", wire), echoes=echoed, logprobs=wire.logprobs >= 0)
    count, answers = await begun(request, wire, call, asked)
    if wire.stream:
        return await EventStream.open(events(completion_chunks(call, answers), write_error, DONE))
    pieces = await whole(count, generating.kept(request, answers, wire.n))

    def told() -> dict[str, Any]:
        return write_completion(call, pieces if call.logprobs else [replace(piece, drawn=()) for piece in pieces])

    if why is not None:
        model, tokens = permitted(request).resolve(call.model, ["generate"]), [drawn.id for drawn in pieces[0].drawn]
        asked_why = Question(request, wire, model, why)
        explanation = await explained_writing(asked_why, several(wire.prompt)[0], tokens)
        return await spelled(FEW + 1, lambda: told() | {"explanation": explanation})  # not on the event loop
    return await generating.json_of(pieces, told)


async def echoes(request: Request, wire: CompletionRequest) -> tuple[str, ...]:
    """The prompts as text."""
    model = permitted(request).resolve(wire.model, ["generate"])
    prompts = several(wire.prompt)
    given = [prompt for prompt in prompts if not isinstance(prompt, str)]
    text, claim, terms = server(request).text, visit(request).claim, visit(request).terms
    decoded = await text.decoded(model, Decoding(given, "prompt"), claim, terms) if given else []
    left = iter(decoded)
    found = tuple(prompt if isinstance(prompt, str) else next(left) for prompt in prompts)
    claim.grow(WRITTEN * wire.n * sum(map(len, found)), "the prompts that each answer repeats")
    return found


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), summary="Answer a conversation.")
async def chat_completions(request: Request) -> Response:
    wire = await body(request, ChatRequest)
    return await answer(request, chat(request, wire))


async def chat(request: Request, wire: ChatRequest) -> Response:
    call = called("chatcmpl", wire)
    model = about(request, permitted(request).resolve(call.model, ["generate"]))
    count, _, utterances = await generating.spoken(request, wire, model, read_chat(wire), call.id)
    if not wire.include_reasoning:
        utterances = silent(utterances)
    if wire.stream:
        return await EventStream.open(events(chat_chunks(call, utterances), write_error, DONE))
    said = await whole_utterances(count, generating.kept(request, utterances))
    return await generating.json_of(said, lambda: write_chat(call, said))


def called(kind: str, wire: Sampled) -> Call:
    usage = wire.stream_options.include_usage
    return Call(
        id=f"{kind}-{uuid.uuid4().hex}",
        model=wire.model,
        created=int(time.time()),
        usage=usage,
        count=wire.n,
        scores=wire.prompt_logprobs >= 0,
    )


async def begun(request: Request, wire: Sampled, call: Call, asked: Continuation) -> tuple[int, Answers]:
    """How many answers there will be, and the answers, not yet submitted."""
    model = about(request, permitted(request).resolve(call.model, ["generate"]))
    return await generating.begun(request, wire, model, asked, call.id)


async def completion_chunks(call: Call, answers: Answers) -> AsyncGenerator[dict[str, Any], None]:
    cost, begun = Usage(), set[int]()
    prompts: dict[int, tuple[Drawn, ...]] = {}  # several answers to one have it from the first
    async with aclosing(answers):
        async for index, piece in answers:
            cost += piece.usage
            prompt = prompts[index // call.count] = piece.prompt or prompts.get(index // call.count, ())
            first = index not in begun
            told = replace(piece, prompt=prompt if first else ())
            yield await chunk_of(told, partial(chunk_completion, call, index, told, first=first))
            begun.add(index)
    if call.usage:
        yield chunk_usage(call, "text_completion", usage(cost))


async def chat_chunks(call: Call, utterances: Utterances) -> AsyncGenerator[dict[str, Any], None]:
    cost, thought, begun = Usage(), 0, set[int]()
    async with aclosing(utterances):
        async for index, said in utterances:
            cost += said.usage
            thought += said.thought_tokens
            for chunk in await chunk_of(said, partial(written_chat, call, index, said, first=index not in begun)):
                yield chunk
            begun.add(index)
    if call.usage:
        yield chunk_usage(call, "chat.completion.chunk", chat_usage(cost, thought))


@dataclass(frozen=True)
class Embeddings(Writing):
    """Each says where in the list it is.  One that fails ends the call."""

    def item(self, index: int, reply: Reply | PolyheadError) -> Any:
        if isinstance(reply, PolyheadError):
            raise reply
        return {"object": "embedding", "index": index, "embedding": self.one(reply)}


def write_embeddings(model: Model, encoding: Literal["float", "base64"]) -> Embeddings:
    write = spelled_base64 if encoding == "base64" else spelled_float
    most = BESIDE + most_numbers(model.width)
    return Embeddings(one=lambda reply: write(reply.values), error=write_error, most=most)


def around_embeddings(model: str, tokens: int) -> tuple[bytes, bytes]:
    """JSON before and after the embeddings and their list's commas."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    after = orjson.dumps({"model": model, "usage": usage})[1:]
    return b'{"object":"list","data":[', b"]," + after


def written_chat(call: Call, index: int, said: Utterance, *, first: bool) -> list[dict[str, Any]]:
    return list(chunks_chat(call, index, said, first=first))


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingRequest), summary="Texts as vectors.")
async def embeddings(request: Request) -> Response:
    wire = await body(request, EmbeddingRequest)
    return await answer(request, embed(request, wire))


async def embed(request: Request, wire: EmbeddingRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, ["embed"]))
    asked = read_embedding(wire)
    writing = write_embeddings(model, wire.encoding_format)
    found = await body_of(request, await read(request, wire, model, asked), writing, len(asked.inputs))
    return found.response(*around_embeddings(wire.model, found.prompt_tokens))


@router.get("/v1/models", summary="What is served and ready.")
async def models(request: Request) -> Response:
    explained = server(request).settings.explain
    return JsonResponse(write_models(permitted(request).models(), explained=explained))


@router.get("/v1/models/{name:path}", summary="One of what is served.")
async def model(request: Request) -> Response:
    found = permitted(request).resolve(request.path_params["name"], get_args(Task))
    return JsonResponse(write_model(found, explained=server(request).settings.explain))


DIALECT = Dialect(name="OpenAI", prefixes=("/v1",), error=write_error, status=attrgetter("status"), router=router)
