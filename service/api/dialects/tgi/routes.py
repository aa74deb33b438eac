"""Routes of text-generation-inference: /generate and /generate_stream, also below /models/{name}.

Without a name the only generator answers, or the adapter in `adapter_id`.  POST / belongs to the `hf` dialect, /info to
`tei`, whose response has the fields of both servers.
"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest, Expired, PolyheadError, StepFailed, Stopped
from ....core.model import Model
from ...shared import generation_calls
from ...shared.dialect import (
    Dialect,
    EngineRequest,
    answer_threads,
    authorized_models,
    describe_body,
    read_body,
    record_model,
)
from ...shared.hf_generation import PARAMETERS_PREFIX, GenerateParameters, read_hf_parameters
from ...shared.hf_generation_write import stream_events, write_answers, write_hf_error
from ...shared.sampling_options import option_error
from ...shared.streaming import EventStream, StreamWriter, encode_events, run_while_connected

router = APIRouter(tags=["text-generation-inference"])


class TgiGenerateRequest(EngineRequest):
    inputs: Annotated[str, Field(min_length=1)]
    parameters: GenerateParameters = GenerateParameters()


GENERATE_BODY = describe_body(TgiGenerateRequest)


@router.post("/generate", openapi_extra=GENERATE_BODY, summary="Continue a text.")
@router.post("/models/{name:path}/generate", openapi_extra=GENERATE_BODY, summary="The same by one model.")
async def generate(request: Request) -> Response:
    wire = await read_body(request, TgiGenerateRequest)
    return await run_while_connected(request, answer_generation(request, wire, stream=False))


@router.post("/generate_stream", openapi_extra=GENERATE_BODY, summary="Continue a text, token by token.")
@router.post("/models/{name:path}/generate_stream", openapi_extra=GENERATE_BODY, summary="The same by one model.")
async def generate_stream(request: Request) -> Response:
    wire = await read_body(request, TgiGenerateRequest)
    return await run_while_connected(request, answer_generation(request, wire, stream=True))


async def answer_generation(request: Request, wire: TgiGenerateRequest, *, stream: bool) -> Response:
    if wire.parameters.num_return_sequences > 1:
        raise option_error(
            PARAMETERS_PREFIX, "num_return_sequences", "there is one answer here; POST /models/{name} gives several"
        )
    model, call = find_model(request, wire.parameters.adapter_id), f"generate-{uuid.uuid4().hex}"
    generation = generation_calls.set_default_length(
        request, read_hf_parameters((wire.inputs,), wire.parameters, stream=stream)
    )
    answers = await generation_calls.start_answers(request, wire, model, generation, call)
    if stream:
        parts = stream_events(wire.parameters, model, wire.inputs, answers, generation.token_limit)
        return await EventStream.open(encode_events(parts, StreamWriter(answer_threads(request), write_hf_error)))
    pieces = await generation_calls.collect_answers(request, generation, answers)
    return await generation_calls.write_json(
        request, pieces, lambda: write_answers(wire.parameters, model, wire.inputs, pieces)[0]
    )


def find_model(request: Request, adapter: str) -> Model:
    registry, name = authorized_models(request), request.path_params.get("name", "")
    if adapter:
        return record_model(request, generation_calls.resolve_adapter(registry, name, adapter))
    return record_model(request, registry.resolve_or_only(name, ["generate"]))


def tgi_status(error: PolyheadError) -> int:
    """An invalid request is 422, a failed answer 424."""
    match error:
        case BadRequest():
            return 422
        case StepFailed() | Stopped() | Expired():
            return 424
        case _:
            return error.status


DIALECT = Dialect(
    name="text-generation-inference",
    prefixes=("/generate", "/generate_stream"),
    error=write_hf_error,
    status=tgi_status,
    router=router,
)
