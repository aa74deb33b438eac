"""POST /v1/decisions: typed questions about an input, in OpenAI's format."""

from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...shared.decision_calls import answer_questions, find_decision_model
from ...shared.dialect import Dialect, authorized_models
from ...shared.encoding_calls import json_response
from ...shared.openai_errors import write_openai_error
from ...shared.post_routes import add_post_routes
from .read import read_decisions
from .wire import DecisionsRequest
from .write import write_decisions

router = APIRouter(tags=["decisions"])


@add_post_routes(router, "/v1/decisions", DecisionsRequest, "Probabilities of the answers to questions.")
async def answer_decisions(request: Request, wire: DecisionsRequest) -> Response:
    model = find_decision_model(request, authorized_models(request), wire.model)
    found = await answer_questions(request, wire, model, read_decisions(wire))
    return await json_response(sum(len(scores.probabilities) for scores in found), lambda: write_decisions(wire, found))


DIALECT = Dialect(
    name="OpenAI decisions",
    prefixes=("/v1/decisions",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)
