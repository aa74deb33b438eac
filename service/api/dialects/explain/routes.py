"""Why a model answers so: POST /v1/explain, for every task.

Errors have the shape of whoever owns /v1.  The one idea: one object for all tasks and methods; what is in it is
service.explain.explain_response's.
"""

from typing import get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import NotFound
from ....core.request import Task
from ...shared.dialect import about, body, permitted, server, takes
from ...shared.encoding_calls import FEW, spelled
from ...shared.explain_calls import OFF, ExplainRequest, Question, explained, given_of
from ...shared.explain_options import why_of
from ...shared.streaming import answer

router = APIRouter(tags=["explanations"])


@router.post("/v1/explain", openapi_extra=takes(ExplainRequest), summary="Why a model answers so.")
async def explain(request: Request) -> Response:
    if not server(request).settings.explain:
        raise NotFound(OFF)
    wire = await body(request, ExplainRequest)
    return await answer(request, told(request, wire))


async def told(request: Request, wire: ExplainRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, get_args(Task)))
    why = why_of(wire, wire.max_tokens)
    said = await explained(Question(request, wire, model, why), given_of(wire, model))
    return await spelled(FEW + 1, lambda: said)  # weights are many numbers: not on the event loop
