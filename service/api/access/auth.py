"""Who may ask: every path's decision, and the comparison of keys.

Knows no model and no dialect.  The one idea: a path that no line below mentions needs a key that may ask models, and a
test walks the application's routes to see that each has its line.
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
from ...config import keys as files
from ...config.keys import ANONYMOUS, CLIENT_SCOPES, Key, Scope, key_digest
from ...config.settings import Settings, SettingsError
from ...core.errors import Forbidden, Unauthorized

Access = Scope | Literal["public"]
DEFAULT_OWNER = "default"  # of the key that has no name
ADMIN_OWNER = "admin"
API_KEY_SCOPES: frozenset[Scope] = frozenset({"inference", "models", "metrics"})  # but administration
ADMIN_SCOPES: frozenset[Scope] = frozenset({"admin"})
KEYS_POLL_S = 1.0  # how often the file of keys is looked at

# A path takes the decision of its longest prefix here, whole segments only; "/" is no prefix but the address itself.
# A verb before it decides for that verb alone.
# Public routes say how the server is and what it can do, never what was asked of it.
ACCESS_RULES: Mapping[str, Access] = {
    "/": "public",
    "POST /": "inference",
    "/web": "public",
    "/livez": "public",
    "/readyz": "public",
    "/startupz": "public",
    "/health": "public",
    "/metrics": "metrics",
    "/docs": "public",
    "/openapi.json": "models",
    "/admin": "admin",
    "/v1": "inference",
    "GET /v1": "models",
    "/v2": "inference",
    "GET /v2": "models",
    "/v2/health": "public",
    "/v2/repository": "admin",
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
SCOPE_ACTIONS: Mapping[Scope, str] = {
    "inference": "ask models",
    "models": "ask which models there are",
    "metrics": "read metrics",
    "admin": "administer",
}

log = logging.getLogger("polyhead")


def find_access_rule(path: str, method: str = "GET") -> Access | None:
    """The line that decides about `path` or a route's template (/models/{name}/predict); None if there is none."""
    verb = "GET" if method == "HEAD" else method
    prefix = path
    while prefix and (prefix != "/" or path == "/"):  # "//x" is no part of the address itself
        for line in (f"{verb} {prefix}", prefix):
            if line in ACCESS_RULES:
                return ACCESS_RULES[line]
        prefix = prefix.rpartition("/")[0]
    return None


def required_access(path: str, method: str = "GET") -> Access:
    return find_access_rule(path, method) or "inference"


def read_authorization(headers: Mapping[str, str], path: str) -> str:
    """What a request to `path` shows: Anthropic's clients have a header of their own for the key."""
    shown = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not shown and is_anthropic_path(path) else shown


def is_anthropic_path(path: str) -> bool:
    return f"{path}/".startswith("/v1/messages/")


