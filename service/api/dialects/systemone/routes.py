"""POST /v1/systemone: typed questions about a state."""

from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...shared.decision_calls import answer_questions, find_decision_model
from ...shared.dialect import Dialect, authorized_models
from ...shared.encoding_calls import json_response
from ...shared.post_routes import add_post_routes
from .wire import SystemOneRequest, read_systemone
from .write import write_error, write_systemone

router = APIRouter(tags=["decisions"])


@add_post_routes(router, "/v1/systemone", SystemOneRequest, "Probabilities of the answers to questions.")
async def answer_systemone(request: Request, wire: SystemOneRequest) -> Response:
    model = find_decision_model(request, authorized_models(request), wire.model)
    decision = read_systemone(wire)
    found = await answer_questions(request, wire, model, decision)
    size = sum(len(scores.probabilities) for scores in found)
    return await json_response(size, lambda: write_systemone(wire.model or model.name, decision, found))


DIALECT = Dialect(
    name="systemone", prefixes=("/v1/systemone",), error=write_error, status=attrgetter("status"), router=router
)
