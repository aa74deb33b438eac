"""Settings of models that are served by several processes and machines. Part of service.config.settings, which reads
them.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode

from ..core.names import MAX_NAME_CHARS, NAME_PATTERN, base_model_name

RANGE_PATTERN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class ParallelSettings(BaseSettings):
    """`replica_bounds` and `replica_port_range` are the parsed values of `replicas` and `replica_ports`."""

    ray: bool = Field(False, description="Serve replicas on Ray, and route requests to them here; needs the extra ray.")
    ray_address: str = Field(
        "",
        description="Of a Ray cluster, auto for the one that this machine is part of; empty: one is started here, and "
        "ends with the server.",
    )
    replicas: str = Field(
        "1", description="Replicas of each model on Ray; least-most: so many as queued_tokens makes them, as in 1-8."
    )
    queued_tokens: int = Field(
        2048, ge=1, le=1 << 30, description="Tokens queued at each replica, where there may be more or fewer of them."
    )
    replica_cpus: float = Field(1, gt=0, le=1024, description="Cores that Ray keeps for a replica, to compute on.")
    replica_gpus: float = Field(0, ge=0, le=64, description="GPUs that Ray keeps for a replica.")
    replicas_per_node: int = Field(
        0, ge=0, le=100, description="Replicas of a model on one machine of the cluster, at most; 0: any number."
    )
    replica_ports: str = Field("", description="Ports that replicas listen on, as in 9100-9199; empty: any free ones.")
    pools: Annotated[Mapping[str, list[str]], NoDecode] = Field(
        default_factory=dict,
        description="Models that share replicas on Ray, by a name for them all, as in small=a+b+c: each is loaded when "
        "it is asked for.",
    )
    pool_models: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Models of a pool that a replica holds at once; 0: as many as there is room for.",
    )
    fleet_key: SecretStr = Field(
        SecretStr(""),
        description="Key that only replicas and their routers have; empty: made and kept by Ray.",
    )

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """The least and the most replicas."""
        return parse_range(self.replicas)

    @property
    def replica_port_range(self) -> range:
        """The ports to try, in this order."""
        first, last = parse_range(self.replica_ports or "0")
        return range(first, last + 1)

    @field_validator("pools", mode="before")
    @classmethod
    def parse_pools(cls, value: Any) -> Any:
        """Parse a mapping (in the file), or name=model+model, separated by commas."""
        if not isinstance(value, str):
            return value
        pools: dict[str, list[str]] = {}
        for part in filter(None, (part.strip() for part in value.split(","))):
            name, _, models = (word.strip() for word in part.partition("="))
            if not name or not models:
                raise ValueError(f"{part!r} is not of the form name=model+model, as in small=a+b+c")
            pools[name] = [model.strip() for model in models.split("+")]
        return pools

    @field_validator("replicas", "replica_ports")
    @classmethod
    def check_range(cls, value: str) -> str:
        if value and not RANGE_PATTERN.fullmatch(value):
            raise ValueError("must be a number, or two as in 1-8")
        low, high = parse_range(value or "0")
        if low > high:
            raise ValueError(f"must go from the less to the more, and {low} is more than {high}")
        return value

    @field_validator("replicas")
    @classmethod
    def check_min_replicas(cls, value: str) -> str:
        if not parse_range(value or "0")[0]:
            raise ValueError("must be 1 at least: no replica is started on demand")
        return value


def parse_range(text: str) -> tuple[int, int]:
    found = RANGE_PATTERN.fullmatch(text)
    assert found is not None
    return int(found[1]), int(found[2] or found[1])


def check_pools(pools: Mapping[str, list[str]], models: Mapping[str, str]) -> None:
    """Raise ValueError for an invalid pool."""
    owners: dict[str, str] = {}
    for name, trunks in pools.items():
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"pools: {name[:MAX_NAME_CHARS]!r} is no name: letters, digits, '.', '_', '-' and '/' are")
        if name in models:
            raise ValueError(f"pools: {name!r} is a model, a pool cannot have its name")
        if not trunks:
            raise ValueError(f"pools: {name}: names no models, and must name one at least")
        if missing := [one for one in trunks if one not in models]:
            raise ValueError(f"pools: {name}: no model is called {missing[0]!r}; there are: {', '.join(models)}")
        if adapters := [one for one in trunks if base_model_name(one)]:
            raise ValueError(f"pools: {name}: {adapters[0]!r} is an adapter, which is where its model is")
        for one in trunks:
            if (other := owners.setdefault(one, name)) != name:
                raise ValueError(f"pools: {name}: {one!r} is in {other} already, and can be in one")
