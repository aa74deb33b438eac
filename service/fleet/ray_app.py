"""The Ray Serve application: replicas of engines on a cluster, and what speaks for them.

The only module that knows Ray.  The one idea: Ray places replicas, asks how they are, counts them up and down and
replaces them; requests and tokens never pass through it (service.fleet), so what it costs, it costs when something
changes.  A replica says where it is to be reached by what Ray calls routing statistics.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ..api.access.access_log import UNTRACED, Traces
from ..concurrency.outcome import on_thread
from ..config.settings import LIBRARY_DEFAULTS, Settings, SettingsError, read
from ..core import logs
from ..resources.process_info import age
from ..runtime import quickstart
from ..server.process import GRACE, Clock, Process, bound, share_the_interpreter
from . import process_state as here
from .autoscaling import QUEUED, ByTokens
from .deployment_settings import parts, with_threads
from .fleet_engine import Fleet
from .frames import LEFT_S
from .ingress import assemble
from .replica_connection import Address

NAMESPACE = "polyhead"
KEY = b"polyhead.fleet.secret"  # where the cluster keeps it
ENDING_S = 30.0  # for Ray's part of it
STATUS_S = 3.0  # how often deployments are asked whether they have failed
LOOK_S = 0.5  # how often replicas are asked where they are
HEALTH_S, PATIENCE_S = 2.0, 30.0
INGRESS, INGRESS_CPUS = "Ingress", 0.5
PACE = {"metrics_interval_s": 1.0, "look_back_period_s": 5.0, "upscale_delay_s": 5.0, "downscale_delay_s": 60.0}
GOING = {"STOPPING", "STOPPED", "PENDING_MIGRATION"}  # states of replicas that end, or end when another is there
ADDRESS = "address"  # what a replica calls where it is to be reached

Told = Callable[[Mapping[str, Address]], None]

log = logging.getLogger("polyhead.scale")


class Finder(RequestRouter):
    """Told of the replicas of a deployment by Ray, as any router is, and tells us."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if (told := here.LISTENERS.get(self._deployment_id.name)) is not None:
            known = {replica.replica_id.unique_id: replica.routing_stats.get(ADDRESS) for replica in replicas}
            told({name: (address[0], address[1]) for name, address in known.items() if address})


class Engines:
    """A replica: an engine, the models of its deployment, and the port where it is asked."""

    async def __init__(self, settings: Settings, secret: str) -> None:  # type: ignore[misc]
        logs.configure(settings.log_format, settings.log_level)
        from .replica import Replica  # which is torch, that nobody else here needs

        name = ray_serve.get_replica_context().replica_id.unique_id
        self.replica = Replica(with_threads(settings), name, secret)
        host = ray.util.get_node_ip_address()
        self.address = host, await self.replica.start(host, settings.ports)

    async def greet(self) -> str:
        """Somebody is there."""
        return self.replica.name

    def record_routing_stats(self) -> dict[str, Any]:
        return {ADDRESS: self.address}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUED: float(self.replica.queued)}

    def check_health(self) -> None:
        """As /livez, and what the engine has found by trying: a model that cannot compute any more."""
        reasons = self.replica.failing()
        if reasons:
            raise RuntimeError("; ".join(reasons))

    async def __del__(self) -> None:
        """Ray has taken it off the list: it finishes what it has begun."""
        if hasattr(self, "address"):
            await self.replica.close()


def delegate() -> here.Delegate:
    return here.DELEGATE


@ray_serve.ingress(delegate)
class Ingress:
    """What speaks HTTP, behind Ray's own proxy; as many of them as are wanted."""

    async def __init__(self, settings: Settings, secret: str, **handles: DeploymentHandle) -> None:  # type: ignore[misc]
        logs.configure(settings.log_format, settings.log_level)
        share_the_interpreter()
        app = ray_serve.get_replica_context().app_name
        own = parts(settings)
        deployed = {
            handle.deployment_name: Deployed(app, handle, own[handle.deployment_name].models)
            for handle in handles.values()
        }
        self.served = assemble(settings, secret, lambda fleet: found(fleet, deployed))
        self.life = self.served.router.lifespan_context(self.served)
        await self.life.__aenter__()
        here.DELEGATE.app = self.served

    def check_health(self) -> None:
        if reasons := self.served.state.server.dying():
            raise RuntimeError("; ".join(reasons))

    async def __del__(self) -> None:
        if here.DELEGATE.app is not None:
            await self.life.__aexit__(None, None, None)


@dataclass(frozen=True)
class Deployed:
    """A deployment of replicas, as those see it who speak for it."""

    app: str
    handle: DeploymentHandle
    models: Collection[str]


async def found(fleet: Fleet, deployed: Mapping[str, Deployed]) -> None:
    """For ever: tell the fleet which replicas each deployment has, and which cannot have any."""
    loop = asyncio.get_running_loop()

    def told(name: str) -> Told:
        def tell(replicas: Mapping[str, Address]) -> None:
            with suppress(RuntimeError):  # nobody listens any more
                loop.call_soon_threadsafe(fleet.listed, name, replicas)

        return tell

    for name in deployed:
        here.LISTENERS[name] = told(name)
    greeting = [asyncio.ensure_future(one.handle.greet.remote()) for one in deployed.values()]  # makes their routers
    while True:
        await asyncio.sleep(STATUS_S)
        with suppress(RayError):  # whoever knows is being started again
            apps = (await on_thread(ray_serve.status)).applications
            for name, one in deployed.items():
                status = apps[one.app].deployments.get(name) if one.app in apps else None
                if status is not None:
                    failed = status.message if status.status == "DEPLOY_FAILED" else ""
                    wanted = sum(count for state, count in status.replica_states.items() if state not in GOING)
                    fleet.roll.deployed(one.models, wanted, last_line(failed))
        greeting = [one for one in greeting if not one.done()]  # those of replicas that were not there yet


