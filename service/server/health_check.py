"""The health check of a container: asks the server in it whether it is ready.

It loads the standard library only, since it runs every few seconds.  It is called with the container's environment:
`python -c "import os; from polyhead.service.server.health_check import check_health; check_health(os.environ)"`.
"""

import http.client
import ssl
from collections.abc import Mapping, Sequence

TIMEOUT_S = 1.4  # of one attempt: two are within the 3 seconds that a container's check has


def check_health(environment: Mapping[str, str]) -> None:
    """Return if /readyz answers 200.  Raises SystemExit if it answers anything else, and OSError or HTTPException if
    there is no answer.

    The port for probes is asked if there is one, else that of clients.  The variables need not say whether this one has
    TLS, because a file or a flag may: where a server does not speak the likelier scheme, the other one is tried.
    """
    if probe_port := int(environment.get("POLYHEAD_PROBE_PORT") or 0):
        status = ask_ready(probe_port, ["http"])
    else:
        schemes = ["https", "http"] if environment.get("POLYHEAD_TLS_CERT") else ["http", "https"]
        status = ask_ready(int(environment.get("POLYHEAD_PORT") or 8000), schemes)
    if status != 200:
        raise SystemExit(f"/readyz answers {status}")


def ask_ready(port: int, schemes: Sequence[str]) -> int:
    """The status of /readyz, by the first of `schemes` by which there is an answer."""
    for scheme in schemes:
        connection = open_connection(scheme, port)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            if scheme == schemes[-1]:
                raise
        finally:
            connection.close()
    raise ValueError("schemes: is empty")


def open_connection(scheme: str, port: int) -> http.client.HTTPConnection:
    """A connection to the server of this container.  Its certificate is for other names and is not checked."""
    if scheme == "http":
        return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
