"""Connections: how many fit into the free memory, and that nothing else is planned with theirs."""

import logging

import pytest
import torch

from polyhead.service.config.settings import Settings
from polyhead.service.fleet.deployment_settings import REPLICA_CONNECTIONS, split_settings
from polyhead.service.resources import capacity
from polyhead.service.resources.connection_memory import (
    CONNECTION_BYTES,
    CONNECTIONS_PART,
    MIN_CONNECTIONS,
    MIN_UNSENT_BYTES,
    TLS_CONNECTION_BYTES,
    UNSENT_BYTES,
    connection_bytes,
    limit_connections,
    max_unsent_bytes,
)
from polyhead.service.runtime.memory_budget import memory_limit
from polyhead.service.server import assembly
from polyhead.service.server.process import build_connection_limits

MIB = 1 << 20
TLS, PLAIN = Settings(tls_cert="cert.pem"), Settings()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes, which the test may change."""
    sizes = [500 * MIB]
    monkeypatch.setattr(capacity, "available_memory", lambda: iter(sizes))
    return sizes


@pytest.mark.parametrize(("given", "each", "most"), [(TLS, TLS_CONNECTION_BYTES, 307), (PLAIN, CONNECTION_BYTES, 500)])
def test_connections_have_a_part_of_the_free_memory(
    free: list[int], caplog: pytest.LogCaptureFixture, given: Settings, each: int, most: int
) -> None:
    with caplog.at_level(logging.INFO, "polyhead"):
        limited = limit_connections(given)
    assert limited.max_connections == most == 500 * MIB // CONNECTIONS_PART // (each + UNSENT_BYTES)
    assert limited == given.model_copy(update={"max_connections": most})
    assert f"max_connections is {most}, not 4096: connections take at most 1/16 of the 500 MiB" in caplog.text
    assert connection_bytes(limited) == most * (each + UNSENT_BYTES) <= 500 * MIB / CONNECTIONS_PART
    few = given.model_copy(update={"max_connections": 100})
    assert limit_connections(few) is few
    assert connection_bytes(few) == 100 * each + MIN_UNSENT_BYTES
    free[:] = [MIB]
    assert limit_connections(given).max_connections == MIN_CONNECTIONS
    free[:] = [1 << 40]
    assert limit_connections(given) is given
    free.clear()  # the system does not tell
    assert limit_connections(given) is given


@pytest.mark.parametrize(("given", "most"), [(TLS, 307), (PLAIN, 500)])
def test_models_and_requests_are_planned_without_the_memory_of_connections(
    free: list[int], given: Settings, most: int
) -> None:
    limited, cpu = limit_connections(given), torch.device("cpu")
    held = connection_bytes(limited)
    assert held > 30 * MIB
    fewest = PLAIN.model_copy(update={"max_connections": 1})
    saved = held - connection_bytes(fewest)
    assert memory_limit(fewest, cpu) - memory_limit(limited, cpu) == saved
    assert memory_limit(limited.model_copy(update={"memory_mib": 100}), cpu) == 100 * MIB  # as the operator says
    small, large = (assembly.assemble(one, print).state.server for one in (fewest, limited))
    assert small.headroom.total - large.headroom.total == saved
    limits = build_connection_limits(limited, large)
    assert (limits.max_connections, limits.max_handshakes) == (most, most // 4)
    assert limits.unsent_answers.max_bytes == max_unsent_bytes(limited) == most * UNSENT_BYTES


def test_replicas_keep_memory_for_few_connections() -> None:
    settings = Settings(tls_cert="cert.pem", tls_key="key.pem", models={"chat": "c"})
    of_replica = split_settings(settings)["chat"]
    assert of_replica.max_connections == REPLICA_CONNECTIONS
    assert connection_bytes(of_replica) == REPLICA_CONNECTIONS * (CONNECTION_BYTES + UNSENT_BYTES) <= 16 * MIB
    few = split_settings(settings.model_copy(update={"max_connections": 9}))
    assert few["chat"].max_connections == 9
