"""Models changed while serving, in the words of the Open Inference Protocol's repository extension; for administrators.

Knows no torch.  The one idea: a model of a name is loaded again from where it came unless a source is said, as a
parameter or, for clients that know none, in the model's configuration.
"""

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest
from ....core.model import Known, State
from ....runtime.operation import Change
from ...access.app_state import Registry
from ...operations.health import server
from ...shared.dialect import Neutral, Wire, takes
from ...shared.json_body import read, received, value_of
from ...shared.streaming import JsonResponse, answer
from .write import MODEL_VERSION

Text = Annotated[str, Field(max_length=4096)]
router = APIRouter(tags=["administration"])


class IndexRequest(Wire):
    ready: bool = False  # only those that are


class Said(Wire):
    string_value: Text = ""


class ConfigurationParameters(Wire):
    source: Said = Said()


class Configuration(Wire):
    """What there is to say of a model."""

    parameters: ConfigurationParameters = ConfigurationParameters()


class LoadParameters(Wire):
    source: Text = ""
    config: Text = ""  # JSON

    @property
    def wanted(self) -> str:
        """The source; empty if none is said."""
        if not self.config:
            return self.source
        value = read(self.config.encode(), "parameters.config")
        return Configuration.read(value).parameters.source.string_value or self.source


class LoadRequest(Wire):
    parameters: LoadParameters = LoadParameters()


class UnloadParameters(Wire):
    unsupported: ClassVar[Neutral] = {"unload_dependents": (False,)}


class UnloadRequest(Wire):
    parameters: UnloadParameters = UnloadParameters()


@router.post("/v2/repository/index", openapi_extra=takes(IndexRequest), summary="Every served name.")
async def index(request: Request) -> Response:
    wire = IndexRequest.read(await value_in(request))
    known = [one for one in registry_of(request).known() if one.state.phase == "ready" or not wire.ready]
    return JsonResponse([write_known(one) for one in known])


@router.post(
    "/v2/repository/models/{name:path}/load",
    openapi_extra=takes(LoadRequest),
    summary="Load a model, or load it again while the old one serves.",
)
async def load(request: Request) -> Response:
    wire, name = LoadRequest.read(await value_in(request)), request.path_params["name"]
    registry, source = registry_of(request), wire.parameters.wanted
    if any(one.name == name for one in registry.known()):
        return await over(request, registry.reload(name, source, drain_seconds(request)))
    if not source:
        message = f"parameters.source: is required, {name[:100]!r} is not served and came from nowhere"
        raise BadRequest(message, param="parameters.source")
    return await over(request, registry.load(name, source))


@router.post(
    "/v2/repository/models/{name:path}/unload",
    openapi_extra=takes(UnloadRequest),
    summary="Unload a model: what runs has drain_seconds to end; or cancel its load, while it is being loaded.",
)
async def unload(request: Request) -> Response:
    UnloadRequest.read(await value_in(request))
    return await over(request, registry_of(request).unload(request.path_params["name"], drain_seconds(request)))


async def value_in(request: Request) -> Any:
    """The body's JSON; clients leave the body empty where they have nothing to say."""
    content = await received(request)
    return await value_of(content) if content else {}


def registry_of(request: Request) -> Registry:
    return server(request).registry


def drain_seconds(request: Request) -> float:
    return server(request).settings.drain_seconds


async def over(request: Request, change: Change) -> Response:
    """Nothing is said of a change that went well."""

    async def work() -> Response:
        await change.end()
        return JsonResponse({})

    return await answer(request, work())


def write_known(known: Known) -> dict[str, Any]:
    return {"name": known.name, "version": MODEL_VERSION, **write_state(known.state)}


def write_state(state: State) -> dict[str, str]:
    match state.phase:
        case "ready":
            return {"state": "READY", "reason": ""}
        case "loading":
            return {"state": "LOADING", "reason": f"{state.fraction:.0%} is read"}
        case "broken":
            return {"state": "UNAVAILABLE", "reason": state.why}
        case "waiting":
            return {"state": "UNAVAILABLE", "reason": "others are loaded first"}
