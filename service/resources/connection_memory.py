"""Memory of connections over TLS: how many the server may have, and what they take beside models and requests."""

import logging
import math

from ..config.settings import Settings
from . import capacity

# Bytes of a connection over TLS, half a record received: 62 KiB, and 87 during its handshake, which a fourth of them
# may be in; measured with OpenSSL 3.0. One that waits for a request takes 26 KiB, and one without TLS 5.
TLS_CONNECTION_BYTES = 72 << 10
TLS_PART = 16  # connections over TLS may take one part in so many of the free memory
MIN_TLS_CONNECTIONS = 32  # however little is free

log = logging.getLogger("polyhead")


def limit_connections(settings: Settings) -> Settings:
    """Return the settings with as many `max_connections` as the free memory has room for, if they are over TLS.

    Call it once, before any model is loaded.
    """
    if not settings.tls_cert:
        return settings
    free = min(capacity.available_memory(), default=math.inf)
    most = max(free / (TLS_PART * TLS_CONNECTION_BYTES), MIN_TLS_CONNECTIONS)
    if settings.max_connections <= most:
        return settings
    log.info(
        "max_connections is %d, not %d: connections over TLS take at most 1/%d of the %d MiB that are free",
        most,
        settings.max_connections,
        TLS_PART,
        int(free) >> 20,
    )
    return settings.model_copy(update={"max_connections": int(most)})


def connection_bytes(settings: Settings) -> int:
    """Bytes that are kept free for connections over TLS."""
    return settings.max_connections * TLS_CONNECTION_BYTES if settings.tls_cert else 0
