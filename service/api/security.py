"""Who may ask: every path's decision, and the comparison of keys.

Knows no model and no dialect.  The one idea: a path that no line below mentions needs the key, and a test walks the
application's routes to see that each has its line.
"""

import hmac
from collections.abc import Mapping
from typing import Literal

from service.errors import Unauthorized

Access = Literal["public", "key"]

# A path takes the decision of its longest prefix here, whole segments only; "/" is no prefix but the address itself.
# Public routes say how the server is and what it can do, never what was asked of it.
ACCESS: Mapping[str, Access] = {
    "/": "public",
    "/livez": "public",
    "/readyz": "public",
    "/startupz": "public",
    "/health": "public",
    "/metrics": "public",
    "/docs": "public",
    "/redoc": "public",
    "/openapi.json": "public",
    "/v1": "key",
    "/models": "key",
    "/predict": "key",
    "/embed": "key",
    "/embed_all": "key",
    "/embed_sparse": "key",
    "/rerank": "key",
    "/similarity": "key",
    "/tokenize": "key",
    "/decode": "key",
    "/info": "key",
}


def decision(path: str) -> Access | None:
    """The line that decides about `path` or a route's template (/models/{name}/predict); None if there is none."""
    prefix = path
    while prefix and prefix not in ACCESS:
        prefix = prefix.rpartition("/")[0]
    return ACCESS.get(prefix)


def access(path: str) -> Access:
    return decision(path) or "key"


def check_key(authorization: str, key: str) -> None:
    """Raises Unauthorized unless the header `authorization` carries `key`; an empty key asks for nothing."""
    if not key:
        return
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("this server needs a key: send the header 'Authorization: Bearer <key>'")
    # compared in constant time, so that the time an answer takes says nothing of the key
    if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode()):
        raise Unauthorized("the key in the header Authorization is not this server's")
