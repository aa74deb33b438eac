"""Fakes for what is below text and dialects: models with scripted answers, and a client without a socket."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI
from starlette.routing import Route

from polyhead.models.chat import ChatTemplate
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.api.access.admission import Admission, AdmissionLimits
from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.access.auth import Keys
from polyhead.service.api.access.origins import OriginPolicy
from polyhead.service.api.access.rate_limit import Quotas
from polyhead.service.api.app import build_app
from polyhead.service.api.http.body_limits import FULL_BODIES, IncomingBodies
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import BadRequest, Conflict, NotFound, WrongTask
from polyhead.service.core.model import LoadState, Model
from polyhead.service.core.request import (
    Done,
    Encode,
    Event,
    ExplanationProgress,
    Generate,
    GeneratedToken,
    HeadOutput,
    Request,
    Task,
    TokenOutputs,
)
from polyhead.service.engine.worker import RequestTiming
from polyhead.service.metrics import Metrics, OpenRequests
from polyhead.service.resources.request_memory import UNBOUNDED_HEADROOM, Headroom
from polyhead.service.text.tokenization import TextProcessor

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
WAIT = object()  # in a script: no further event until the request is closed
Script = Callable[[Model, Request], Iterable[Any]]


def model(folder: Path, name: str, task: Task, **others: Any) -> Model:
    tokenizer = Tokenizer.from_folder(folder)
    known: dict[str, Any] = {
        "family": "tiny",
        "labels": (),
        "max_tokens": 64,
        "vocab_size": tokenizer.vocab_size,
        "width": 4,
        "dtype": "float32",
        "executor": "torch",
        "source": "./tiny",
        "created": 1_700_000_000,
        "tokenizer": tokenizer,
        "chat": ChatTemplate(TEMPLATE) if task == "generate" else None,
        "stop_tokens": frozenset({2}),
    }
    return Model(name=name, task=task, **(known | others))


class Source:
    """Events in the order of a script, one in each iteration of the event loop; an exception in it is raised, WAIT
    waits until the source is closed.
    """

    def __init__(self, script: Iterable[Any]) -> None:
        self.script = iter(script)
        self.closed = asyncio.Event()
        self.given = 0
        self.timing = RequestTiming()
        self.ended = self.answered = self.aborted = self.is_exhausted = False
        self.is_due = True  # the next event may be taken
        self.notify: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        return not (self.closed.is_set() or self.is_exhausted)

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self.script:
            if self.closed.is_set():
                return
            if event is WAIT:
                await self.closed.wait()
                return
            await asyncio.sleep(0)
            yield self.count(event)

    def take(self) -> Event | None:
        if not (self.is_open and self.is_due):
            return None
        self.is_due = False
        for event in self.script:
            if event is WAIT:
                return None
            asyncio.get_running_loop().call_soon(self.make_due)
            return self.count(event)
        self.is_exhausted = True
        return None

    def make_due(self) -> None:
        self.is_due = True
        self.notify()

    def on_ready(self, function: Callable[[], None]) -> None:
        self.notify = function

    def count(self, event: Any) -> Event:
        self.given += 1
        self.ended = not isinstance(event, GeneratedToken | HeadOutput | ExplanationProgress)
        self.timing.outcome = "done" if self.ended else self.timing.outcome
        counted: Event = event
        return counted

    def close(self, *, answered: bool = False) -> None:
        if not self.closed.is_set() and not self.ended:
            self.answered, self.aborted = answered, not answered
        self.closed.set()
        self.notify()


class Registry:
    def __init__(self, models: Sequence[Model], script: Script) -> None:
        self.served = {model.name: model for model in models}
        self.script = script
        self.requests: list[Request] = []
        self.sources: list[Source] = []

    def models(self) -> list[Model]:
        return list(self.served.values())

    def states(self) -> Mapping[str, LoadState]:
        return dict.fromkeys(self.served, LoadState("ready", 1.0))

    def expand(self, name: str, tasks: Collection[Task]) -> str:
        return name

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        if name not in self.served:
            raise NotFound(f"no model is called {name!r}; there are:", param="model").with_names(self.served)
        if self.served[name].task not in tasks:
            fitting = [model.name for model in self.models() if model.task in tasks]
            raise WrongTask(f"{name} cannot do that; models that can:", param="model").with_names(fitting)
        return self.served[name]

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        fitting = [model for model in self.models() if model.task in tasks]
        if len(fitting) != 1:
            what = "several models here can; name one of them in the address, /models/NAME/...:"
            raise BadRequest(what).with_names(model.name for model in fitting)
        return fitting[0]

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Source]:
        self.requests += requests
        self.sources += [Source(self.script(model, request)) for request in requests]
        return self.sources[-len(requests) :]

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        raise Conflict(f"there is nothing here that explains {model.name}")


def token_events(text: str, tokenizer: Tokenizer) -> list[Event]:
    """The events of a generator for `text`."""
    return [GeneratedToken(id) for id in tokenizer.encode(text, special=False).ids]


def echo(model: Model, request: Request) -> Iterable[Event]:
    """Generators repeat their prompt and stop; encoders return numbers computed from the tokens."""
    if isinstance(request, Generate):
        answer = request.tokens[: request.max_tokens]
        yield from (GeneratedToken(id, -0.5, scored(request, id)) for id in answer)
        reason = "length" if len(answer) < len(request.tokens) else "stop"
        yield Done(reason, len(request.tokens), len(answer), cached_tokens=1)
    else:
        for form in request.forms:
            yield states(request) if form == "tokens" else HeadOutput(numbers(model, request))
        yield Done("encoded", len(request.tokens))


def scored(request: Generate, id: int) -> tuple[tuple[int, float], ...]:
    """Log-probabilities of the targets, or of `id` and the tokens after it."""
    return tuple((token, -0.5 - n) for n, token in enumerate(request.targets or range(id, id + request.logprobs)))


def states(request: Encode) -> TokenOutputs:
    return TokenOutputs(
        memoryview(array("f", [1.0, 2.0] * len(request.tokens)).tobytes()).cast("f", (len(request.tokens), 2))
    )


def numbers(model: Model, request: Encode) -> list[float]:
    count = {"classify": len(model.labels), "rank": 1, "choose": 1}.get(model.task, request.dimensions or model.width)
    return [sum(request.tokens) % 97 / 2.0**index for index in range(count)]  # exact in float32 and as text


class FakeEngine:
    """An engine whose state a test sets."""

    alive = True
    tokens = 0

    def __init__(self) -> None:
        self.owned: dict[str, int] = {}
        self.broken: list[str] = []
        self.seconds = 0.0

    def tokens_of(self, owner: str) -> int:
        return self.owned.get(owner, 0)

    def stalled_seconds(self) -> float:
        return self.seconds

    def failing(self) -> list[str]:
        return self.broken

    def counts(self) -> dict[tuple[str, Task], OpenRequests]:
        return {}


def application(registry: Registry, headroom: Headroom = UNBOUNDED_HEADROOM, **settings: Any) -> FastAPI:
    known = Settings(**settings).model_copy(update={"models": dict.fromkeys(registry.served, "./tiny")})
    engine, keys = FakeEngine(), Keys(known)
    metrics = Metrics(tuple(registry.served), keys.names)
    bounds = AdmissionLimits(known.max_requests, known.max_tokens_in_flight, known.key_share)
    text = TextProcessor(
        threads=1,
        batch_limit=known.max_batch_texts,
        on_tokenised=metrics.record_tokenisation,
        headroom=headroom,
    )
    server = AppState(
        settings=known,
        registry=registry,
        metrics=metrics,
        text=text,
        admission=Admission(bounds, engine, keys.owners),
        engine=engine,
        keys=keys,
        quotas=Quotas(),
        origins=OriginPolicy(known),
        incoming_bodies=IncomingBodies(FULL_BODIES * known.max_body_bytes),
        headroom=headroom,
    )
    return build_app(server)


def routes(app: FastAPI) -> Iterator[Route]:
    """Every route, those of included routers too."""
    for route in app.routes:
        found = getattr(route, "routes", None) or getattr(route, "original_router", None) or [route]
        yield from getattr(found, "routes", found)


def ask(app: FastAPI, *calls: tuple[str, Any]) -> list[httpx.Response]:
    """The answers to requests of (path, JSON or bytes), one after the other; a body of None is a GET, others are
    POSTs."""

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return [await one(client, path, content) for path, content in calls]

    return asyncio.run(all_of_them())


async def one(client: httpx.AsyncClient, path: str, content: Any) -> httpx.Response:
    if content is None:
        return await client.get(path)
    if isinstance(content, bytes):
        return await client.post(path, content=content)
    return await client.post(path, json=content)


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


class Connection:
    """One POST without a client library, so that it can be aborted at any moment."""

    def __init__(self, path: str, body: bytes, key: str = "") -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        if key:
            cast(Any, self.scope["headers"]).append((b"authorization", f"Bearer {key}".encode()))
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Mapping[str, Any]] = []
        self.sending: Callable[[], Awaitable[None]] = self.at_once

    async def at_once(self) -> None:
        """A client that reads at once."""

    async def send(self, message: Any) -> None:
        await self.sending()
        self.sent.append(message)

    async def run(self, app: FastAPI) -> None:
        await app(self.scope, self.receive, self.send)  # type: ignore[arg-type]

    async def receive(self) -> dict[str, Any]:
        """The next message; once the client has left, that it has, as often as it is asked for, as servers do."""
        message = await self.incoming.get()
        if message["type"] == "http.disconnect":
            self.drop()
        return message

    def drop(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
