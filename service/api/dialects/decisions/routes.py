"""POST /v1/decisions: typed questions about an input, in OpenAI's format.

GET /v1/decisions/calibration, an extension: what the calibration of a model was measured to be.
"""

from functools import partial
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....resources.request_memory import BYTES_PER_NUMBER
from ...shared.decision_calls import answer_numbers, answer_questions, find_decision_model
from ...shared.dialect import Dialect, authorized_models, request_context
from ...shared.encoding_calls import json_response, run_off_loop
from ...shared.openai_errors import write_openai_error
from ...shared.post_routes import add_post_routes
from .read import count_options, read_decisions
from .wire import DecisionsRequest
from .write import count_numbers, write_calibration, write_decisions

router = APIRouter(tags=["decisions"])


@add_post_routes(router, "/v1/decisions", DecisionsRequest, "Probabilities of the answers to questions.")
async def answer_decisions(request: Request, wire: DecisionsRequest) -> Response:
    model = find_decision_model(request, authorized_models(request), wire.model)
    decision = await run_off_loop(request, count_options(wire), partial(read_decisions, wire))
    found = await answer_questions(request, wire, model, decision)
    return await json_response(request, answer_numbers(found), lambda: write_decisions(wire, found))


@router.get("/v1/decisions/calibration", summary="The calibration of the only model that answers questions.")
@router.get("/models/{name:path}/v1/decisions/calibration", summary="The same of one model.")
async def calibration(request: Request) -> Response:
    """The measures that are in the file of `polyhead calibrate`. Without a calibration the list of maps is empty."""
    model = find_decision_model(request, authorized_models(request), request.path_params.get("name", ""))
    size = count_numbers(model.calibration)
    request_context(request).claim.grow(size * BYTES_PER_NUMBER, "the calibration")
    return await json_response(request, size, lambda: write_calibration(model))


DIALECT = Dialect(
    name="OpenAI decisions",
    prefixes=("/v1/decisions",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)
