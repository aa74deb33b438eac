"""API keys: which scope each path needs, and the comparison of keys.

A path without a rule in `ACCESS_RULES` needs a key with the scope "inference".  A test checks that every route of the
application has a rule.
"""

import asyncio
import hmac
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal

from ...concurrency.outcome import run_on_thread, wait_for_error
from ...config import keys as keys_file
from ...config.keys import ANONYMOUS, CLIENT_SCOPES, MAX_PRIORITY, Key, KeysReadError, Scope, key_digest
from ...config.settings import Settings, SettingsError
from ...core.errors import Forbidden, Unauthorized
from .model_paths import is_below, path_below_model

Access = Scope | Literal["public"]
DEFAULT_OWNER = "default"  # the name of the setting api_key
ADMIN_OWNER = "admin"
API_KEY_SCOPES: frozenset[Scope] = frozenset({"inference", "models", "metrics"})  # all scopes except admin
ADMIN_SCOPES: frozenset[Scope] = frozenset({"admin"})
MESSAGES_PATH = "/v1/messages"  # of Anthropic's clients
KEYS_POLL_S = 1.0  # seconds between two checks of the keys file

# The rule of a path is that of its longest prefix here, in whole segments; "/" matches only itself.
# A rule that begins with a method applies to that method only.
# Public routes report the server's health and abilities, never the contents of requests.
ACCESS_RULES: Mapping[str, Access] = {
    "/": "public",
    "POST /": "inference",
    "/web": "public",
    "/livez": "public",
    "/readyz": "public",
    "/startupz": "public",
    "/health": "public",
    "/healthz": "public",
    "/ping": "public",
    "/metrics": "metrics",
    "/metrics/errors": "models",
    "/docs": "public",
    "/redoc": "public",
    "/openapi.json": "models",
    "/admin": "admin",
    "/v1": "inference",
    "GET /v1": "models",
    "GET /v1/files": "inference",
    "GET /v1/batches": "inference",
    "GET /v1/responses": "inference",
    "/v2": "inference",
    "GET /v2": "models",
    "/v2/health": "public",
    "/v2/repository": "admin",
    "/api": "inference",
    "GET /api": "models",
    "/models": "inference",
    "GET /models": "models",
    "/pipeline": "inference",
    "/predict": "inference",
    "/embed": "inference",
    "/embed_all": "inference",
    "/embed_sparse": "inference",
    "/rerank": "inference",
    "/similarity": "inference",
    "/generate": "inference",
    "/generate_stream": "inference",
    "/tokenize": "inference",
    "/detokenize": "inference",
    "/decode": "inference",
    "/info": "models",
}
RULE_SEGMENTS = max(rule.count("/") for rule in ACCESS_RULES)  # segments of the longest rule
SCOPE_ACTIONS: Mapping[Scope, str] = {
    "inference": "use models",
    "models": "list models",
    "metrics": "read metrics",
    "admin": "administer",
}

log = logging.getLogger("polyhead")


def find_access_rule(path: str, method: str = "GET") -> Access | None:
    """The rule for `path`, or for a route's template (/models/{name}/predict); None if there is none."""
    verb = "GET" if method == "HEAD" else method
    # The pattern of a route ends in $, which matches before a line break, too. Here such a path is refused before it is
    # routed; what serves the application in another way has the right rule.
    path = path.removesuffix("\n")
    # A path has thousands of segments if the client sends them; only its first ones can match.
    segments = path.split("/", RULE_SEGMENTS + 1)[: RULE_SEGMENTS + 1]  # the first is empty: a path begins with "/"
    for count in range(len(segments), 1, -1):
        prefix = "/".join(segments[:count])
        if prefix == "/" != path:  # "//x" does not match the rule "/"
            continue
        for line in (f"{verb} {prefix}", prefix):
            if line in ACCESS_RULES:
                return ACCESS_RULES[line]
    return None


def required_access(path: str, method: str = "GET") -> Access:
    return find_access_rule(path, method) or "inference"


def read_authorization(headers: Mapping[str, str], path: str) -> str:
    """The value of the header Authorization.

    Anthropic's clients send the key in X-Api-Key, which is accepted on their paths and for lists of models.
    """
    header = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not header and is_read_by_anthropic(path) else header


def is_read_by_anthropic(path: str) -> bool:
    """Whether Anthropic's clients ask for `path`."""
    return is_anthropic_path(path) or is_below(path, "/v1/models")


def is_anthropic_path(path: str) -> bool:
    return is_below(path, MESSAGES_PATH) or is_below(path_below_model(path), MESSAGES_PATH)


