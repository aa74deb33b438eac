"""The Ray Serve application: deployments of engine replicas on a cluster, and the ingress in front of them.

This is the only module that imports Ray.  Ray places, checks, scales and replaces replicas.  Requests and tokens do not
pass through Ray (see service.fleet), so Ray adds no cost to them.  A replica reports its address in Ray's routing
statistics.
"""

import asyncio
import logging
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

from ..api.access.access_log import NO_TRACING, RequestTracer
from ..concurrency.outcome import run_on_thread
from ..config.settings import LIBRARY_DEFAULTS, Settings, SettingsError, read_settings
from ..core import logs
from ..resources.connection_memory import limit_connections
from ..resources.process_info import process_age
from ..runtime import quickstart
from ..server.process import EXIT_SECONDS, ServerProcess, StartTimes, bind_socket, tune_interpreter
from . import process_state
from .autoscaling import QUEUED_TOKENS_STAT, QueuedTokensPolicy
from .deployment_settings import split_settings, with_threads
from .fleet_engine import Fleet
from .frames import LEAVE_TIMEOUT_S
from .ingress import assemble_ingress
from .replica_connection import Address

NAMESPACE = "polyhead"
SECRET_KEY = b"polyhead.fleet.secret"  # key of the secret in the cluster's key-value store
RAY_SHUTDOWN_S = 30.0  # for Ray's shutdown
STATUS_INTERVAL_S = 3.0  # interval of asking for the status of deployments
ADDRESS_INTERVAL_S = 0.5  # interval of asking replicas for their address
HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S = 2.0, 30.0
INGRESS_NAME, INGRESS_CPUS = "Ingress", 0.5
AUTOSCALING_PERIODS = {
    "metrics_interval_s": 1.0,
    "look_back_period_s": 5.0,
    "upscale_delay_s": 5.0,
    "downscale_delay_s": 60.0,
}
# States of replicas that end, now or when their successor runs.
ENDING_STATES = {"STOPPING", "STOPPED", "PENDING_MIGRATION"}
ADDRESS_STAT = "address"  # the routing statistic with a replica's address

ReplicaCallback = Callable[[Mapping[str, Address]], None]

log = logging.getLogger("polyhead.scale")


class DiscoveryRouter(RequestRouter):
    """A request router of Ray Serve that routes nothing: it passes Ray's updates of a deployment's replicas to a
    callback.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if (callback := process_state.LISTENERS.get(self._deployment_id.name)) is not None:
            addresses = {replica.replica_id.unique_id: replica.routing_stats.get(ADDRESS_STAT) for replica in replicas}
            callback({name: (address[0], address[1]) for name, address in addresses.items() if address})


class EngineReplica:
    """The Ray deployment of a replica: an engine, the models of its deployment, and the port that it listens on."""

    async def __init__(self, settings: Settings, secret: str) -> None:  # type: ignore[misc]
        logs.configure_logging(settings.log_format, settings.log_level)
        from .replica import Replica  # imports torch, which the other classes here do not need

        name = ray_serve.get_replica_context().replica_id.unique_id
        self.replica = Replica(with_threads(settings), name, secret)
        host = ray.util.get_node_ip_address()
        self.address = host, await self.replica.start(host, settings.replica_port_range)

    async def greet(self) -> str:
        """Return the replica's name.  The first call makes Ray create the router of the handle."""
        return self.replica.name

    def record_routing_stats(self) -> dict[str, Any]:
        return {ADDRESS_STAT: self.address}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUED_TOKENS_STAT: float(self.replica.queued_tokens)}

    def check_health(self) -> None:
        """Raise RuntimeError for the failures of /livez and for a model that cannot compute any more."""
        reasons = self.replica.failure_reasons()
        if reasons:
            raise RuntimeError("; ".join(reasons))

    async def __del__(self) -> None:
        """Finish open requests: Ray has removed the replica from its list."""
        if hasattr(self, "address"):
            await self.replica.close()


def deferred_application() -> process_state.DeferredApplication:
    return process_state.DEFERRED_APPLICATION


@ray_serve.ingress(deferred_application)
class Ingress:
    """The HTTP server behind Ray's proxy; there may be several."""

    async def __init__(self, settings: Settings, secret: str, **handles: DeploymentHandle) -> None:  # type: ignore[misc]
        logs.configure_logging(settings.log_format, settings.log_level)
        tune_interpreter()
        app = ray_serve.get_replica_context().app_name
        own = split_settings(settings)
        deployed = {
            handle.deployment_name: Deployment(app, handle, own[handle.deployment_name].models)
            for handle in handles.values()
        }
        self.application = assemble_ingress(settings, secret, lambda fleet: watch_deployments(fleet, deployed))
        self.lifespan = self.application.router.lifespan_context(self.application)
        await self.lifespan.__aenter__()
        process_state.DEFERRED_APPLICATION.app = self.application

    def check_health(self) -> None:
        if reasons := self.application.state.server.fatal_reasons():
            raise RuntimeError("; ".join(reasons))

    async def __del__(self) -> None:
        if process_state.DEFERRED_APPLICATION.app is not None:
            await self.lifespan.__aexit__(None, None, None)


@dataclass(frozen=True)
class Deployment:
    """A deployment of replicas, as the ingress sees it."""

    app: str
    handle: DeploymentHandle
    models: Collection[str]


