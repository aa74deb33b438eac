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
from ....text.detokenizer import whole
from ...shared import generation_calls as generating
from ...shared.dialect import Dialect, Work, about, body, permitted, takes
from ...shared.hf_generation import INSIDE, GenerateParameters
from ...shared.hf_generation import generating as asked
from ...shared.hf_generation_write import answered, chunks, write_error
from ...shared.sampling_options import wrong
from ...shared.streaming import EventStream, answer, events

router = APIRouter(tags=["text-generation-inference"])


class GenerateRequest(Work):
    inputs: Annotated[str, Field(min_length=1)]
    parameters: GenerateParameters = GenerateParameters()


TAKES = takes(GenerateRequest)


@router.post("/generate", openapi_extra=TAKES, summary="Continue a text.")
@router.post("/models/{name:path}/generate", openapi_extra=TAKES, summary="The same by one model.")
async def generate(request: Request) -> Response:
    wire = await body(request, GenerateRequest)
    return await answer(request, generated(request, wire, stream=False))


@router.post("/generate_stream", openapi_extra=TAKES, summary="Continue a text, token by token.")
@router.post("/models/{name:path}/generate_stream", openapi_extra=TAKES, summary="The same by one model.")
async def generate_stream(request: Request) -> Response:
    wire = await body(request, GenerateRequest)
    return await answer(request, generated(request, wire, stream=True))


async def generated(request: Request, wire: GenerateRequest, *, stream: bool) -> Response:
    if wire.parameters.num_return_sequences > 1:
        raise wrong(INSIDE, "num_return_sequences", "there is one answer here; POST /models/{name} gives several")
    model, call = named(request, wire.parameters.adapter_id), f"generate-{uuid.uuid4().hex}"
    continuation = generating.lasting(request, asked((wire.inputs,), wire.parameters, stream=stream))
    count, answers = await generating.begun(request, wire, model, continuation, call)
    if stream:
        parts = chunks(wire.parameters, model, wire.inputs, answers, continuation.longest)
        return await EventStream.open(events(parts, write_error))
    pieces = await whole(count, generating.kept(request, answers))
    return await generating.json_of(pieces, lambda: answered(wire.parameters, model, wire.inputs, pieces)[0])


def named(request: Request, adapter: str) -> Model:
    registry, name = permitted(request), request.path_params.get("name", "")
    if adapter:
        return about(request, generating.adapted(registry, name, adapter))
    return about(request, registry.resolve(name, ["generate"]) if name else registry.only(["generate"]))


def status(error: PolyheadError) -> int:
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
    error=write_error,
    status=status,
    router=router,
)
