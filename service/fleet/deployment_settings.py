"""The part of a server's settings that each deployment of replicas gets."""

from collections.abc import Collection

from ..config.settings import Settings
from ..core.names import base_model_name

REPLICA_CONNECTIONS = 256  # of its HTTP server, which answers probes and scrapes only


def split_settings(settings: Settings) -> dict[str, Settings]:
    """Return the settings of each deployment by its name: one model or the models of one pool, with their adapters."""
    pooled = {name for names in settings.pools.values() for name in names}
    groups = {name: [name] for name in settings.models if not base_model_name(name) and name not in pooled}
    return {
        name: build_deployment_settings(settings, name, base_models)
        for name, base_models in (groups | dict(settings.pools)).items()
    }


def build_deployment_settings(settings: Settings, name: str, base_models: Collection[str]) -> Settings:
    models = {
        one: source
        for one, source in settings.models.items()
        if one in base_models or base_model_name(one) in base_models
    }
    drafts = {one: source for one, source in settings.drafts.items() if one in base_models}
    weights = {one: weight for one, weight in settings.weights.items() if one in base_models}
    calibrations = {one: path for one, path in settings.calibrations.items() if one in models}
    pools = {name: settings.pools[name]} if name in settings.pools else {}
    return settings.model_copy(
        update={
            "models": models,
            "drafts": drafts,
            "weights": weights,
            "calibrations": calibrations,
            "pools": pools,
            "tls_cert": "",  # clients connect to the ingress
            "tls_key": "",
            "max_connections": min(settings.max_connections, REPLICA_CONNECTIONS),
        }
    )


def with_threads(settings: Settings) -> Settings:
    """Set the number of threads to the cores that Ray reserves for a replica, unless `threads` is set."""
    threads = settings.threads or max(int(settings.replica_cpus), 1)
    return settings.model_copy(update={"threads": threads})
