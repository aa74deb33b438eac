"""Who may ask: every path's decision, and the comparison of keys.

Knows no model and no dialect.  The one idea: a path that no line below mentions needs the key, and a test walks the
application's routes to see that each has its line.
"""

import hmac
from collections.abc import Iterable, Mapping
from typing import Literal

from service.errors import Unauthorized
from service.settings import Settings

Access = Literal["public", "key", "admin"]
DEFAULT_OWNER = "default"  # of the key that has no name

# A path takes the decision of its longest prefix here, whole segments only; "/" is no prefix but the address itself.
# A verb before it decides for that verb alone.
# Public routes say how the server is and what it can do, never what was asked of it.
ACCESS: Mapping[str, Access] = {
    "/": "public",
    "POST /": "key",
    "/livez": "public",
    "/readyz": "public",
    "/startupz": "public",
    "/health": "public",
    "/metrics": "public",
    "/docs": "public",
    "/redoc": "public",
    "/openapi.json": "public",
    "/admin": "admin",
    "/v1": "key",
    "/v2": "key",
    "/v2/health": "public",
    "/v2/repository": "admin",
    "/models": "key",
    "/pipeline": "key",
    "/predict": "key",
    "/embed": "key",
    "/embed_all": "key",
    "/embed_sparse": "key",
    "/rerank": "key",
    "/similarity": "key",
    "/generate": "key",
    "/generate_stream": "key",
    "/tokenize": "key",
    "/detokenize": "key",
    "/decode": "key",
    "/info": "key",
}


def decision(path: str, method: str = "GET") -> Access | None:
    """The line that decides about `path` or a route's template (/models/{name}/predict); None if there is none."""
    prefix = path
    while prefix:
        for line in (f"{method} {prefix}", prefix):
            if line in ACCESS:
                return ACCESS[line]
        prefix = prefix.rpartition("/")[0]
    return None


def access(path: str, method: str = "GET") -> Access:
    return decision(path, method) or "key"


def authorization(headers: Mapping[str, str], path: str) -> str:
    """What a request to `path` shows: Anthropic's clients have a header of their own for the key."""
    shown = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not shown and f"{path}/".startswith("/v1/messages/") else shown


def check_key(authorization: str, key: str) -> None:
    """Raises Unauthorized unless the header `authorization` carries `key`; an empty key asks for nothing."""
    Keys([("", key)] if key else []).owner(authorization)


class Keys:
    """Named keys, any of which opens.  Without any, nothing is asked for."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self._keys = [(name, key.encode()) for name, key in named]

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._keys)

    def owner(self, authorization: str) -> str:
        """Whose key the header `authorization` carries; empty if none is asked for.  Raises Unauthorized."""
        if not self._keys:
            return ""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("this server needs a key: send the header 'Authorization: Bearer <key>'")
        sent = given.strip().encode("utf-8", "surrogateescape")
        # all are compared, each in constant time, so that the time an answer takes says nothing of any key
        matching = [name for name, key in self._keys if hmac.compare_digest(sent, key)]
        if not matching:
            raise Unauthorized("the key in the header Authorization is not this server's")
        return matching[0]


def client_keys(settings: Settings) -> Keys:
    """The keys of clients, by the name of their owner."""
    first = settings.api_key.get_secret_value()
    named = [(name, key.get_secret_value()) for name, key in settings.api_keys.items()]
    return Keys([(DEFAULT_OWNER, first), *named] if first else named)


def admin_keys(settings: Settings) -> Keys:
    """The one key of administrators.  Without it there are no such routes, and their paths are like any other."""
    key = settings.admin_key.get_secret_value()
    return Keys([("", key)]) if key else client_keys(settings)
