"""Reranking in the format of Cohere and Jina: POST /v1/rerank.

`model` is a cross-encoder, which scores each pair, or an embedder, whose vectors are compared, of texts or of tokens
(late interaction); the response has the same format.
"""

import uuid
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....text.encoder_inputs import EncodingRequest
from ....text.encoder_outputs import ScoreOutput, TokenVectors
from ....text.similarity import cosine_similarities, late_similarities
from ...shared.dialect import (
    MAX_TEXTS,
    Count,
    Dialect,
    EngineRequest,
    NeutralValues,
    Wire,
    authorized_models,
    item_paths,
    max_items,
    must_be,
    record_model,
)
from ...shared.encoding_calls import collect_replies, compare_replies, json_response, start_replies
from ...shared.post_routes import add_post_routes

TASKS: tuple[Task, ...] = ("rank", "embed")
router = APIRouter(tags=["rerank"])


class RerankDocument(Wire):
    text: str


class RerankRequest(EngineRequest):
    unsupported: ClassVar[NeutralValues] = {
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": ([], ["text"]),
    }

    model: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        list[str | RerankDocument],
        Field(fail_fast=True),
        must_be('a list of strings or of objects {"text": ...}'),
        max_items(MAX_TEXTS),
    ]
    top_n: Count = 0
    return_documents: bool = False
    truncation: bool = False

    @property
    def side(self) -> Literal["", "right"]:
        return "right" if self.truncation else ""

    @property
    def texts(self) -> list[str]:
        return [given if isinstance(given, str) else given.text for given in self.documents]


def read_rerank(wire: RerankRequest, model: Model) -> EncodingRequest:
    names = item_paths("documents", wire.texts)
    if model.task == "rank":
        pairs = tuple((wire.query, text) for text in wire.texts)
        return EncodingRequest(field="documents", inputs=pairs, names=names, truncate=wire.side)
    inputs = (wire.query, *wire.texts)
    names = ("query", *names)
    encoding = EncodingRequest(field="documents", inputs=inputs, names=names, truncate=wire.side, queries=1)
    return replace(encoding, unit=True) if model.late is None else replace(encoding, form="tokens")


def write_rerank(wire: RerankRequest, values: list[float], tokens: int) -> dict[str, Any]:
    texts, order = wire.texts, sorted(range(len(values)), key=lambda index: -values[index])
    results = [
        {"index": index, "relevance_score": values[index]}
        | ({"document": {"text": texts[index]}} if wire.return_documents else {})
        for index in order[: wire.top_n or None]
    ]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": wire.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}},
    }


def write_rerank_error(error: PolyheadError) -> dict[str, Any]:
    """Cohere's clients read `message`, Jina's `detail`."""
    return {"message": error.message, "detail": error.message}


@add_post_routes(router, "/v1/rerank", RerankRequest, "Documents by how well they answer a query.")
async def answer_rerank(request: Request, wire: RerankRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, TASKS))
    started = await start_replies(request, wire, model, read_rerank(wire, model))
    if (late := model.late) is not None:
        compare = partial(late_similarities, late)
        scores, tokens = await compare_replies(request, started, TokenVectors, compare)
    elif model.task == "rank":
        answers = await collect_replies(started, ScoreOutput)
        scores, tokens = [found.values[0] for found in answers], sum(found.usage.prompt_tokens for found in answers)
    else:
        scores, tokens = await compare_replies(request, started, ScoreOutput, cosine_similarities)
    return await json_response(request, len(scores), lambda: write_rerank(wire, scores, tokens))


DIALECT = Dialect(
    name="rerank", prefixes=("/v1/rerank",), error=write_rerank_error, status=attrgetter("status"), router=router
)
