"""The dialect of text-embeddings-inference: predict, embed in its three forms, rerank, similarity, tokens and info.

Its wire objects and what they ask are `tei_wire`, its answers `tei_write`; here is only the way between them.  They
name no model: they go to /models/{name}/..., or to the root when exactly one served model fits.
"""

from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....concurrency.outcome import on_thread
from ....core.model import Model
from ....core.request import Task
from ....text.pipelines import Scores
from ....text.similarity import cosines
from ....text.tokenization import Decoding
from ...shared.dialect import Dialect, Wire, about, body, permitted, server, takes, visit
from ...shared.encoding_calls import every, read, size_of, spelled, written
from ...shared.json_body import received, sized, value_of
from ...shared.streaming import JsonResponse, Parts, answer
from ..tokens import routes as tokens
from .wire import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    read_embed,
    read_form,
    read_predict,
    read_query,
    read_rerank,
    read_similarity,
)
from .write import (
    STATES,
    WEIGHTS,
    status,
    write_error,
    write_info,
    write_predict,
    write_rerank,
    write_tokenize,
    write_vectors,
)

CLASSIFIERS: tuple[Task, ...] = ("classify", "rank")
EMBEDDERS: tuple[Task, ...] = ("embed",)
WEIGHERS: tuple[Task, ...] = ("fill",)
RANKERS: tuple[Task, ...] = ("rank", "embed")
READERS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task != "generate")

W = TypeVar("W", bound=Wire)
Work = Callable[[Request, W], Coroutine[Any, Any, Response]]
router = APIRouter(tags=["text-embeddings-inference"])


def posted(path: str, kind: type[W], summary: str) -> Callable[[Work[W]], Work[W]]:
    """A route whose body is a `kind`, and the same below a model's name."""

    def routed(work: Work[W]) -> Work[W]:
        async def route(request: Request) -> Response:
            wire = await body(request, kind)
            return await answer(request, work(request, wire))

        for address, said in ((path, summary), (f"/models/{{name:path}}{path}", "The same of one model.")):
            router.post(address, openapi_extra=takes(kind), summary=said, name=work.__name__)(route)
        return work

    return routed


def named(request: Request, tasks: Collection[Task]) -> Model:
    """The model in the path, or the only one that fits."""
    registry, name = permitted(request), request.path_params.get("name", "")
    return about(request, registry.resolve(name, tasks) if name else registry.only(tasks))


@posted("/predict", PredictRequest, "The labels of texts, likeliest first.")
async def predict(request: Request, wire: PredictRequest) -> Response:
    model = named(request, CLASSIFIERS)
    asked = read_predict(wire)
    answers = await read(request, wire, model, asked)
    return await written(request, answers, write_predict(model.labels, wire), len(asked.inputs))


@posted("/embed", EmbedRequest, "Texts as vectors.")
async def embed(request: Request, wire: EmbedRequest) -> Response:
    model, asked = named(request, EMBEDDERS), read_embed(wire)
    return await written(request, await read(request, wire, model, asked), write_vectors(model), len(asked.inputs))


@posted("/embed_all", EmbedAllRequest, "Texts as a vector for each token.")
async def embed_all(request: Request, wire: EmbedAllRequest) -> Response:
    model, asked = named(request, EMBEDDERS), read_form(wire, "tokens")
    return await written(request, await read(request, wire, model, asked), STATES, len(asked.inputs))


@posted("/embed_sparse", EmbedSparseRequest, "Texts as weights of words, by a model that fills in masks (SPLADE).")
async def embed_sparse(request: Request, wire: EmbedSparseRequest) -> Response:
    model, asked = named(request, WEIGHERS), read_form(wire, "words")
    return await written(request, await read(request, wire, model, asked), WEIGHTS, len(asked.inputs))


@posted("/rerank", RerankRequest, "Texts by how well they answer a query.")
async def rerank(request: Request, wire: RerankRequest) -> Response:
    model = named(request, ranking(request))
    asked = read_rerank(wire) if model.task == "rank" else read_query(wire)
    answers = await every(await read(request, wire, model, asked), Scores)

    def told() -> Any:
        ranks = [answer.values[0] for answer in answers] if model.task == "rank" else cosines(answers)
        return write_rerank(wire, ranks)

    return await spelled(sum(map(size_of, answers)), told)


@posted("/similarity", SimilarityRequest, "How alike a text and others are: the cosine of their vectors.")
async def similarity(request: Request, wire: SimilarityRequest) -> Response:
    answers = await every(await read(request, wire, named(request, EMBEDDERS), read_similarity(wire)), Scores)
    return await spelled(sum(map(size_of, answers)), lambda: cosines(answers))


LISTED = 600  # bytes for each token that is listed: as the library has it, as an object, and as it is written
TOKENIZE = takes(TokenizeRequest, *tokens.KINDS)


@router.post("/tokenize", openapi_extra=TOKENIZE, summary="Texts as tokens: `inputs`, or a `prompt` or `messages`.")
@router.post("/models/{name:path}/tokenize", openapi_extra=TOKENIZE, summary="The same of one model.")
async def tokenize(request: Request) -> Response:
    content = await received(request)
    value = await value_of(content)
    prompt = tokens.read(value)
    if prompt is not None:
        return await answer(request, tokens.tokenized(request, prompt))
    wire = await sized(len(content), lambda: TokenizeRequest.read(value))
    return await answer(request, tokenized(request, wire))


async def tokenized(request: Request, wire: TokenizeRequest) -> Response:
    texts = [wire.inputs] if isinstance(wire.inputs, str) else wire.inputs
    model = named(request, described_by_default(request))
    special, terms = wire.add_special_tokens, visit(request).terms
    with visit(request).tokenising():
        encodings = await server(request).text.tokens(model, texts, special=special, terms=terms)
    claim = visit(request).claim
    claim.grow(LISTED * sum(map(len, encodings)), "the list of tokens")
    # a long text has as many entries as tokens: not on the event loop
    return await on_thread(lambda: Parts(write_tokenize(model, texts, encodings, claim)))


@posted("/decode", DecodeRequest, "Tokens as texts.")
async def decode(request: Request, wire: DecodeRequest) -> Response:
    model = named(request, described_by_default(request))
    asked = Decoding(wire.rows, plain=wire.skip_special_tokens)
    found = await server(request).text.decoded(model, asked, visit(request).claim, visit(request).terms)
    return await spelled(len(found) + sum(map(len, found)) // 8, lambda: found)


@router.get("/info", summary="What the model is, and the limits of the server.")
@router.get("/models/{name:path}/info", summary="The same of one model.")
async def info(request: Request) -> Response:
    model = named(request, described_by_default(request))
    return JsonResponse(write_info(model, server(request).settings))


def ranking(request: Request) -> Collection[Task]:
    """A named model may do it either way; without a name it is the only one made for it, or else the only embedder."""
    made = any(model.task == "rank" for model in permitted(request).models())
    return ("rank",) if made and "name" not in request.path_params else RANKERS


def described_by_default(request: Request) -> Collection[Task]:
    """A named model may be any; without a name it is the only encoder, or the only model if no encoder is served."""
    encoders = any(model.task in READERS for model in permitted(request).models())
    return READERS if encoders and "name" not in request.path_params else get_args(Task)


DIALECT = Dialect(
    name="text-embeddings-inference",
    prefixes=(
        *("/predict", "/embed", "/embed_all", "/embed_sparse", "/rerank", "/similarity", "/tokenize", "/decode"),
        "/info",
    ),
    error=write_error,
    status=status,
    router=router,
)
