"""The fleet: it stands in for the registry and the engine in a process that serves HTTP, and routes to many replicas.

A stream is the engine's Stream.  Its context sends over a connection to a replica instead of calling the engine's
thread, so deadlines, slow readers and counting use the same code.  If a replica is lost, the streams that it had begun
to answer end with an error; all others are sent to another replica.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, groupby, pairwise
from random import Random
from typing import Any

from ..core.errors import BadRequest, Conflict, PolyheadError, Stopped, Unavailable
from ..core.model import LoadState, Model, ServedName, name_model_in_errors
from ..core.request import (
    Done,
    Encode,
    Event,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Generate,
    GeneratedToken,
    PromptScores,
    Request,
    Task,
    WorkerTask,
)
from ..engine.block_allocator import BlockKey, block_keys, root_key
from ..engine.event_stream import OpenTokens, Stream, StreamContext
from ..engine.worker import RequestCounts, RequestEnd
from ..runtime.operation import ModelOperation
from ..server.process import Telemetry
from . import event_sizes
from .event_sizes import Layout
from .frames import FrameError, RequestStarted, SimilarRequest
from .messages import REQUESTS_PER_FRAME, PackedRows, fill_frames, pack_rows
from .replica_connection import Address, ConnectionContext, ReplicaConnection
from .replica_set import ReplicaSet
from .routing import AnswerLengths, CreatePolicy, PrefixAffinity, RoutingRequest
from .similar_requests import shorten_request

# Tokens that were read from a cache; a request that is preempted counts its own again.
MAX_CACHED_TOKENS = 1 << 32
# Tokens of the requests that are packed together, each of which counts ROW_TOKENS more.
FRAME_TOKENS, ROW_TOKENS = 1 << 17, 1 << 5
LAYOUT_ATTEMPTS = 2  # replicas that are asked to load an explainer, one after the other if they do not answer

log = logging.getLogger("polyhead.fleet")


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request that was sent to a replica, with its number on the connection and its counts for routing."""

    model: Model
    stream: Stream
    number: int
    routing: RoutingRequest
    connection: ReplicaConnection = field(init=False)
    uncached_tokens: int = 0  # prompt tokens that are not in the replica's cache
    is_unanswered: bool = True  # no event of it was received yet
    was_rerouted: bool = False  # it was sent to another replica before
    result_events: int = 0  # events so far that are neither a token nor an end
    progress: float = 0.0  # the share of an explanation that is done
    is_over: bool = False  # the last event of it was received
    layout: Layout = field(default_factory=dict)  # of the model's attention, for explanations

    def accepts(self, event: object) -> bool:
        """Whether a correct replica can send `event` next for this request."""
        request = self.stream.request
        match event:
            case RequestStarted(waited):
                return 0 <= waited < math.inf
            case Failed():
                return True
            case Done():
                most = request.max_tokens + 1 if isinstance(request, Generate) else 0  # a stop token counts, too
                counts = (event.prompt_tokens, event.completion_tokens, event.cached_tokens)
                limits = (request.prompt_tokens, most, MAX_CACHED_TOKENS)
                return all(0 <= given <= limit for given, limit in zip(counts, limits, strict=True))
            case GeneratedToken():
                if not isinstance(request, Generate) or self.stream.tokens >= request.max_tokens:
                    return False
                has_size = event_sizes.has_token_size(self.model, request, event)
                return has_size and 0 <= event.cached_tokens <= MAX_CACHED_TOKENS
            case ExplanationProgress(share):
                has_grown, self.progress = self.progress < share <= 1, share
                return isinstance(request, ExplainTextRequest) and request.reports_progress and has_grown
        is_right = self._is_result(event)
        self.result_events += is_right  # what is refused may be computed again by another replica
        return is_right

    def _is_result(self, event: object) -> bool:
        """Whether it is the result that is due, with as many values as were asked for."""
        match self.stream.request, event:
            case Encode() as request, _:
                due = request.forms[self.result_events : self.result_events + 1]
                return any(event_sizes.has_output_size(self.model, request, form, event) for form in due)
            case Generate() as request, PromptScores():
                return not self.result_events and event_sizes.has_score_size(self.model, request, event)
            case ExplainTextRequest() as request, ExplanationResult():
                return not self.result_events and event_sizes.has_explanation_size(request, self.layout, event)
        return False

    @property
    def can_reroute(self) -> bool:
        """Whether another replica can compute it instead."""
        return self.is_unanswered and not self.was_rerouted and not isinstance(self.stream.request, ExplainTextRequest)