def last_line(message: str) -> str:
    """What an exception says, of all that Ray says of it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("polyhead.service.core.errors.")]
    return (ours or lines or [""])[-1].rpartition("polyhead.service.core.errors.")[2]


def engines(name: str, settings: Settings, secret: str) -> ray_serve.Application:
    """A deployment of replicas."""
    low, high = settings.bounds
    policy = AutoscalingPolicy(policy_function=ByTokens, policy_kwargs={"target": settings.queued_tokens})
    counted = AutoscalingConfig(min_replicas=low, max_replicas=high, policy=policy, **PACE) if low < high else None
    deployment = ray_serve.deployment(
        name=name,
        num_replicas=None if counted else low,
        autoscaling_config=counted,
        max_replicas_per_node=settings.replicas_per_node or None,
        ray_actor_options={
            "num_cpus": settings.replica_cpus,
            "num_gpus": settings.replica_gpus,
            "runtime_env": {"env_vars": dict(LIBRARY_DEFAULTS)},
        },
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=PATIENCE_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=LEFT_S + settings.drain_seconds + GRACE,
        request_router_config=RequestRouterConfig(request_router_class=Finder, request_routing_stats_period_s=LOOK_S),
    )
    return deployment(Engines).bind(settings, secret)


def application(args: Mapping[str, Any]) -> ray_serve.Application:
    """What `serve run service.fleet.ray_app:application` and config files deploy; `args` are settings, as in polyhead's
    file.

    A deployment for every model, named like it, and one named Ingress.
    """
    settings = known(read(args))
    secret = secret_of(settings)
    deployments = {name: engines(name, own, secret) for name, own in parts(settings).items()}
    if INGRESS in deployments:
        raise SettingsError(f"models: {INGRESS} is what speaks HTTP here; call the model, or the pool, otherwise")
    ingress = ray_serve.deployment(
        name=INGRESS,
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "runtime_env": {"env_vars": dict(LIBRARY_DEFAULTS)}},
        graceful_shutdown_timeout_s=settings.drain_seconds + GRACE,
    )
    return ingress(Ingress).bind(
        settings, secret, **{f"of_{number}": one for number, one in enumerate(deployments.values())}
    )


def known(settings: Settings) -> Settings:
    """With the quick-start models where none are named."""
    if settings.models:
        return settings
    quickstart.fetch_all(settings.model_dir)
    return settings.model_copy(update={"models": quickstart.sources(settings.model_dir)})


def secret_of(settings: Settings) -> str:
    """What all of one cluster know: given, or made by whoever comes first and kept by Ray."""
    if given := settings.fleet_key.get_secret_value():
        return given
    internal_kv._internal_kv_put(KEY, token_urlsafe(32).encode(), overwrite=False, namespace=NAMESPACE.encode())
    kept = internal_kv._internal_kv_get(KEY, namespace=NAMESPACE.encode())
    return kept.decode()


def serve(settings: Settings, traces: Traces = UNTRACED) -> int:
    """`polyhead serve --ray`: replicas on a cluster, HTTP here.  Returns and raises as service.server.assembly.serve
    does.
    """
    imported = age()
    listener = bound(settings.host, settings.port)
    settings = known(settings)
    clock = Clock(imported, age())
    joined(settings)
    secret = secret_of(settings)
    targets = [
        ray_serve.RunTarget(engines(name, own, secret), name=f"polyhead-{name}", route_prefix=None)
        for name, own in parts(settings).items()
    ]
    ray_serve.start(proxy_location="Disabled")
    ray_serve.run_many(targets, wait_for_applications_running=False)
    deployed = {
        name: Deployed(f"polyhead-{name}", ray_serve.get_deployment_handle(name, f"polyhead-{name}"), own.models)
        for name, own in parts(settings).items()
    }

    async def find(fleet: Fleet) -> None:
        async with asyncio.TaskGroup() as together:
            together.create_task(found(fleet, deployed))
            while not all(state.settled for state in fleet.states().values()):
                await asyncio.sleep(LOOK_S)
            process.settled(fleet, clock)

    process = Process(settings, assemble(settings, secret, find, traces=traces), listener)
    share_the_interpreter()
    try:
        process.run(sockets=[listener])
    finally:
        process.hanging.cancel()
        ending = threading.Timer(ENDING_S, os._exit, [process.code])  # whatever of Ray's doesn't end
        ending.daemon = True
        ending.start()
        if not settings.ray_address:
            ray_serve.shutdown()
        ray.shutdown()
    return process.code


def joined(settings: Settings) -> None:
    """Part of a cluster.  Raises SettingsError where there is none at that address."""
    try:
        ray.init(settings.ray_address or "local", namespace=NAMESPACE, include_dashboard=False, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        raise SettingsError(f"ray_address: {settings.ray_address!r}: {error}") from None
