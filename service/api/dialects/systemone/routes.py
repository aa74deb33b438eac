"""POST /v1/systemone: typed questions about a state."""

from functools import partial
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...shared.bulk_calls import sends_lines
from ...shared.decision_calls import answer_numbers, answer_questions, find_decision_model
from ...shared.dialect import Dialect, authorized_models, read_model_body
from ...shared.encoding_calls import json_response, run_off_loop
from ...shared.post_routes import RouteDescription, add_model_routes
from ...shared.streaming import run_while_connected
from .bulk import answer_batch
from .wire import StateLine, SystemOneBatch, SystemOneRequest, count_options, read_systemone
from .write import write_error, write_systemone

router = APIRouter(tags=["decisions"])


async def answer_body(request: Request) -> Response:
    if sends_lines(request):
        return await answer_batch(request)
    wire = await read_model_body(request, SystemOneRequest)
    return await run_while_connected(request, answer_systemone(request, wire))


async def answer_systemone(request: Request, wire: SystemOneRequest) -> Response:
    model = find_decision_model(request, authorized_models(request), wire.model)
    decision = await run_off_loop(request, count_options(wire), partial(read_systemone, wire))
    found = await answer_questions(request, wire, model, decision)
    written = partial(write_systemone, wire.model or model.name, decision, found)
    return await json_response(request, answer_numbers(found), written)


SUMMARY = "Probabilities of the answers to questions."
DESCRIPTION = RouteDescription("answer_systemone", SUMMARY, (SystemOneRequest,), (SystemOneBatch, StateLine))
add_model_routes(router, "/v1/systemone", DESCRIPTION, answer_body)
DIALECT = Dialect(
    name="systemone", prefixes=("/v1/systemone",), error=write_error, status=attrgetter("status"), router=router
)