class Fleet:
    """A registry and an engine whose models are computed by replicas.  It lives on the event loop thread.

    `names` are the models that replicas are to serve.  `on_model_available` is called with each model when its first
    replica connects.
    """

    def __init__(
        self, names: Sequence[str], telemetry: Telemetry, secret: str, create_policy: CreatePolicy = PrefixAffinity
    ) -> None:
        self.on_model_available: Callable[[Model], None] = lambda model: None  # noqa: ARG005
        random = Random()  # not used for cryptography
        self.replicas = ReplicaSet(names, ConnectionContext(secret, self), random)
        self._telemetry, self._policy = telemetry, create_policy(random)
        self._numbers = count(1)
        self._routed: dict[Stream, RoutedRequest] = {}
        self._by_number: dict[int, RoutedRequest] = {}
        self._contexts: dict[tuple[str, WorkerTask], StreamContext] = {}
        self._tokens = OpenTokens()
        self._answer_lengths: dict[str, AnswerLengths] = {}
        self._explainers: dict[str, ReplicaConnection] = {}  # by model, the replica that has loaded its explainer
        self._layouts: dict[str, Layout] = {}  # by model, what that replica has stated
        # Kept while no replica has them: to decode a model again holds the interpreter for about a second.
        self._newest_models: dict[str, Model] = {}
        self._is_closing = False

    # The registry's interface

    def update_replicas(self, deployment: str, replicas: Mapping[str, Address]) -> None:
        """Set the replicas of a deployment, by name."""
        self.replicas.update_replicas(deployment, replicas)

    def names(self) -> list[str]:
        return self.replicas.names()

    def states(self) -> Mapping[str, LoadState]:
        return self.replicas.states()

    def models(self) -> list[Model]:
        return self.replicas.models()

    def model_statuses(self) -> list[ServedName]:
        return self.replicas.model_statuses()

    def resolve(self, name: str, tasks: Collection[Task]) -> Model:
        return self.replicas.resolver().resolve(name, tasks)

    def expand(self, name: str, tasks: Collection[Task]) -> str:
        return self.replicas.resolver().expand(name, tasks)

    def resolve_only(self, tasks: Collection[Task]) -> Model:
        return self.replicas.resolver().resolve_only(tasks)

    def stage_seconds(self) -> Mapping[str, float]:
        """Empty: replicas are loaded in other processes."""
        return {}

    def memory_budget(self) -> tuple[int, int]:
        """Zero: models use no memory of this process."""
        return 0, 0

    @property
    def operation(self) -> ModelOperation | None:
        return None

    def reject_change(self, *asked: object, **named: object) -> Any:  # noqa: ARG002
        raise Conflict("models of a fleet are changed by deploying it again, not at one of its servers")

    load = reload = unload = alias = unalias = reject_change

    def submit(self, model: Model, requests: Sequence[Request]) -> list[Stream]:
        if self._is_closing:
            raise Unavailable("the server is shutting down", retry_after=1)
        with name_model_in_errors(model):
            connections = self._eligible_connections(model, requests)
            streams = [Stream(request, self._context_of(model, request)) for request in requests]
            prompts = PromptKeys(model, self._block_tokens(model))
            self._send(connections, [self._register(prompts, stream) for stream in streams])
        for stream in streams:
            stream.start()
        return streams

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        """Load the explainer of a model on one replica and return its layout: layers and heads by kind of attention.

        The same replica explains the model as long as it is connected and answers.  Raises Unavailable if there is
        none, or none answers.
        """
        with name_model_in_errors(model):
            known, serving = self._explainers.get(model.name), self.replicas.connections_for(model.name)
            others = [each for each in self.replicas.eligible_for(model) if each is not known]
            others.sort(key=lambda each: each.name)
            connections = [known, *others] if known is not None and known in serving else others
            error: Exception = ConnectionError("its replica was lost")
            for connection in connections[:LAYOUT_ATTEMPTS]:
                self._explainers[model.name] = connection
                try:
                    layout = await connection.call("watch", model.name)
                except TimeoutError as slow:
                    error = slow
                    continue
                except ConnectionError as lost:
                    error = lost
                    break
                if isinstance(layout, PolyheadError):
                    raise layout
                self._layouts[model.name] = dict(layout)
                return dict(layout)
            raise Unavailable(f"{error}; send it again", retry_after=1) from None

    # The engine's interface

    @property
    def alive(self) -> bool:
        return True

    @property
    def tokens(self) -> int:
        return self._tokens.total

    def tokens_of(self, owner: str) -> int:
        return self._tokens.of(owner)

    def stalled_seconds(self) -> float:
        """Zero: a replica that stalls reports itself as not ready and is sent no requests."""
        return 0.0

    def failing(self) -> list[str]:
        return []

    def counts(self) -> dict[tuple[str, WorkerTask], RequestCounts]:
        counts: dict[tuple[str, WorkerTask], RequestCounts] = {}
        for (model, task), link in self._contexts.items():
            started = Counter(
                bool(sent.stream.timing.started) for sent in self._routed.values() if sent.stream.context is link
            )
            counts[model, task] = RequestCounts(started[False], started[True])
        return counts

    async def close(self) -> None:
        """Accept no new requests, abort the open ones and close all connections."""
        self._is_closing = True
        for stream in list(self._routed):
            stream.abort(Stopped("the server is shutting down", retry_after=1))
        await asyncio.gather(*(connection.close() for connection in self.replicas))

    # Calls of connections (ConnectionListener)

    def on_connected(self, connection: ReplicaConnection) -> None:
        served = {*self.replicas.names()}
        connection.models = {name: model for name, model in connection.models.items() if name in served}
        connection.broken = {name: why for name, why in connection.broken.items() if name in served}
        self._newest_models.update(connection.models)
        for name, model in connection.models.items():
            log.info("%s has a replica: %s at %s:%d", name, connection.name, *connection.address)
            self._telemetry.metrics.record_loaded(model)
            self.on_model_available(model)

        self.replicas.retire_leaving()

    def on_leaving(self, connection: ReplicaConnection) -> None:  # noqa: ARG002
        self.replicas.retire_leaving()

    def on_events(self, connection: ReplicaConnection, events: Sequence[tuple[int, Any]]) -> None:
        """Deliver events, by request number.  Events of a request that is over are dropped.  Raises FrameError for an
        event that a correct replica never sends.
        """
        for number, event in events:
            sent = self._by_number.get(number)
            if sent is not None and sent.connection is connection:
                if not sent.accepts(event):
                    raise FrameError(f"a request is not answered like this: {type(event).__name__}")
                self._receive_event(sent, event)

    def on_lost(self, connection: ReplicaConnection) -> None:
        """End the requests that the replica had begun to answer with an error, and send the others to another
        replica.
        """
        affected = [sent for sent in self._routed.values() if sent.connection is connection]
        for name in connection.models if affected or not (connection.will_leave or self._is_closing) else ():
            self._telemetry.metrics.record_lost_replica(name)
        error = Stopped("the replica that computed this was lost; send it again", retry_after=1)
        movable = [sent for sent in affected if sent.can_reroute]
        for sent in affected:
            if not sent.can_reroute:
                self._fail(sent, error)
        self._reroute(movable, error)
        self.replicas.retire_leaving()

    def _receive_event(self, sent: RoutedRequest, event: Event | RequestStarted) -> None:
        match event:
            case RequestStarted(waited):
                sent.stream.timing.started = sent.stream.submitted + waited
                return
            case Failed(error=Unavailable() | Stopped()) if sent.can_reroute:
                self._reroute([sent], event.error)
                return
            case Done() | Failed():
                sent.is_over = True
            case GeneratedToken():
                sent.connection.candidate.count_token(sent.number)
        sent.is_unanswered = False
        sent.stream.receive(event)

    # Routing

    def _eligible_connections(self, model: Model, requests: Sequence[Request]) -> Sequence[ReplicaConnection]:
        """Return the connections that the requests may be sent to.  Explanations go to the replica that has loaded the
        explainer.
        """
        connections = self.replicas.eligible_for(model)
        if not any(isinstance(request, ExplainTextRequest) for request in requests):
            return connections
        if self._explainers.get(model.name) not in self.replicas.connections_for(model.name):
            raise Unavailable(f"the replica that explains {model.name} was lost; send it again", retry_after=1)
        return [self._explainers[model.name]]

    def _block_tokens(self, model: Model) -> int:
        """Return the tokens in a block of the replicas' caches; 0 if no replica has the model."""
        return next((connection.block_tokens for connection in self.replicas.connections_for(model.name)), 0)

    def _register(self, prompts: "PromptKeys", stream: Stream) -> RoutedRequest:
        """Register a request before `_send` chooses its connection."""
        request = stream.request
        routing = self._routing_request(prompts, request)
        sent = RoutedRequest(prompts.model, stream, next(self._numbers), routing)
        sent.layout = self._layouts.get(prompts.model.name, sent.layout)
        self._routed[stream] = self._by_number[sent.number] = sent
        self._tokens.add(stream)
        return sent

    def _routing_request(self, prompts: "PromptKeys", request: Request) -> RoutingRequest:
        if not isinstance(request, Generate):
            return RoutingRequest(request.prompt_tokens)
        lengths = self._answer_lengths.setdefault(prompts.model.name, AnswerLengths())
        expected = lengths.expected_tokens(request.max_tokens)
        return RoutingRequest(request.prompt_tokens, expected, prompts.keys_of(request), prompts.block_tokens)

    def _send(self, connections: Sequence[ReplicaConnection], to_send: Sequence[RoutedRequest]) -> None:
        """Send each request to the replica that the policy chooses.  The requests of one group, which follow one
        another, go to the same replica.
        """
        batches: dict[ReplicaConnection, list[RoutedRequest]] = {}
        for _, members in groupby(to_send, group_of):
            first, *rest = members
            connection = self._choose_connection(connections, first)
            first.uncached_tokens = connection.candidate.add_request(first.number, first.routing)
            batch = batches.setdefault(connection, [])
            batch.append(first)
            cached = connection.candidate.stored_tokens(first.routing) if rest else 0
            for sent in rest:  # its prompt is that of the first, whose blocks are counted already
                routing = RoutingRequest(sent.routing.prompt_tokens - cached, sent.routing.expected_tokens)
                sent.uncached_tokens = connection.candidate.add_request(sent.number, routing)
                batch.append(sent)
        for connection, batch in batches.items():
            for sent in batch:
                sent.connection = connection
            parts = (part for groups in split_batch(batch) for part in self._pack_groups(groups))
            fields = "ask", batch[0].model.name, batch[0].routing.expected_tokens
            for frame in fill_frames(fields, parts, REQUESTS_PER_FRAME):
                connection.send_frame(frame)

    def _pack_groups(self, groups: Sequence[Sequence[RoutedRequest]]) -> Sequence[PackedRows]:
        """Pack groups of requests.  Those of a group that cannot be sent fail, and the others are packed without it."""
        try:
            return [pack_rows(request_rows([sent for group in groups for sent in group]))]
        except FrameError as error:
            if len(groups) > 1:
                return [part for group in groups for part in self._pack_groups([group])]
            for sent in groups[0]:
                self._fail(sent, BadRequest(f"it cannot be sent to a replica: {error}"))
            return []

    def _choose_connection(self, connections: Sequence[ReplicaConnection], sent: RoutedRequest) -> ReplicaConnection:
        candidate, why = self._policy.choose(sent.routing, [connection.candidate for connection in connections])
        self._telemetry.metrics.record_routed(sent.model.name, why)
        return next(connection for connection in connections if connection.candidate is candidate)

    def _reroute(self, to_send: Sequence[RoutedRequest], error: PolyheadError) -> None:
        """Send the requests to other replicas, once.  Without another replica they fail with `error`."""
        for name in {sent.model.name for sent in to_send}:
            batch = [sent for sent in to_send if sent.model.name == name]
            left = {sent.connection for sent in batch}
            for sent in batch:
                sent.connection.candidate.remove_request(sent.number)
                sent.was_rerouted = True
            with suppress(Unavailable):
                if connections := [
                    connection for connection in self.replicas.eligible_for(batch[0].model) if connection not in left
                ]:
                    self._telemetry.metrics.record_rerouted(name, len(batch))
                    self._send(connections, batch)
                    continue
            for sent in batch:
                self._fail(sent, error)

    def _fail(self, sent: RoutedRequest, error: PolyheadError) -> None:
        sent.is_over = True
        sent.stream.receive(Failed(error))

    def _context_of(self, model: Model, request: Request) -> StreamContext:
        task: WorkerTask = "explain" if isinstance(request, ExplainTextRequest) else model.task
        if (model.name, task) not in self._contexts:
            context = StreamContext(model.name, task, self._on_ended, lambda _: None, self._hold, self._resume)
            self._contexts[model.name, task] = context
        return self._contexts[model.name, task]

    def _hold(self, stream: Stream) -> None:
        self._tokens.subtract(stream)
        sent = self._routed[stream]
        sent.connection.send("hold", sent.number)

    def _resume(self, stream: Stream) -> None:
        self._tokens.add(stream)
        sent = self._routed[stream]
        sent.connection.send("resume", sent.number)

    def _on_ended(self, stream: Stream, ended: RequestEnd) -> None:
        sent = self._routed.pop(stream)
        del self._by_number[sent.number]
        if not stream.is_paused:
            self._tokens.subtract(stream)
        sent.connection.candidate.remove_request(sent.number)
        if not sent.is_over:  # ended on this side: the client left, a stop string was found, or the deadline passed
            sent.connection.send("drop", sent.number, ended.outcome == "done")
        if ended.task == "generate" and ended.outcome == "done":
            self._answer_lengths[sent.model.name].add(ended.completion_tokens)
        self._telemetry.record_end(ended)


