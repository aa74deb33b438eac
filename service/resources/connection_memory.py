"""Memory of connections: how many the server may have, and what they take beside models and requests."""

import logging
import math

from ..config.settings import Settings
from . import capacity

# Bytes of a connection beside an answer that is not read: 5 KiB of its own, 16 of a request with a head of 4, and 8 of
# the kernel.
CONNECTION_BYTES = 32 << 10
# The same over TLS, half a record received: 62 KiB, and 87 during its handshake, which a fourth of them may be in;
# measured with OpenSSL 3.0. One that waits for a request takes 26 KiB.
TLS_CONNECTION_BYTES = 72 << 10
UNSENT_BYTES = 32 << 10  # of answers that are not read, for each connection that may be open; all share them
MIN_UNSENT_BYTES = 4 << 20
CONNECTIONS_PART = 16  # connections may take one part in so many of the free memory
MIN_CONNECTIONS = 32  # however little is free

log = logging.getLogger("polyhead")


def limit_connections(settings: Settings) -> Settings:
    """Return the settings with as many `max_connections` as the free memory has room for.

    Call it once, before any model is loaded.
    """
    free = min(capacity.available_memory(), default=math.inf)
    most = max(free / (CONNECTIONS_PART * (own_bytes(settings) + UNSENT_BYTES)), MIN_CONNECTIONS)
    if settings.max_connections <= most:
        return settings
    log.info(
        "max_connections is %d, not %d: connections take at most 1/%d of the %d MiB that are free",
        most,
        settings.max_connections,
        CONNECTIONS_PART,
        int(free) >> 20,
    )
    return settings.model_copy(update={"max_connections": int(most)})


def own_bytes(settings: Settings) -> int:
    """Bytes of a connection, without those of answers that are not read."""
    return TLS_CONNECTION_BYTES if settings.tls_cert else CONNECTION_BYTES


def max_unsent_bytes(settings: Settings) -> int:
    """Bytes of all answers that are not read, at most."""
    return max(settings.max_connections * UNSENT_BYTES, MIN_UNSENT_BYTES)


def connection_bytes(settings: Settings) -> int:
    """Bytes that are kept free for connections."""
    return settings.max_connections * own_bytes(settings) + max_unsent_bytes(settings)
