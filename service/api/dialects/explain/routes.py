"""POST /v1/explain: explains a model's answer, for every task and method.

Errors have the format of the dialect that owns /v1.  `service.explain.explain_response` writes the explanation.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....core.errors import NotFound
from ....explain.explain_request import TARGET_FIELDS
from ...shared.dialect import authorized_models, describe_body, read_body, record_model, server
from ...shared.encoding_calls import INLINE_NUMBERS, json_response
from ...shared.explain_calls import EXPLAIN_OFF, ExplainCall, ExplainRequest, explain_input, read_explain_input
from ...shared.explain_options import read_explain_options
from ...shared.streaming import run_while_connected

router = APIRouter(tags=["explanations"])


@router.post("/v1/explain", openapi_extra=describe_body(ExplainRequest), summary="Why a model answers so.")
async def explain(request: Request) -> Response:
    if not server(request).settings.explain:
        raise NotFound(EXPLAIN_OFF)
    wire = await read_body(request, ExplainRequest)
    return await run_while_connected(request, answer_explain(request, wire))


async def answer_explain(request: Request, wire: ExplainRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, tuple(TARGET_FIELDS)))
    options = read_explain_options(wire, wire.max_tokens)
    explanation = await explain_input(ExplainCall(request, wire, model, options), read_explain_input(wire, model))
    # weights are many numbers: write them on a thread
    return await json_response(request, INLINE_NUMBERS + 1, lambda: explanation)
