"""Connections over TLS: how many fit into the free memory, and that nothing else is planned with theirs."""

import logging

import pytest
import torch

from polyhead.service.config.settings import Settings
from polyhead.service.fleet.deployment_settings import split_settings
from polyhead.service.resources import capacity
from polyhead.service.resources.connection_memory import (
    MIN_TLS_CONNECTIONS,
    TLS_CONNECTION_BYTES,
    TLS_PART,
    connection_bytes,
    limit_connections,
)
from polyhead.service.runtime.memory_budget import memory_limit
from polyhead.service.server import assembly
from polyhead.service.server.process import build_connection_limits

MIB = 1 << 20
TLS = Settings(tls_cert="cert.pem")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes, which the test may change."""
    sizes = [500 * MIB]
    monkeypatch.setattr(capacity, "available_memory", lambda: iter(sizes))
    return sizes


def test_connections_over_tls_have_a_part_of_the_free_memory(free: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "polyhead"):
        limited = limit_connections(TLS)
    most = 500 * MIB // TLS_PART // TLS_CONNECTION_BYTES
    assert limited.max_connections == most == 444
    assert limited == TLS.model_copy(update={"max_connections": most})
    assert "max_connections is 444, not 4096: connections over TLS take at most 1/16 of the 500 MiB" in caplog.text
    assert connection_bytes(limited) == most * TLS_CONNECTION_BYTES <= 500 * MIB / TLS_PART
    assert connection_bytes(Settings()) == 0
    assert limit_connections(Settings()).max_connections == 4096
    few = TLS.model_copy(update={"max_connections": 100})
    assert limit_connections(few) is few
    free[:] = [MIB]
    assert limit_connections(TLS).max_connections == MIN_TLS_CONNECTIONS
    free[:] = [1 << 40]
    assert limit_connections(TLS) is TLS
    free.clear()  # the system does not tell
    assert limit_connections(TLS) is TLS


def test_models_and_requests_are_planned_without_the_memory_of_connections(free: list[int]) -> None:
    limited, cpu = limit_connections(TLS), torch.device("cpu")
    held = connection_bytes(limited)
    assert held > 30 * MIB
    assert memory_limit(Settings(), cpu) - memory_limit(limited, cpu) == held
    assert memory_limit(limited.model_copy(update={"memory_mib": 100}), cpu) == 100 * MIB  # as the operator says
    plain, over_tls = (assembly.assemble(one, print).state.server for one in (Settings(), limited))
    assert plain.headroom.total - over_tls.headroom.total == held
    limits = build_connection_limits(limited, over_tls)
    assert (limits.max_connections, limits.max_handshakes) == (444, 111)


def test_replicas_keep_no_memory_for_connections_over_tls() -> None:
    settings = Settings(tls_cert="cert.pem", tls_key="key.pem", models={"chat": "c"})
    assert connection_bytes(split_settings(settings)["chat"]) == 0
