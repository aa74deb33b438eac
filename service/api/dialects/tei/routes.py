"""Routes of text-embeddings-inference: predict, embed in three forms, rerank, similarity, tokens and info.

Each route also exists below a model's name, /models/{name}/...; without a name exactly one served model must fit.
"""

from collections.abc import Collection
from functools import partial
from typing import get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.model import Model
from ....core.request import Task
from ....text.encoder_outputs import ScoreOutput, TokenVectors
from ....text.similarity import cosine_similarities, late_similarities
from ....text.tokenization import Decoding
from ...shared.dialect import (
    Dialect,
    answer_threads,
    authorized_models,
    describe_body,
    record_model,
    request_context,
    server,
    text_processor,
)
from ...shared.encoding_calls import collect_replies, compare_replies, json_response, reply_response, start_replies
from ...shared.json_body import receive_json
from ...shared.post_routes import add_post_routes
from ...shared.streaming import PartsResponse, run_while_connected
from ...shared.task_names import label_cost
from ..tokens import routes as token_routes
from .wire import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    SimilarityRequest,
    TeiRerankRequest,
    TokenizeRequest,
    read_embed,
    read_late_rerank,
    read_predict,
    read_rerank_pairs,
    read_rerank_query,
    read_roles,
    read_similarity,
    read_token_form,
)
from .write import (
    SPARSE_WRITER,
    TOKEN_VECTOR_WRITER,
    predict_writer,
    tei_status,
    vector_writer,
    write_info,
    write_ranks,
    write_tei_error,
    write_tokenize,
)

CLASSIFIERS: tuple[Task, ...] = ("classify", "rank")
EMBEDDERS: tuple[Task, ...] = ("embed",)
SPARSE_EMBEDDERS: tuple[Task, ...] = ("fill", "embed")
MASK_FILLERS: tuple[Task, ...] = ("fill",)
RANKERS: tuple[Task, ...] = ("rank", "embed")
ENCODERS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task != "generate")

router = APIRouter(tags=["text-embeddings-inference"])


def find_model(request: Request, tasks: Collection[Task]) -> Model:
    """The model in the path, or the only one that fits."""
    registry, name = authorized_models(request), request.path_params.get("name", "")
    return record_model(request, registry.resolve_or_only(name, tasks))


def find_sparse_model(request: Request) -> Model:
    """The model in the path, or the only one with weights of words."""
    if request.path_params.get("name", ""):
        return find_model(request, SPARSE_EMBEDDERS)
    fitting = [model for model in authorized_models(request).models() if "words" in model.forms]
    if len(fitting) == 1:
        return record_model(request, authorized_models(request).resolve(fitting[0].name, SPARSE_EMBEDDERS))
    return find_model(request, MASK_FILLERS)


@add_post_routes(router, "/predict", PredictRequest, "The labels of texts, most likely first.")
async def predict(request: Request, wire: PredictRequest) -> Response:
    model = find_model(request, CLASSIFIERS)
    encoding = read_predict(wire)
    answers = await start_replies(request, wire, model, encoding)
    return await reply_response(request, answers, predict_writer(model, wire), len(encoding.inputs))


@add_post_routes(router, "/embed", EmbedRequest, "Texts as vectors.")
async def embed(request: Request, wire: EmbedRequest) -> Response:
    model, encoding = find_model(request, EMBEDDERS), read_embed(wire)
    return await reply_response(
        request, await start_replies(request, wire, model, encoding), vector_writer(model), len(encoding.inputs)
    )


@add_post_routes(router, "/embed_all", EmbedAllRequest, "Texts as a vector for each token.")
async def embed_all(request: Request, wire: EmbedAllRequest) -> Response:
    model = find_model(request, EMBEDDERS)
    encoding = read_token_form(wire, "tokens") if model.late is None else read_roles(wire)
    return await reply_response(
        request, await start_replies(request, wire, model, encoding), TOKEN_VECTOR_WRITER, len(encoding.inputs)
    )


@add_post_routes(
    router, "/embed_sparse", EmbedSparseRequest, "Texts as weights of words, by a model that has them (SPLADE, M3)."
)
async def embed_sparse(request: Request, wire: EmbedSparseRequest) -> Response:
    model, encoding = find_sparse_model(request), read_token_form(wire, "words")
    return await reply_response(
        request, await start_replies(request, wire, model, encoding), SPARSE_WRITER, len(encoding.inputs)
    )