async def watch_deployments(fleet: Fleet, deployed: Mapping[str, Deployment]) -> None:
    """Update the fleet's replicas and target counts for ever."""
    loop = asyncio.get_running_loop()

    def replica_callback(name: str) -> ReplicaCallback:
        def update_replicas(replicas: Mapping[str, Address]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(fleet.update_replicas, name, replicas)

        return update_replicas

    for name in deployed:
        process_state.LISTENERS[name] = replica_callback(name)
    greeting = [asyncio.ensure_future(one.handle.greet.remote()) for one in deployed.values()]  # creates the routers
    while True:
        await asyncio.sleep(STATUS_INTERVAL_S)
        with suppress(RayError):  # Ray's controller is restarting
            apps = (await run_on_thread(ray_serve.status)).applications
            for name, one in deployed.items():
                status = apps[one.app].deployments.get(name) if one.app in apps else None
                if status is not None:
                    failed = status.message if status.status == "DEPLOY_FAILED" else ""
                    wanted = sum(count for state, count in status.replica_states.items() if state not in ENDING_STATES)
                    fleet.replicas.set_target(one.models, wanted, error_sentence(failed))
        greeting = [one for one in greeting if not one.done()]  # calls that wait for replicas that have not started yet


def error_sentence(message: str) -> str:
    """Return our error's sentence out of Ray's message, or the message's last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    own_errors = [line for line in lines if line.startswith("polyhead.service.core.errors.")]
    return (own_errors or lines or [""])[-1].rpartition("polyhead.service.core.errors.")[2]


def engine_deployment(name: str, settings: Settings, secret: str) -> ray_serve.Application:
    """Return the Ray application of a deployment of replicas."""
    low, high = settings.replica_bounds
    policy = AutoscalingPolicy(policy_function=QueuedTokensPolicy, policy_kwargs={"target": settings.queued_tokens})
    counted = (
        AutoscalingConfig(min_replicas=low, max_replicas=high, policy=policy, **AUTOSCALING_PERIODS)
        if low < high
        else None
    )
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
        health_check_period_s=HEALTH_INTERVAL_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=LEAVE_TIMEOUT_S + settings.drain_seconds + EXIT_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=DiscoveryRouter, request_routing_stats_period_s=ADDRESS_INTERVAL_S
        ),
    )
    return deployment(EngineReplica).bind(settings, secret)


def application(args: Mapping[str, Any]) -> ray_serve.Application:
    """Return the application for `serve run polyhead.service.fleet.ray_app:application` and config files; `args` are
    settings, as in polyhead's file.

    It has a deployment for every model or pool, with its name, and one named Ingress.
    """
    settings = quickstart.with_sources(read_settings(args))
    secret = cluster_secret(settings)
    deployments = {name: engine_deployment(name, own, secret) for name, own in split_settings(settings).items()}
    if INGRESS_NAME in deployments:
        raise SettingsError(
            f"models: {INGRESS_NAME} is the name of the HTTP deployment; give the model or the pool another name"
        )
    ingress = ray_serve.deployment(
        name=INGRESS_NAME,
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": INGRESS_CPUS, "runtime_env": {"env_vars": dict(LIBRARY_DEFAULTS)}},
        graceful_shutdown_timeout_s=settings.drain_seconds + EXIT_SECONDS,
    )
    return ingress(Ingress).bind(
        settings, secret, **{f"of_{number}": one for number, one in enumerate(deployments.values())}
    )


def cluster_secret(settings: Settings) -> str:
    """Return the secret of the cluster: the setting, or one that the first process generates and stores in Ray."""
    if configured := settings.fleet_key.get_secret_value():
        return configured
    internal_kv._internal_kv_put(SECRET_KEY, token_urlsafe(32).encode(), overwrite=False, namespace=NAMESPACE.encode())
    stored = internal_kv._internal_kv_get(SECRET_KEY, namespace=NAMESPACE.encode())
    return stored.decode()


def serve_on_ray(settings: Settings, traces: RequestTracer = NO_TRACING) -> int:
    """Run `polyhead serve --ray`: replicas on a cluster, HTTP in this process.  Returns and raises as
    service.server.assembly.serve does.
    """
    imported = process_age()
    listener = bind_socket(settings.host, settings.port)
    settings = limit_connections(quickstart.with_sources(settings))
    clock = StartTimes(imported, process_age())
    join_cluster(settings)
    secret = cluster_secret(settings)
    targets = [
        ray_serve.RunTarget(engine_deployment(name, own, secret), name=f"polyhead-{name}", route_prefix=None)
        for name, own in split_settings(settings).items()
    ]
    ray_serve.start(proxy_location="Disabled")
    ray_serve.run_many(targets, wait_for_applications_running=False)
    deployed = {
        name: Deployment(f"polyhead-{name}", ray_serve.get_deployment_handle(name, f"polyhead-{name}"), own.models)
        for name, own in split_settings(settings).items()
    }

    async def find(fleet: Fleet) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch_deployments(fleet, deployed))
            while not all(state.is_final for state in fleet.states().values()):
                await asyncio.sleep(ADDRESS_INTERVAL_S)
            process.on_models_settled(fleet, clock)

    process = ServerProcess(settings, assemble_ingress(settings, secret, find, traces=traces), listener)
    tune_interpreter()
    try:
        process.run(sockets=[listener])
    finally:
        process.exit_timer.cancel()
        ending = threading.Timer(
            RAY_SHUTDOWN_S, logs.exit_process, [process.exit_code]
        )  # in case a thread of Ray does not end
        ending.daemon = True
        ending.start()
        if not settings.ray_address:
            ray_serve.shutdown()
        ray.shutdown()
    return process.exit_code


def join_cluster(settings: Settings) -> None:
    """Connect to the cluster, or start a local one.  Raises SettingsError if there is none at the address."""
    try:
        ray.init(settings.ray_address or "local", namespace=NAMESPACE, include_dashboard=False, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        raise SettingsError(f"ray_address: {settings.ray_address!r}: {error}") from None
