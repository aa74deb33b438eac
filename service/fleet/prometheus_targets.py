"""The metrics addresses of replicas, for Prometheus' HTTP service discovery."""

from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from .replica_set import ReplicaSet

router = APIRouter(tags=["health"])


@router.get("/metrics/targets", summary="The replicas' own metrics, for Prometheus' http_sd_configs.")
async def targets(request: Request) -> JSONResponse:
    """Return a target for each connected replica, with its deployment and name as labels for relabeling."""
    replicas = cast(ReplicaSet, request.app.state.server.registry.replicas)
    return JSONResponse([format_target(deployment, name, at) for deployment, name, at in replicas.metrics_addresses()])


def format_target(deployment: str, name: str, at: tuple[str, int]) -> dict[str, Any]:
    host, port = at
    labels = {"__meta_polyhead_deployment": deployment, "__meta_polyhead_replica": name}
    return {"targets": [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"], "labels": labels}
