"""The dialect of text-embeddings-inference: predict, embed, rerank, tokenize and info.

Its wire objects name no model: they go to /models/{name}/..., or to the root when exactly one served model fits.  Its
token offsets count bytes of UTF-8.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, get_args

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from models.tokenizer import Encoding
from service.answers import Scores
from service.api.dialect import (
    MOST_TEXTS,
    Count,
    Dialect,
    TextsOrIds,
    Wire,
    Work,
    about,
    at_most,
    body,
    described,
    server,
    several,
    takes,
    visit,
)
from service.api.reading import scores
from service.api.stream import JsonResponse, answer
from service.errors import EmptyInput, Expired, Overloaded, PolyheadError, StepFailed, Stopped, Unavailable
from service.inputs import Reading
from service.model import Model
from service.request import Task
from service.settings import Settings
from service.version import VERSION

CLASSIFIERS: tuple[Task, ...] = ("classify", "rank")
EMBEDDERS: tuple[Task, ...] = ("embed",)
RANKERS: tuple[Task, ...] = ("rank",)
READERS: tuple[Task, ...] = ("classify", "rank", "embed")
FAILED_DEPENDENCY = 424  # what this dialect says when the network fails

OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]
Pairs = Annotated[
    str | OneOrTwo | Annotated[list[OneOrTwo], Field(fail_fast=True)],
    described("a string, a pair of strings, or a list of lists of one or two strings"),
    at_most(MOST_TEXTS),
]
Texts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)], described("a string or a list of strings"), at_most(MOST_TEXTS)
]


class Cut(Work):
    """What to do with a text that is too long: an error, unless it is asked to be cut."""

    truncate: bool = False
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"

    @property
    def side(self) -> Literal["", "left", "right"]:
        if not self.truncate:
            return ""
        return "left" if self.truncation_direction in ("Left", "left") else "right"


class PredictRequest(Cut):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"parameters": ({},)}

    inputs: Pairs
    raw_scores: bool = False


class EmbedRequest(Cut):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt_name": (), "encoding_format": ("float",)}

    inputs: TextsOrIds
    normalize: bool = True
    dimensions: Count = 0


class RerankRequest(Cut):
    query: Annotated[str, Field(min_length=1)]
    texts: Annotated[list[str], Field(fail_fast=True), at_most(MOST_TEXTS)]
    raw_scores: bool = False
    return_text: bool = False


class TokenizeRequest(Wire):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"prompt_name": ()}

    inputs: Texts
    add_special_tokens: bool = True


# What is asked


def read_predict(wire: PredictRequest) -> Reading:
    given = wire.inputs
    alone = [given] if isinstance(given, str) else [part for part in given if isinstance(part, str)]
    rows = [alone] if alone else [part for part in given if isinstance(part, list)]
    inputs = tuple(row[0] if len(row) == 1 else (row[0], row[1]) for row in rows)
    return Reading(field="inputs", inputs=inputs, raw=wire.raw_scores, truncate=wire.side)


def is_one(wire: PredictRequest) -> bool:
    """Whether the inputs are one text or pair, which is answered without a list around it."""
    return isinstance(wire.inputs, str) or any(isinstance(part, str) for part in wire.inputs)


def read_embed(wire: EmbedRequest) -> Reading:
    return Reading(
        field="inputs",
        inputs=several(wire.inputs),
        raw=not wire.normalize,
        unit=wire.normalize,
        dimensions=wire.dimensions,
        truncate=wire.side,
    )


def read_rerank(wire: RerankRequest) -> Reading:
    pairs = tuple((wire.query, text) for text in wire.texts)
    return Reading(field="texts", inputs=pairs, raw=wire.raw_scores, truncate=wire.side)


# How it is answered


def write_predict(labels: Sequence[str], answers: Sequence[Scores], *, one: bool) -> list[Any]:
    written = [predictions(labels, answer.values) for answer in answers]
    return written[0] if one else written


def predictions(labels: Sequence[str], values: Sequence[float]) -> list[dict[str, Any]]:
    named = [{"score": value, "label": label} for label, value in zip(labels, values, strict=True)]
    return sorted(named, key=lambda prediction: -prediction["score"])


def write_rerank(wire: RerankRequest, answers: Sequence[Scores]) -> list[dict[str, Any]]:
    ranks = [
        {"index": index, "score": answer.values[0]} | ({"text": text} if wire.return_text else {})
        for index, (text, answer) in enumerate(zip(wire.texts, answers, strict=True))
    ]
    return sorted(ranks, key=lambda rank: -rank["score"])


def write_tokenize(texts: Sequence[str], encodings: Sequence[Encoding]) -> list[list[dict[str, Any]]]:
    return [tokens(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]


def tokens(text: str, encoding: Encoding) -> list[dict[str, Any]]:
    borders = [0, *accumulate(len(char.encode()) for char in text)]  # characters to bytes
    written = []
    for id, piece, special, (start, stop) in zip(
        encoding.ids, encoding.pieces, encoding.special, encoding.offsets, strict=True
    ):
        place = {"start": None, "stop": None} if special else {"start": borders[start], "stop": borders[stop]}
        written.append({"id": id, "text": piece if special else text[start:stop], "special": special, **place})
    return written


def write_info(model: Model, settings: Settings) -> dict[str, Any]:
    return {
        "model_id": model.source,
        "model_sha": None,
        "model_dtype": model.dtype,
        "served_model_name": model.name,
        "model_type": model_type(model),
        "max_concurrent_requests": settings.max_requests,
        "max_input_length": model.max_tokens,
        "max_batch_tokens": settings.encoder_step_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_batch_texts,
        "auto_truncate": False,
        "tokenization_workers": settings.tokenizer_threads,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def model_type(model: Model) -> dict[str, Any]:
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    match model.task:
        case "classify":
            return {"classifier": labels}
        case "rank":
            return {"reranker": labels}
        case "embed":
            return {"embedding": {"width": model.width}}
        case "generate":
            return {"generator": {}}
        case "tag":
            return {"token_classifier": labels}
        case "span":
            return {"question_answerer": {}}
        case "fill":
            return {"mask_filler": {}}


def write_error(error: PolyheadError) -> dict[str, Any]:
    return {"error": error.message, "error_type": error_type(error)}


def error_type(error: PolyheadError) -> str:
    match error:
        case EmptyInput():
            return "Empty"
        case Overloaded():
            return "Overloaded"
        case Unavailable() | Stopped():
            return "Unhealthy"
        case StepFailed() | Expired():
            return "Backend"
        case _:
            return "Validation"


def status(error: PolyheadError) -> int:
    return FAILED_DEPENDENCY if isinstance(error, StepFailed) else error.status


# The way between


router = APIRouter(tags=["text-embeddings-inference"])


def named(request: Request, tasks: Collection[Task]) -> Model:
    """The model in the path, or the only one that fits."""
    registry, name = server(request).registry, request.path_params.get("name", "")
    return about(request, registry.resolve(name, tasks) if name else registry.only(tasks))


@router.post("/predict", openapi_extra=takes(PredictRequest), summary="The labels of texts, likeliest first.")
@router.post("/models/{name:path}/predict", openapi_extra=takes(PredictRequest), summary="The same of one model.")
async def predict(request: Request) -> Response:
    wire = await body(request, PredictRequest)

    async def work() -> Response:
        model = named(request, CLASSIFIERS)
        answers = await scores(request, wire, model, read_predict(wire))
        return JsonResponse(write_predict(model.labels, answers, one=is_one(wire)))

    return await answer(request, work())


@router.post("/embed", openapi_extra=takes(EmbedRequest), summary="Texts as vectors.")
@router.post("/models/{name:path}/embed", openapi_extra=takes(EmbedRequest), summary="The same of one model.")
async def embed(request: Request) -> Response:
    wire = await body(request, EmbedRequest)

    async def work() -> Response:
        answers = await scores(request, wire, named(request, EMBEDDERS), read_embed(wire))
        return JsonResponse([vector.values for vector in answers])

    return await answer(request, work())


@router.post("/rerank", openapi_extra=takes(RerankRequest), summary="Texts by how well they answer a query.")
@router.post("/models/{name:path}/rerank", openapi_extra=takes(RerankRequest), summary="The same of one model.")
async def rerank(request: Request) -> Response:
    wire = await body(request, RerankRequest)

    async def work() -> Response:
        answers = await scores(request, wire, named(request, RANKERS), read_rerank(wire))
        return JsonResponse(write_rerank(wire, answers))

    return await answer(request, work())


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), summary="Texts as tokens.")
@router.post("/models/{name:path}/tokenize", openapi_extra=takes(TokenizeRequest), summary="The same of one model.")
async def tokenize(request: Request) -> Response:
    wire = await body(request, TokenizeRequest)
    texts = [wire.inputs] if isinstance(wire.inputs, str) else wire.inputs

    async def work() -> Response:
        model = named(request, described_by_default(request))
        special, deadline = wire.add_special_tokens, visit(request).deadline
        encodings = await server(request).text.tokens(model, texts, special=special, deadline=deadline)
        # a long text has as many entries as tokens: not on the event loop
        return await asyncio.to_thread(lambda: JsonResponse(write_tokenize(texts, encodings)))

    return await answer(request, work())


@router.get("/info", summary="What the model is, and the limits of the server.")
@router.get("/models/{name:path}/info", summary="The same of one model.")
async def info(request: Request) -> Response:
    model = named(request, described_by_default(request))
    return JsonResponse(write_info(model, server(request).settings))


def described_by_default(request: Request) -> Collection[Task]:
    """A named model may be any; without a name it is the only encoder, or the only model if no encoder is served."""
    encoders = any(model.task in READERS for model in server(request).registry.models())
    return READERS if encoders and "name" not in request.path_params else get_args(Task)


DIALECT = Dialect(
    name="text-embeddings-inference",
    prefixes=("/predict", "/embed", "/rerank", "/tokenize", "/info", "/models"),
    error=write_error,
    status=status,
    router=router,
)
