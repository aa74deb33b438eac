"""The dialect of text-generation-inference: /generate and /generate_stream.

Its parameters are `generation_wire`, its answers `generation_write`; here are the routes, and the statuses that errors
have.  The only model that generates is asked, the one that is called by `adapter_id`, or /models/{name}/generate.  Its
POST / is Hugging Face's (`hf`), its /info that of text-embeddings-inference (`tei`), which says what both do.
"""

import uuid
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest, Expired, PolyheadError, StepFailed, Stopped
from ....core.model import Model
from ....text.detokenizer import collect_answers
from ...shared import generation_calls as generating
from ...shared.dialect import Dialect, EngineRequest, authorized_models, describe_body, read_body, record_model
from ...shared.hf_generation import PARAMETERS_PREFIX, GenerateParameters
from ...shared.hf_generation import read_hf_parameters as asked
from ...shared.hf_generation_write import stream_events, write_answers, write_hf_error
from ...shared.sampling_options import option_error
from ...shared.streaming import EventStream, encode_events, run_while_connected

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
    continuation = generating.set_default_length(request, asked((wire.inputs,), wire.parameters, stream=stream))
    count, answers = await generating.start_answers(request, wire, model, continuation, call)
    if stream:
        parts = stream_events(wire.parameters, model, wire.inputs, answers, continuation.token_limit)
        return await EventStream.open(encode_events(parts, write_hf_error))
    pieces = await collect_answers(count, generating.claim_scores(request, answers))
    return await generating.write_json(pieces, lambda: write_answers(wire.parameters, model, wire.inputs, pieces)[0])


def find_model(request: Request, adapter: str) -> Model:
    registry, name = authorized_models(request), request.path_params.get("name", "")
    if adapter:
        return record_model(request, generating.resolve_adapter(registry, name, adapter))
    return record_model(request, registry.resolve(name, ["generate"]) if name else registry.resolve_only(["generate"]))


def tgi_status(error: PolyheadError) -> int:
    """What is wrong with a request is 422, what went wrong with an answer 424."""
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