class Keys:
    """The keys there are.  Lives on the event loop thread; `replace` changes those of the file.

    Administration has routes, and metrics need a key, or they don't: that is settled at the start.  Whatever else is
    not public needs a key where there are any but the administrator's.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError where two keys have one name, or nobody can have what is asked for."""
        self.path = settings.keys_file
        self.read_stamp = file_stamp(self.path)
        self.owners: set[str] = set()  # of keys that may ask models; it changes with them
        self._settings_keys = read_settings_keys(settings)
        self._by_name: dict[str, Key] = {}
        self.replace_file_keys(files.read_keys(self.path) if self.path else ())
        self.has_admin_key = self._has_scope("admin")
        self.are_required = bool(self.path or self.owners)  # of whoever asks models
        self._metrics_need_key = settings.metrics_access == "key"
        if self._metrics_need_key and not self._has_scope("metrics"):
            raise SettingsError("metrics_access: no key has the scope metrics; api_key has it, or one in keys_file")

    @property
    def names(self) -> Collection[str]:
        """Of all keys; it changes with them."""
        return self._by_name.keys()

    @property
    def all(self) -> tuple[Key, ...]:
        return tuple(self._by_name.values())

    def replace_file_keys(self, filed: Iterable[Key]) -> None:
        """From now on these are the keys of the file.  Raises SettingsError and changes nothing if they cannot be."""
        known: dict[str, Key] = {}
        for key in (*self._settings_keys, *filed):
            if key.name in known:
                own = f"api_key is called {DEFAULT_OWNER}, admin_key {ADMIN_OWNER}"
                raise SettingsError(f"keys: two are called {key.name!r}, every name stands once ({own})")
            known[key.name] = key
        self._by_name.clear()
        self._by_name.update(known)
        self.owners.clear()
        self.owners.update(key.name for key in known.values() if "inference" in key.scopes)

    def required_scope(self, path: str, method: str) -> Access:
        """What a key must be for to ask so.  Without administration its paths are like any other."""
        found = required_access(path, method)
        match found:
            case "admin" if self.has_admin_key:
                return "admin"
            case "metrics":
                return "metrics" if self._metrics_need_key else "public"
            case "models" | "public":
                return found if self.are_required else "public"
            case _:
                return "inference" if self.are_required else "public"

    def authenticate(self, scope: Access, authorization: str) -> Key:
        """The key that the header `authorization` carries, nobody's where none is asked for.  Raises Unauthorized."""
        if scope == "public":
            return ANONYMOUS
        kind, _, given = authorization.partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise Unauthorized("this server needs a key: send the header 'Authorization: Bearer <key>'")
        digest = sha256(given.strip().encode("latin-1", "replace")).digest()  # the bytes that came
        # all are compared, each in constant time, so that the time an answer takes says nothing of any key
        matching = [key for key in self._by_name.values() if hmac.compare_digest(digest, key.digest)]
        if not matching:
            raise Unauthorized("the key in the header Authorization is not this server's")
        return matching[0]

    def authorize(self, key: Key, scope: Access) -> None:
        """Raises Forbidden for a key of other scopes."""
        if scope != "public" and scope not in key.scopes:
            has = ", ".join(sorted(key.scopes))
            raise Forbidden(
                f"the key {key.name!r} may not {SCOPE_ACTIONS[scope]}: that needs the scope {scope}, it has {has}"
            )

    def _has_scope(self, scope: Scope) -> bool:
        return any(scope in key.scopes for key in self._by_name.values())


def read_settings_keys(settings: Settings) -> tuple[Key, ...]:
    """Those of the settings, which stay."""
    found = [(DEFAULT_OWNER, settings.api_key, API_KEY_SCOPES), (ADMIN_OWNER, settings.admin_key, ADMIN_SCOPES)]
    found += [(name, key, CLIENT_SCOPES) for name, key in settings.api_keys.items()]
    given = [(name, key.get_secret_value(), scopes) for name, key, scopes in found]
    return tuple(Key(name, key_digest(key), scopes) for name, key, scopes in given if key)


def file_stamp(path: str) -> tuple[int, ...]:
    """What is another when the file is; nothing if there is none."""
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


async def watch_keys_file(keys: Keys) -> None:
    """For ever: whenever the file has changed, its keys are those that count.

    A file that cannot be used changes nothing.  One that was written within the last second is read at the next look:
    it may be half of a file, whose keys may do more than those of the whole.
    """
    last = keys.read_stamp
    while keys.path:
        await asyncio.sleep(KEYS_POLL_S)
        before, last = last, file_stamp(keys.path)
        if last == keys.read_stamp or last != before:
            continue
        keys.read_stamp = last
        fault = await wait_for_error(reload_keys(keys))
        if isinstance(fault, SettingsError):
            log.error("the keys stay as they were: %s", fault)
        elif isinstance(fault, Exception):
            log.error("the keys stay as they were: %s cannot be read", keys.path, exc_info=fault)
        elif fault is not None:
            raise fault


async def reload_keys(keys: Keys) -> None:
    """Replace the keys by those of the file, unless it changes meanwhile.  Raises SettingsError."""
    filed = await run_on_thread(partial(files.read_keys, keys.path))
    if file_stamp(keys.path) == keys.read_stamp:
        keys.replace_file_keys(filed)
        log.info("%s has changed: there are keys of %s", keys.path, ", ".join(keys.names))