@add_post_routes(router, "/rerank", TeiRerankRequest, "Texts by how well they answer a query.")
async def rerank(request: Request, wire: TeiRerankRequest) -> Response:
    model = find_model(request, rerank_tasks(request))
    if (late := model.late) is not None:
        started = await start_replies(request, wire, model, read_late_rerank(wire))
        scores, _ = await compare_replies(request, started, TokenVectors, partial(late_similarities, late))
    elif model.task == "rank":
        started = await start_replies(request, wire, model, read_rerank_pairs(wire))
        scores = [answer.values[0] for answer in await collect_replies(started, ScoreOutput)]
    else:
        started = await start_replies(request, wire, model, read_rerank_query(wire))
        scores, _ = await compare_replies(request, started, ScoreOutput, cosine_similarities)
    return await json_response(request, len(scores), lambda: write_ranks(wire, scores))


@add_post_routes(
    router, "/similarity", SimilarityRequest, "How alike a text and others are: the cosine of their vectors."
)
async def similarity(request: Request, wire: SimilarityRequest) -> Response:
    started = await start_replies(request, wire, find_model(request, EMBEDDERS), read_similarity(wire))
    scores, _ = await compare_replies(request, started, ScoreOutput, cosine_similarities)
    return await json_response(request, len(scores), lambda: scores)


TOKEN_ENTRY_BYTES = 600  # bytes of each listed token: in the tokenizer's result, as a Python object, and as JSON
TOKENIZE_BODY = describe_body(TokenizeRequest, *token_routes.TOKENIZE_KINDS)


@router.post(
    "/tokenize", openapi_extra=TOKENIZE_BODY, summary="Texts as tokens: `inputs`, or a `prompt` or `messages`."
)
@router.post("/models/{name:path}/tokenize", openapi_extra=TOKENIZE_BODY, summary="The same of one model.")
async def tokenize(request: Request) -> Response:
    text = await receive_json(request)
    value = await text.run(text.parse)
    prompt = token_routes.read_tokenize(value)
    if prompt is not None:
        return await run_while_connected(request, token_routes.answer_tokens(request, prompt))
    wire = await text.run(lambda: TokenizeRequest.read(value))
    return await run_while_connected(request, answer_tokenize(request, wire))


async def answer_tokenize(request: Request, wire: TokenizeRequest) -> Response:
    texts = [wire.inputs] if isinstance(wire.inputs, str) else wire.inputs
    model = find_model(request, default_tasks(request))
    special, terms = wire.add_special_tokens, request_context(request).terms
    with request_context(request).time_tokenising():
        encodings = await text_processor(request).tokenize(model, texts, special=special, terms=terms)
    claim, size = request_context(request).claim, TOKEN_ENTRY_BYTES * sum(map(len, encodings))
    claim.grow(size, "the list of tokens")
    # a long text has very many tokens: write them on a thread
    write = partial(write_tokenize, model, texts, encodings, claim)
    return PartsResponse(await answer_threads(request).run(size, write))


@add_post_routes(router, "/decode", DecodeRequest, "Tokens as texts.")
async def decode(request: Request, wire: DecodeRequest) -> Response:
    model = find_model(request, default_tasks(request))
    context, decoding = request_context(request), Decoding(wire.rows, plain=wire.skip_special_tokens)
    texts = await text_processor(request).decode(model, decoding, context.terms)
    return await json_response(request, len(texts) + sum(map(len, texts)) // 8, lambda: texts)


@router.get("/info", summary="What the model is, and the limits of the server.")
@router.get("/models/{name:path}/info", summary="The same of one model.")
async def info(request: Request) -> Response:
    model = find_model(request, default_tasks(request))
    settings = server(request).settings
    return await json_response(request, 2 * label_cost(model), lambda: write_info(model, settings))


def rerank_tasks(request: Request) -> Collection[Task]:
    """The tasks that can rerank.

    A named model may be a cross-encoder or an embedder.  Without a name it is the only cross-encoder, or else the only
    embedder.
    """
    made = any(model.task == "rank" for model in authorized_models(request).models())
    return ("rank",) if made and "name" not in request.path_params else RANKERS


def default_tasks(request: Request) -> Collection[Task]:
    """The tasks that a model may have.

    A named model may have any.  Without a name it is the only encoder, or the only model if no encoder is served.
    """
    encoders = any(model.task in ENCODERS for model in authorized_models(request).models())
    return ENCODERS if encoders and "name" not in request.path_params else get_args(Task)


DIALECT = Dialect(
    name="text-embeddings-inference",
    prefixes=(
        *("/predict", "/embed", "/embed_all", "/embed_sparse", "/rerank", "/similarity", "/tokenize", "/decode"),
        "/info",
    ),
    error=write_tei_error,
    status=tei_status,
    router=router,
)
