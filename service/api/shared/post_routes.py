"""Routes that take a wire object, each also below the path of a model."""

from collections.abc import Awaitable, Callable, Coroutine
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

        for address, text in ((path, summary), (f"/models/{{name:path}}{path}", "The same of one model.")):
            router.post(address, openapi_extra=describe_body(kind), summary=text, name=work.__name__)(route)
        return work

    return add_routes
