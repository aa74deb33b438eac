"""The side that speaks: what the routes take for a registry and an engine, and are many replicas.

Knows no HTTP, no tensor, and not who starts replicas.  The one idea: a stream here is the same Stream that an engine
gives out, with a line to a replica where the engine's thread would be; so deadlines, slow readers and counting are one
code, and a replica that is lost is one error in the streams that it had begun to answer, and nothing in the others.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from ..core.errors import BadRequest, Conflict, PolyheadError, Stopped, Unavailable
from ..core.model import Known, Model, State, concerning
from ..core.request import (
    Done,
    Duty,
    Encode,
    Encoded,
    Event,
    Explain,
    Explained,
    Failed,
    Filled,
    Generate,
    Prompted,
    Request,
    Table,
    Task,
    Token,
)
from ..engine.block_allocator import Key, chain, root
from ..engine.event_stream import Link, Stream
from ..engine.worker import Counts, Ended
from ..runtime.operation import Change
from ..server.process import Books
from .frames import Begun, FrameError
from .replica_connection import Address, Circle, Line
from .replica_set import Roll
from .routing import Affine, Answers, Ask, Routed

log = logging.getLogger("polyhead.fleet")


@dataclass(eq=False, slots=True)
class Sent:
    """A request under way: to which replica, under which number, and how it was counted there."""

    model: Model
    stream: Stream
    ticket: int
    ask: Ask
    line: Line = field(init=False)
    left: int = 0  # tokens of its prompt that are not stored there
    silent: bool = True  # nothing was said of it yet
    again: bool = False  # it was sent before
    parts: int = 0  # events so far that are neither tokens nor its end
    over: bool = False  # the replica has said the last of it

    def expects(self, event: object) -> bool:
        """Whether a replica that keeps to the rules can say this of it."""
        request = self.stream.request
        match event:
            case Begun(waited):
                return 0 <= waited < math.inf
            case Failed():
                return True
            case Done():
                return min(event.prompt_tokens, event.completion_tokens, event.cached_tokens) >= 0
            case Token():
                due = isinstance(request, Generate) and self.stream.tokens < request.max_tokens
                return due and 0 <= event.id < self.model.vocab_size and event.cached >= 0
        kinds: Mapping[type, tuple[type, ...]]
        kinds = {Generate: (Prompted,), Encode: (Encoded, Table, Filled), Explain: (Explained,)}
        self.parts += 1
        return isinstance(event, kinds[type(request)]) and self.parts == 1

    @property
    def movable(self) -> bool:
        """Whether another replica can be asked instead."""
        return self.silent and not self.again and not isinstance(self.stream.request, Explain)


class Fleet:
    """Lives on the event loop thread.  `names` are those of the models that replicas are to serve; `heard` is told of
    each model when the first replica of it is there."""

    def __init__(self, names: Sequence[str], books: Books, secret: str, routed: Routed = Affine) -> None:
        self.heard: Callable[[Model], None] = lambda model: None  # noqa: ARG005
        random = Random()  # nothing is kept secret by it
        self.roll = Roll(names, Circle(secret, self), random)
        self._books, self._policy = books, routed(random)
        self._tickets = count(1)
        self._sent: dict[Stream, Sent] = {}
        self._by_ticket: dict[int, Sent] = {}
        self._links: dict[tuple[str, Duty], Link] = {}
        self._tokens: Counter[str] = Counter()  # of open requests, by owner
        self._answers: dict[str, Answers] = {}
        self._explaining: dict[str, Line] = {}  # by model, who has been asked to get ready for it
        self._closing = False

    # What a registry is asked

    def listed(self, deployment: str, replicas: Mapping[str, Address]) -> None:
        """These are all the replicas of a deployment, by name."""
        self.roll.listed(deployment, replicas)

    def names(self) -> list[str]:
        return self.roll.names()

    def states(self) -> Mapping[str, State]:
        return self.roll.states()

    def models(self) -> list[Model]:
        return self.roll.models()

    def known(self) -> list[Known]:
        return self.roll.known()

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        return self.roll.offer().resolve(name, tasks)

    def expand(self, name: str) -> str:
        return self.roll.offer().expand(name)

    def only(self, tasks: Collection[Task]) -> Model:
        return self.roll.offer().only(tasks)

    def spent(self) -> Mapping[str, float]:
        """Nothing: replicas are started by others."""
        return {}

    def memory(self) -> tuple[int, int]:
        """None of it is here."""
        return 0, 0

    @property
    def change(self) -> Change | None:
        return None

    def deployed(self, *asked: object, **named: object) -> Any:  # noqa: ARG002
        raise Conflict("models of a fleet are changed by deploying it again, not at one of its servers")

    load = reload = unload = alias = unalias = deployed

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        if self._closing:
            raise Unavailable("the server is shutting down", retry_after=1)
        with concerning(model):
            lines = self._lines(model, requests)
            streams = [Stream(request, self._link(model, request)) for request in requests]
            self._send(lines, [self._take(model, stream) for stream in streams])
        for stream in streams:
            stream.start()
        return streams

    async def watch(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """One replica explains a model's answers: the one that was asked first, while it is there."""
        with concerning(model):
            lines = self.roll.fit(model)
            if self._explaining.get(model.name) not in self.roll.having(model.name):
                self._explaining[model.name] = min(lines, key=lambda each: each.name)
            try:
                layout = await self._explaining[model.name].ask("watch", model.name)
            except ConnectionError as error:
                raise Unavailable(f"{error}; send it again", retry_after=1) from None
            if isinstance(layout, PolyheadError):
                raise layout
            return dict(layout)

    # What an engine is asked

    @property
    def alive(self) -> bool:
        return True

    @property
    def tokens(self) -> int:
        return self._tokens.total()

    def tokens_of(self, owner: str) -> int:
        return self._tokens[owner]

    def stalled(self) -> float:
        """Replicas see to that themselves, and are not sent anything meanwhile."""
        return 0.0

    def failing(self) -> list[str]:
        return []

    def counts(self) -> dict[tuple[str, Duty], Counts]:
        counts: dict[tuple[str, Duty], Counts] = {}
        for (model, duty), link in self._links.items():
            begun = Counter(bool(sent.stream.course.begun) for sent in self._sent.values() if sent.stream.link is link)
            counts[model, duty] = Counts(begun[False], begun[True])
        return counts

    async def close(self) -> None:
        """Take nothing new, fail what is there, hang up."""
        self._closing = True
        for stream in list(self._sent):
            stream.abort(Stopped("the server is shutting down", retry_after=1))
        await asyncio.gather(*(line.close() for line in self.roll))

    # What lines say

    def joined(self, line: Line) -> None:
        line.models = {name: model for name, model in line.models.items() if name in self.roll.names()}
        for name, model in line.models.items():
            log.info("%s has a replica: %s at %s:%d", name, line.name, *line.address)
            self._books.metrics.loaded(model)
            self.heard(model)

        self.roll.settle()

    def parts(self, line: Line) -> None:  # noqa: ARG002
        self.roll.settle()

    def said(self, line: Line, events: Sequence[tuple[int, Any]]) -> None:
        """Raises FrameError for what no replica says.  What is said of a request that is over is dropped."""
        for ticket, event in events:
            sent = self._by_ticket.get(ticket)
            if sent is not None and sent.line is line:
                if not sent.expects(event):
                    raise FrameError(f"a request is not answered like this: {str(event)[:200]}")
                self._heard(sent, event)

    def lost(self, line: Line) -> None:
        """What it had begun to answer ends with an error; the rest is asked elsewhere."""
        there = [sent for sent in self._sent.values() if sent.line is line]
        for name in line.models if there or not (line.parting or self._closing) else ():
            self._books.metrics.lost(name)
        gone = Stopped("the replica that computed this was lost; send it again", retry_after=1)
        unheard = [sent for sent in there if sent.movable]
        for sent in there:
            if not sent.movable:
                self._fail(sent, gone)
        self._reroute(unheard, gone)
        self.roll.settle()

    def _heard(self, sent: Sent, event: Event | Begun) -> None:
        match event:
            case Begun(waited):
                sent.stream.course.begun = sent.stream.submitted + waited
                return
            case Failed(error=Unavailable() | Stopped()) if sent.movable:
                self._reroute([sent], event.error)
                return
            case Done() | Failed():
                sent.over = True
            case Token():
                sent.line.candidate.said(sent.ticket)
        sent.silent = False
        sent.stream.receive(event)

    # How it is done

    def _lines(self, model: Model, requests: Sequence[Request]) -> Sequence[Line]:
        """Where they may be sent; explanations to who was asked to get ready for them."""
        lines = self.roll.fit(model)
        if not any(isinstance(request, Explain) for request in requests):
            return lines
        if self._explaining.get(model.name) not in self.roll.having(model.name):
            raise Unavailable(f"the replica that explains {model.name} was lost; send it again", retry_after=1)
        return [self._explaining[model.name]]

    def _take(self, model: Model, stream: Stream) -> Sent:
        """It is under way from now on; `_send` says whither."""
        request = stream.request
        sent = Sent(model, stream, next(self._tickets), self._ask(model, request))
        self._sent[stream] = self._by_ticket[sent.ticket] = sent
        self._tokens[request.terms.owner] += request.prompt_tokens
        return sent

    def _ask(self, model: Model, request: Request) -> Ask:
        if not isinstance(request, Generate):
            return Ask(request.prompt_tokens)
        expected = self._answers.setdefault(model.name, Answers()).expected(request.max_tokens)
        block = next((line.block for line in self.roll.having(model.name)), 0)
        return Ask(request.prompt_tokens, expected, keys_of(model, request, block), block)

    def _send(self, lines: Sequence[Line], sents: Sequence[Sent]) -> None:
        """Each to the replica where it has least to wait for; those of a group together, those of a line at once."""
        together: dict[str, Line] = {}
        frames: dict[Line, list[Sent]] = {}
        for sent in sents:
            group = sent.stream.request.group if isinstance(sent.stream.request, Generate) else ""
            line = together.get(group) or self._chosen(lines, sent)
            if group:
                together[group] = line
            sent.left = line.candidate.take(sent.ticket, sent.ask)
            sent.line = line
            frames.setdefault(line, []).append(sent)
        for line, those in frames.items():
            rows = tuple((sent.ticket, sent.left, sent.stream.request) for sent in those)
            try:
                line.tell("ask", those[0].model.name, those[0].ask.answer, rows)
            except FrameError as error:
                for sent in those:
                    self._fail(sent, BadRequest(f"it cannot be sent to a replica: {error}"))

    def _chosen(self, lines: Sequence[Line], sent: Sent) -> Line:
        candidate, why = self._policy.choose(sent.ask, [line.candidate for line in lines])
        self._books.metrics.routed(sent.model.name, why)
        return next(line for line in lines if line.candidate is candidate)

    def _reroute(self, sents: Sequence[Sent], error: PolyheadError) -> None:
        """To other replicas, once; where there are none they fail with `error`."""
        for name in {sent.model.name for sent in sents}:
            those = [sent for sent in sents if sent.model.name == name]
            left = {sent.line for sent in those}
            for sent in those:
                sent.line.candidate.end(sent.ticket)
                sent.again = True
            with suppress(Unavailable):
                if lines := [line for line in self.roll.fit(those[0].model) if line not in left]:
                    self._books.metrics.rerouted(name, len(those))
                    self._send(lines, those)
                    continue
            for sent in those:
                self._fail(sent, error)

    def _fail(self, sent: Sent, error: PolyheadError) -> None:
        sent.over = True
        sent.stream.receive(Failed(error))

    def _link(self, model: Model, request: Request) -> Link:
        duty: Duty = "explain" if isinstance(request, Explain) else model.task
        if (model.name, duty) not in self._links:
            link = Link(model.name, duty, self._ended, lambda _: None, self._hold, self._resume)
            self._links[model.name, duty] = link
        return self._links[model.name, duty]

    def _hold(self, stream: Stream) -> None:
        sent = self._sent[stream]
        sent.line.tell("hold", sent.ticket)

    def _resume(self, stream: Stream) -> None:
        if sent := self._sent.get(stream):
            sent.line.tell("resume", sent.ticket)

    def _ended(self, stream: Stream, ended: Ended) -> None:
        sent, owner = self._sent.pop(stream), stream.request.terms.owner
        del self._by_ticket[sent.ticket]
        self._tokens[owner] -= stream.request.prompt_tokens
        if not self._tokens[owner]:
            del self._tokens[owner]
        sent.line.candidate.end(sent.ticket)
        if not sent.over:  # from this side: the client left, or has all it wanted, or its time is up
            sent.line.tell("drop", sent.ticket, ended.outcome == "done")
        if ended.task == "generate" and ended.outcome == "done":
            self._answers[sent.model.name].heard(ended.completion_tokens)
        self._books.ended(ended)


def keys_of(model: Model, request: Generate, block: int) -> tuple[Key, ...]:
    """The names of its prompt's full blocks, as far as a router is concerned: models share nothing."""
    if not block or request.source:
        return ()
    keys, parent = [], root(0, f"{model.name}\0{request.salt}")
    for first in range(0, len(request.tokens) - block + 1, block):
        parent = chain(parent, request.tokens[first : first + block])
        keys.append(parent)
    return tuple(keys)
