"""Reranking in the shape that Cohere and Jina made usual: POST /v1/rerank.

One wire object and one answer.  A cross-encoder looks at each pair, an embedder compares vectors; either is named as
`model`, and the answer is the same.
"""

import uuid
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import PolyheadError
from ....core.model import Model
from ....core.request import Task
from ....text.inputs import Reading
from ....text.pipelines import Scores
from ....text.similarity import cosines
from ...shared.dialect import (
    MOST_TEXTS,
    Count,
    Dialect,
    Neutral,
    Wire,
    Work,
    about,
    at_most,
    body,
    described,
    names_of,
    permitted,
    takes,
)
from ...shared.encoding_calls import every, read, size_of, spelled
from ...shared.streaming import answer

TASKS: tuple[Task, ...] = ("rank", "embed")
router = APIRouter(tags=["rerank"])


class Document(Wire):
    text: str


class RerankRequest(Work):
    unsupported: ClassVar[Neutral] = {"max_chunks_per_doc": (), "max_tokens_per_doc": (), "rank_fields": ([], ["text"])}

    model: Annotated[str, Field(min_length=1)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[
        list[str | Document],
        Field(fail_fast=True),
        described('a list of strings or of objects {"text": ...}'),
        at_most(MOST_TEXTS),
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


def read_rerank(wire: RerankRequest, model: Model) -> Reading:
    names = names_of("documents", wire.texts)
    if model.task == "rank":
        pairs = tuple((wire.query, text) for text in wire.texts)
        return Reading(field="documents", inputs=pairs, names=names, truncate=wire.side)
    inputs = (wire.query, *wire.texts)
    return Reading(field="documents", inputs=inputs, names=("query", *names), unit=True, truncate=wire.side)


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


def write_error(error: PolyheadError) -> dict[str, Any]:
    """Cohere reads `message`, Jina `detail`."""
    return {"message": error.message, "detail": error.message}


@router.post("/v1/rerank", openapi_extra=takes(RerankRequest), summary="Documents by how well they answer a query.")
async def rerank(request: Request) -> Response:
    wire = await body(request, RerankRequest)
    return await answer(request, ranked(request, wire))


async def ranked(request: Request, wire: RerankRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, TASKS))
    answers = await every(await read(request, wire, model, read_rerank(wire, model)), Scores)

    def told() -> dict[str, Any]:
        values = [found.values[0] for found in answers] if model.task == "rank" else cosines(answers)
        return write_rerank(wire, values, sum(found.usage.prompt_tokens for found in answers))

    return await spelled(sum(map(size_of, answers)), told)


DIALECT = Dialect(
    name="rerank", prefixes=("/v1/rerank",), error=write_error, status=attrgetter("status"), router=router
)
