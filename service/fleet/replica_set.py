"""The set of replicas: their connections, the models that they have, and which of them a request may be sent to.

A model is ready while at least one replica takes requests for it.  While a replica is replaced by a newer one both are
connected, and each gets the requests that were read for its version of the model.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random

from ..core.errors import NotFound, PolyheadError, Unavailable
from ..core.model import LoadState, Model, ServedName
from ..runtime.model_resolver import ModelResolver
from .replica_connection import Address, ConnectionContext, ReplicaConnection

SPILL_TOKENS = (
    4096  # extra queued tokens at replicas that have loaded a model before a request goes to one that must load it
)

log = logging.getLogger("polyhead.fleet")


class ReplicaSet:
    """The replicas of all deployments; `names` are the models that they are to serve."""

    def __init__(self, names: Sequence[str], context: ConnectionContext, random: Random) -> None:
        self._names, self._context, self._random = tuple(names), context, random
        self._connections: dict[tuple[str, str], ReplicaConnection] = {}  # by deployment and replica
        self._unlisted: list[ReplicaConnection] = []  # no longer listed, with open requests
        self._failures: dict[str, str] = {}  # by model, why no replica could be started
        self._target_counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[ReplicaConnection]:
        return iter((*self._connections.values(), *self._unlisted))

    def update_replicas(self, deployment: str, replicas: Mapping[str, Address]) -> None:
        """Set the replicas of a deployment, by name: connect to the new ones and retire those that are gone."""
        for key, connection in list(self._connections.items()):
            if key[0] == deployment and replicas.get(key[1]) != connection.address:
                connection.unlist()
                self._unlisted.append(self._connections.pop(key))
        for name, address in replicas.items():
            if (deployment, name) not in self._connections:
                self._connections[deployment, name] = ReplicaConnection(name, address, self._context)
        self.retire_leaving()

    def retire_leaving(self) -> None:
        """Retire leaving replicas whose models are all served by replicas that stay.

        Not before: Ray may stop a replica before it lists its successor.
        """
        for connection in [connection for connection in self if connection.will_leave]:
            if not connection.is_open or all(self._staying_for(name) for name in connection.models):
                connection.retire()
        self._unlisted = [connection for connection in self._unlisted if connection.is_open]

    def set_target(self, names: Collection[str], target: int, why: str) -> None:
        """Set how many replicas the models should have, and why none could be started (empty: no failure)."""
        for name in names:
            self._target_counts[name], self._failures[name] = target, why

    def target_counts(self) -> Mapping[str, int]:
        """Return how many replicas each model should have, where this is known."""
        return self._target_counts

    def names(self) -> list[str]:
        return list(self._names)

    def states(self) -> Mapping[str, LoadState]:
        return {name: self.model_state(name) for name in self._names}

    def models(self) -> list[Model]:
        """Return each ready model once.  If replicas have different versions of it, a random one of them."""
        connections = [(name, self.connections_for(name)) for name in self._names]
        return [self._random.choice(serving).models[name] for name, serving in connections if serving]

    def model_statuses(self) -> list[ServedName]:
        ready = {model.name: model for model in self.models()}
        return [self.known_model(name, ready.get(name)) for name in self._names]

    def queued_tokens(self) -> Iterable[tuple[str, str, int]]:
        """Yield model, replica address and its queued tokens."""
        for connection in self._connections.values():
            host, port = connection.address
            for name in connection.models if connection.is_open else ():
                yield name, f"{host}:{port}", connection.candidate.queued_tokens

    def metrics_addresses(self) -> Iterable[tuple[str, str, Address]]:
        """Yield deployment, name and metrics address of each connected replica."""
        return (
            (deployment, connection.name, connection.metrics_address)
            for (deployment, _), connection in self._connections.items()
            if connection.is_open
        )

    def ready_counts(self) -> Mapping[str, int]:
        """Return how many replicas take requests for each model."""
        return {name: len(self.connections_for(name)) for name in self._names}

    def connections_for(self, name: str) -> list[ReplicaConnection]:
        """Return the connections to replicas that take requests for a model; to leaving ones only if no other is
        left.
        """
        return self._staying_for(name) or [
            connection
            for connection in self
            if connection.is_open and not connection.is_retired and name in connection.models
        ]

    def _staying_for(self, name: str) -> list[ReplicaConnection]:
        return [
            connection
            for connection in self._connections.values()
            if connection.is_open and not connection.will_leave and name in connection.models
        ]

    def eligible_for(self, model: Model) -> list[ReplicaConnection]:
        """Return the connections that requests for `model` may be sent to.  Raises Unavailable or NotFound if there is
        none.

        Replicas with exactly this model come first, then those whose version has the same tokenizer: they can answer a
        request that was read for the version being replaced.  Replicas that report a problem are left out if others
        remain.  Replicas of a pool that have the model in memory are preferred, up to SPILL_TOKENS.
        """
        serving = self.connections_for(model.name)
        same = [connection for connection in serving if connection.models[model.name] is model]
        compatible = same or [
            connection
            for connection in serving
            if connection.models[model.name].tokenizer.digest == model.tokenizer.digest
        ]
        if not compatible:
            raise self.unavailable_error(model.name)
        ready = [connection for connection in compatible if connection.is_ready] or compatible
        loaded = [connection for connection in ready if connection.has_loaded(model.name)]
        least, idlest = (
            min((connection.candidate.queued_tokens for connection in connections), default=SPILL_TOKENS)
            for connections in (loaded, ready)
        )
        return loaded if loaded and least - idlest < SPILL_TOKENS else ready

    def model_state(self, name: str) -> LoadState:
        if self.connections_for(name):
            return LoadState("ready", 1.0)
        reasons = (connection.broken[name] for connection in self._connections.values() if name in connection.broken)
        why = next(reasons, self._failures.get(name, ""))
        return LoadState("broken", reason=why) if why else LoadState("waiting")

    def known_model(self, name: str, model: Model | None) -> ServedName:
        return ServedName(
            name, model.source if model else "", self.model_state(name), model.task if model else None, 0, ()
        )

    def resolver(self) -> ModelResolver:
        return ModelResolver(self.states(), self.models(), self.unavailable_error)

    def unavailable_error(self, name: str) -> PolyheadError:
        if name not in self._names:
            return NotFound(f"no model is called {name[:100]!r}; there are:", param="model").with_names(self._names)
        state = self.model_state(name)
        if state.phase == "broken":
            return Unavailable(f"{name} could not be loaded: {state.reason}")
        return Unavailable(f"no replica of {name} takes requests yet", retry_after=2)
