"""Keys of clients: what each may do. They are stored as hashes in a file, and made by `polyhead key`.

A key is long and random, so its SHA-256 without salt is enough: 256 random bits cannot be found by trying, which slow
hashes and salts prevent for passwords. That is why a short key is not hashed here.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from ..core.names import NAME_PATTERN
from . import yaml_file
from .setting_types import KEY_HASH_PATTERN
from .settings import SettingsError
from .yaml_file import YamlDocument, YamlFileError, YamlReadError

Scope = Literal["inference", "models", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
CLIENT_SCOPES: frozenset[Scope] = frozenset({"inference", "models"})  # the scopes of a key without scopes in the file
KEY_PREFIX = "ph-"  # so that a key that is found somewhere can be recognised
MODEL_PATTERN = r"^[A-Za-z0-9._/:*-]{1,128}$"  # of model names
MAX_PRIORITY = 100  # of a request; -MAX_PRIORITY is the least
MIN_KEY_CHARACTERS = 32  # characters of a key that is hashed


@dataclass(frozen=True)
class Key:
    """A client's key. `name` is the client's; `digest` is the key's SHA-256, and the key itself is not known.

    `models` are patterns of names, in which `*` stands for any text; none: all models. A limit of 0 is no limit.
    `max_priority` is the highest that its requests may ask for; None: any where it is the only key, else 0.
    """

    name: str
    digest: bytes = b""
    scopes: frozenset[Scope] = CLIENT_SCOPES
    models: tuple[str, ...] = ()
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_priority: int | None = None

    def allows_model(self, model: str) -> bool:
        """Whether it may use a model of that name. An adapter is a model of its own: base:name, or base:*."""
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


ANONYMOUS = Key("")  # the key of all clients if the server requires none


class KeysReadError(SettingsError):
    """A file of keys that the system does not give now, whatever is in it."""


class KeyEntry(BaseModel):
    """The entry of a key in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    hash: Annotated[str, Field(pattern=rf"^{KEY_HASH_PATTERN.pattern}$")]
    scopes: Annotated[list[Scope], Field(min_length=1)] = sorted(CLIENT_SCOPES)
    models: Annotated[list[Annotated[str, Field(pattern=MODEL_PATTERN)]], Field(min_length=1)] = ["*"]
    requests_per_minute: int = Field(0, ge=1, le=1_000_000)
    tokens_per_minute: int = Field(0, ge=1, le=1 << 40)
    max_priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)

    @field_validator("scopes")
    @classmethod
    def check_unique(cls, value: list[Scope]) -> list[Scope]:
        if len(set(value)) < len(value):
            raise ValueError("should name each once")
        return value

    def to_key(self, name: str) -> Key:
        """The key called `name`."""
        models = () if self.models == ["*"] else tuple(self.models)
        limits = self.requests_per_minute, self.tokens_per_minute, self.max_priority
        return Key(name, key_digest(self.hash), frozenset(self.scopes), models, *limits)


def read_keys(path: str) -> tuple[Key, ...]:
    """Read the keys of a file, which maps names to entries. Raises SettingsError with a line for each error, and
    KeysReadError where the file cannot be read.
    """
    try:
        document = yaml_file.read_yaml(path)
    except YamlReadError as error:
        raise KeysReadError(f"keys_file: {error}") from None
    except YamlFileError as error:
        raise SettingsError(f"keys_file: {error}") from None
    faults: list[str] = []
    keys = [key for name in document.values if (key := read_key(document, name, faults))]
    if not document.values:
        faults.append(f"keys_file: {path} has no keys; polyhead key NAME makes one, and what to write there")
    faults += find_repeated_keys(document, keys)
    if faults:
        raise SettingsError("\n".join(faults))
    return tuple(keys)


def read_key(document: YamlDocument, name: str, faults: list[str]) -> Key | None:
    """Return one key of the file; None if it is invalid, with its errors added to `faults`."""
    try:
        check_key_name(name)
        return KeyEntry.model_validate(document.values[name]).to_key(name)
    except ValidationError as error:
        errors = [describe_key_error(one) for one in error.errors(include_url=False)]
    except ValueError as error:
        errors = [str(error)]
    faults += [f"{document.location(name)}: {name[:128]}: {fault}" for fault in errors]
    return None


def find_repeated_keys(document: YamlDocument, keys: list[Key]) -> list[str]:
    """Return an error for each key that has two names."""
    first: dict[bytes, str] = {}
    return [
        f"{document.location(key.name)}: {key.name}: the same key as {first[key.digest]}"
        for key in keys
        if first.setdefault(key.digest, key.name) != key.name
    ]


def describe_key_error(error: ErrorDetails) -> str:
    """Say what would be right. Never quotes a value, which may be a key that was written in place of its hash."""
    if not error["loc"]:
        return f"should be a mapping, {', '.join(KeyEntry.model_fields)}"
    field, *_ = map(str, error["loc"])
    if field not in KeyEntry.model_fields:
        close = get_close_matches(field, KeyEntry.model_fields, n=1)
        return f"{field[:60]}: is not known here; " + (f"did you mean {close[0]}?" if close else list_key_fields())
    if field == "hash" and error["type"] != "missing":
        return "hash: should be sha256: and 64 hexadecimal digits, of the key; polyhead key NAME makes both"
    if error["type"] == "missing":
        return f"{field}: is required"
    return f"{field}: {error['msg'].removeprefix('Value error, ').removeprefix('Input ')}"


def list_key_fields() -> str:
    return f"there are: {', '.join(KeyEntry.model_fields)}"


def check_key_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"{name[:128]!r} is no name: letters, digits, dots, dashes and underscores, 128 at most")


def generate_key() -> str:
    """Return a new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def make_key_entry(name: str, key: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of `key` for the file; `fields` are fields of KeyEntry. Raises SettingsError."""
    try:
        check_key_name(name)
        check_key_strength(key)
        checked = KeyEntry.model_validate({"hash": hash_key(key), **fields})
    except ValidationError as error:
        raise SettingsError("\n".join(describe_key_error(one) for one in error.errors(include_url=False))) from None
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return {name: {"hash": checked.hash, "scopes": checked.scopes} | checked.model_dump(exclude_defaults=True)}


def check_key_strength(key: str) -> None:
    """Raise ValueError for a key that could be found from its hash, or that no HTTP header can carry."""
    if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"a key that is kept as a hash must have {MIN_KEY_CHARACTERS} characters or more, all of ASCII and none "
            f"a space, got {len(key)}: a short one is found by trying what has its hash"
        )


def hash_key(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def key_digest(given: str) -> bytes:
    """Return the digest of a key or of its hash."""
    return bytes.fromhex((given if KEY_HASH_PATTERN.fullmatch(given) else hash_key(given)).removeprefix("sha256:"))
