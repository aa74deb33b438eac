"""Routes that take a wire object, each also below the path of a model."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from .dialect import Wire, describe_body, read_body, read_model_body
from .streaming import run_while_connected

W = TypeVar("W", bound=Wire)
RouteWork = Callable[[Request, W], Coroutine[Any, Any, Response]]


def add_post_routes(
    router: APIRouter, path: str, kind: type[W], summary: str
) -> Callable[[RouteWork[W]], RouteWork[W]]:
    """Add a route to `router` whose body is a `kind`, and the same route below a model's name.

    Where a `kind` has a field `model`, the path of a model stands for it.
    """
    read: Callable[[Request, type[W]], Awaitable[W]] = read_model_body if "model" in kind.model_fields else read_body

    def add_routes(work: RouteWork[W]) -> RouteWork[W]:
        async def route(request: Request) -> Response:
            wire = await read(request, kind)
            return await run_while_connected(request, work(request, wire))

        add_model_routes(router, path, RouteDescription(work.__name__, summary, (kind,)), route)
        return work

    return add_routes


@dataclass(frozen=True)
class RouteDescription:
    """What /openapi.json says of a route whose body is one of `kinds`, or JSON lines that are `lines`."""

    name: str
    summary: str
    kinds: tuple[type[Wire], ...]
    lines: tuple[type[Wire], ...] = ()


def add_model_routes(
    router: APIRouter, path: str, description: RouteDescription, route: Callable[[Request], Awaitable[Response]]
) -> None:
    """Add `route`, which reads its body itself, to `router`: at `path`, and below a model's name."""
    body = describe_body(*description.kinds, lines=description.lines)
    for address, text in ((path, description.summary), (f"/models/{{name:path}}{path}", "The same of one model.")):
        router.post(address, openapi_extra=body, summary=text, name=description.name)(route)
