"""The Open Inference Protocol's model repository extension: load and unload models while serving; needs the admin key.

A served model is loaded again from its present source, unless a source is given: as a parameter or, for clients that
cannot send that, in the model's configuration.
"""

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest
from ....core.model import LoadState, ServedName
from ....runtime.operation import ModelOperation
from ...access.app_state import RegistryProtocol
from ...operations.health import app_state
from ...shared.dialect import NeutralValues, Wire, describe_body
from ...shared.json_body import parse_json, receive_json
from ...shared.streaming import JsonResponse, run_while_connected
from .write import MODEL_VERSION

ParameterText = Annotated[str, Field(max_length=4096)]
router = APIRouter(tags=["administration"])


class IndexRequest(Wire):
    ready: bool = False  # only models that are ready


class StringParameter(Wire):
    string_value: ParameterText = ""


class ConfigurationParameters(Wire):
    source: StringParameter = StringParameter()


class Configuration(Wire):
    """A model's configuration."""

    parameters: ConfigurationParameters = ConfigurationParameters()


class LoadParameters(Wire):
    source: ParameterText = ""
    config: ParameterText = ""  # JSON

    @property
    def requested_source(self) -> str:
        """The source; empty if none is given."""
        if not self.config:
            return self.source
        value = parse_json(self.config.encode(), "parameters.config")
        return Configuration.read(value).parameters.source.string_value or self.source


class RepositoryLoadRequest(Wire):
    parameters: LoadParameters = LoadParameters()


class UnloadParameters(Wire):
    unsupported: ClassVar[NeutralValues] = {"unload_dependents": (False,)}


class RepositoryUnloadRequest(Wire):
    parameters: UnloadParameters = UnloadParameters()


@router.post("/v2/repository/index", openapi_extra=describe_body(IndexRequest), summary="Every served name.")
async def index(request: Request) -> Response:
    wire = IndexRequest.read(await read_optional_json(request))
    known = [one for one in request_registry(request).model_statuses() if one.state.phase == "ready" or not wire.ready]
    return JsonResponse([write_index_entry(one) for one in known])


@router.post(
    "/v2/repository/models/{name:path}/load",
    openapi_extra=describe_body(RepositoryLoadRequest),
    summary="Load a model, or load it again while the old one serves.",
)
async def load(request: Request) -> Response:
    wire, name = RepositoryLoadRequest.read(await read_optional_json(request)), request.path_params["name"]
    registry, source = request_registry(request), wire.parameters.requested_source
    if any(one.name == name for one in registry.model_statuses()):
        return await answer_operation(request, registry.reload(name, source, drain_seconds(request)))
    if not source:
        message = f"parameters.source: is required, {name[:100]!r} is not served and has no known source"
        raise BadRequest(message, param="parameters.source")
    return await answer_operation(request, registry.load(name, source))


@router.post(
    "/v2/repository/models/{name:path}/unload",
    openapi_extra=describe_body(RepositoryUnloadRequest),
    summary="Unload a model: what runs has drain_seconds to end; or cancel its load, while it is being loaded.",
)
async def unload(request: Request) -> Response:
    RepositoryUnloadRequest.read(await read_optional_json(request))
    return await answer_operation(
        request, request_registry(request).unload(request.path_params["name"], drain_seconds(request))
    )


async def read_optional_json(request: Request) -> Any:
    """The JSON body; an empty body is an empty object."""
    text = await receive_json(request)
    return await text.run(text.parse) if text.content else {}


def request_registry(request: Request) -> RegistryProtocol:
    return app_state(request).registry


def drain_seconds(request: Request) -> float:
    return app_state(request).settings.drain_seconds


async def answer_operation(request: Request, operation: ModelOperation) -> Response:
    """An empty object when the operation has succeeded."""

    async def work() -> Response:
        await operation.wait_and_raise()
        return JsonResponse({})

    return await run_while_connected(request, work())


def write_index_entry(entry: ServedName) -> dict[str, Any]:
    return {"name": entry.name, "version": MODEL_VERSION, **write_state(entry.state)}


def write_state(state: LoadState) -> dict[str, str]:
    match state.phase:
        case "ready":
            return {"state": "READY", "reason": ""}
        case "loading" | "downloading":
            return {"state": "LOADING", "reason": state.progress}
        case "broken":
            return {"state": "UNAVAILABLE", "reason": state.reason}
        case "waiting":
            return {"state": "UNAVAILABLE", "reason": state.progress}