class Keys:
    """The valid keys.  Lives on the event loop thread; `replace_file_keys` changes those of the keys file.

    Whether there are admin routes, and whether metrics need a key, is decided at the start.  All other paths that are
    not public need a key if there is any key except the admin key.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError if two keys have the same name, or if no key has a scope that the settings require."""
        self.path = settings.keys_file
        self.read_stamp = file_stamp(self.path)
        self.owners: set[str] = set()  # names of the keys with the scope "inference"; updated in place
        self._settings_keys = read_settings_keys(settings)
        self._by_name: dict[str, Key] = {}
        self.replace_file_keys(keys_file.read_keys(self.path) if self.path else ())
        self.has_admin_key = self._has_scope("admin")
        self.are_required = bool(self.path or self.owners)  # whether inference needs a key
        self._metrics_need_key = settings.metrics_access == "key"
        if self._metrics_need_key and not self._has_scope("metrics"):
            raise SettingsError("metrics_access: no key has the scope metrics; api_key has it, or one in keys_file")

    @property
    def names(self) -> Collection[str]:
        """The names of all keys; a live view."""
        return self._by_name.keys()

    @property
    def all(self) -> tuple[Key, ...]:
        return tuple(self._by_name.values())

    def replace_file_keys(self, file_keys: Iterable[Key]) -> None:
        """Make `file_keys` the keys of the file.  Raises SettingsError, and changes nothing, if they are not valid."""
        known: dict[str, Key] = {}
        for key in (*self._settings_keys, *file_keys):
            if key.name in known:
                own = f"api_key is called {DEFAULT_OWNER}, admin_key {ADMIN_OWNER}"
                raise SettingsError(f"keys: the name {key.name!r} is used twice ({own})")
            known[key.name] = key
        self._by_name.clear()
        self._by_name.update(known)
        self.owners.clear()
        self.owners.update(key.name for key in known.values() if "inference" in key.scopes)

    def required_scope(self, path: str, method: str) -> Access:
        """The scope that a request needs."""
        return self.apply_rule(required_access(path, method))

    def apply_rule(self, access: Access) -> Access:
        """The scope that the rule `access` asks for on this server.

        Without an admin key the admin paths are treated like any other.
        """
        match access:
            case "admin" if self.has_admin_key:
                return "admin"
            case "metrics":
                return "metrics" if self._metrics_need_key else "public"
            case "models" | "public":
                return access if self.are_required else "public"
            case _:
                return "inference" if self.are_required else "public"

    def authenticate(self, scope: Access, authorization: str) -> Key:
        """The key in the header `authorization`, or the anonymous key if none is required.  Raises Unauthorized."""
        if scope == "public":
            return ANONYMOUS
        kind, _, given = authorization.partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise Unauthorized("this server needs a key: send the header 'Authorization: Bearer <key>'")
        digest = sha256(given.strip().encode("latin-1", "replace")).digest()  # the bytes as they were received
        # compared with every key, each in constant time, so that the response time reveals nothing about a key
        matching = [key for key in self._by_name.values() if hmac.compare_digest(digest, key.digest)]
        if not matching:
            raise Unauthorized("the key in the header Authorization is not this server's")
        return matching[0]

    def max_priority(self, key: Key) -> int:
        """The highest priority that a request of `key` may ask for: among several keys none goes before the others."""
        if key.max_priority is not None:
            return key.max_priority
        return MAX_PRIORITY if len(self.owners) <= 1 else 0

    def authorize(self, key: Key, scope: Access) -> None:
        """Raises Forbidden if `key` does not have `scope`."""
        if scope != "public" and scope not in key.scopes:
            has = ", ".join(sorted(key.scopes))
            raise Forbidden(
                f"the key {key.name!r} may not {SCOPE_ACTIONS[scope]}: that needs the scope {scope}, it has {has}"
            )

    def _has_scope(self, scope: Scope) -> bool:
        return any(scope in key.scopes for key in self._by_name.values())


def read_settings_keys(settings: Settings) -> tuple[Key, ...]:
    """The keys of the settings, which do not change while serving."""
    found = [(DEFAULT_OWNER, settings.api_key, API_KEY_SCOPES), (ADMIN_OWNER, settings.admin_key, ADMIN_SCOPES)]
    found += [(name, key, CLIENT_SCOPES) for name, key in settings.api_keys.items()]
    given = [(name, key.get_secret_value(), scopes) for name, key, scopes in found]
    return tuple(Key(name, key_digest(key), scopes) for name, key, scopes in given if key)


def file_stamp(path: str) -> tuple[int, ...]:
    """Modification time, size, inode and mode of a file: it changes when the file does.  Empty if there is no file."""
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


async def watch_keys_file(keys: Keys) -> None:
    """Reload the keys file whenever it changes.  Never returns while there is a file to watch.

    A file that is not valid changes nothing.  One that cannot be read is tried again at each poll, since it may revoke
    a key; an error is logged once.  A file that was written less than KEYS_POLL_S ago is read at the next poll: it may
    be incomplete, and an incomplete file may grant more than the complete one.
    """
    last, logged = keys.read_stamp, ""
    while keys.path:
        await asyncio.sleep(KEYS_POLL_S)
        before, last = last, file_stamp(keys.path)
        if last == keys.read_stamp or last != before:
            continue
        fault = await wait_for_error(reload_keys(keys, last))
        if fault is not None and not isinstance(fault, Exception):
            raise fault
        if isinstance(fault, SettingsError) and not isinstance(fault, KeysReadError):
            keys.read_stamp = last  # it was read: it is not valid until it changes
        if fault is not None and repr(fault) != logged:
            if isinstance(fault, SettingsError):
                log.error("the keys are unchanged: %s", fault)
            else:
                log.error("the keys are unchanged: %s cannot be read", keys.path, exc_info=fault)
        logged = "" if fault is None else repr(fault)


async def reload_keys(keys: Keys, stamp: tuple[int, ...]) -> None:
    """Replace the file keys by those of the file that has this stamp.  A file that changes while it is read is left for
    the next poll.  Raises SettingsError.
    """
    file_keys = await run_on_thread(partial(keys_file.read_keys, keys.path))
    if file_stamp(keys.path) == stamp:
        keys.replace_file_keys(file_keys)
        keys.read_stamp = stamp
        log.info("%s was reloaded; there are keys of %s", keys.path, ", ".join(keys.names))