@dataclass(slots=True)
class PromptKeys:
    """The keys of the full blocks of prompts, computed once for requests in a row that have the same prompt.

    `block_tokens` are those of a block of the replicas' caches; 0: no keys are computed.
    """

    model: Model
    block_tokens: int
    _tokens: tuple[int, ...] = ()
    _salt: str = ""
    _keys: tuple[BlockKey, ...] = ()

    def keys_of(self, request: Generate) -> tuple[BlockKey, ...]:
        """Return the keys of the prompt's full blocks.  The model's name is part of the key: models share no blocks."""
        if not self.block_tokens or request.source:
            return ()
        if request.tokens is not self._tokens or request.salt != self._salt:
            root = root_key(0, f"{self.model.name}\0{request.salt}")
            self._tokens, self._salt = request.tokens, request.salt
            self._keys = tuple(block_keys(root, request.tokens, self.block_tokens))
        return self._keys


def group_of(sent: RoutedRequest) -> str | int:
    """Return the group of a request, or its number if it has none."""
    request = sent.stream.request
    return (request.group if isinstance(request, Generate) else "") or sent.number


def split_batch(batch: Sequence[RoutedRequest]) -> Iterator[Sequence[Sequence[RoutedRequest]]]:
    """Yield the groups of a batch, as many together as a frame should have."""
    groups, size = list[Sequence[RoutedRequest]](), 0
    for _, members in groupby(batch, group_of):
        group = list(members)
        tokens = group[0].stream.request.prompt_tokens + ROW_TOKENS * len(group)  # a group has one prompt
        if groups and size + tokens > FRAME_TOKENS:
            yield groups
            groups, size = [], 0
        groups.append(group)
        size += tokens
    yield groups


def request_rows(batch: Sequence[RoutedRequest]) -> Sequence[tuple[int, int, Request | SimilarRequest]]:
    """Return the rows of requests.  Of each but the first only what differs from the one before it is sent."""
    first = batch[0]
    rows: list[tuple[int, int, Request | SimilarRequest]] = [
        (first.number, first.uncached_tokens, first.stream.request)
    ]
    for before, sent in pairwise(batch):
        row = shorten_request(before.number, before.stream.request, sent.stream.request)
        rows.append((sent.number, sent.uncached_tokens, row))
    return rows
