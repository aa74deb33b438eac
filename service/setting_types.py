"""Types of settings that are more than a number, a word or a path: pairs, keys and an address.

A part of service.settings.  A type has all its checks, so a setting is
one line; a check raises ValueError, whose message pydantic puts beside the name of the setting.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr, ValidationInfo
from pydantic_settings import NoDecode

from service.names import LONGEST_NAME, NAME, is_name, trunk_of

HASH = re.compile(r"sha256:[0-9a-f]{64}")  # what may stand for a key
MASK = "********"  # what is shown of one

# Settings that are name=value pairs, and what one looks like.
PAIRS = {
    "models": "name=source, as in chat=./my-llama, or base:name=adapter for an adapter of the model base",
    "drafts": "model=source, as in chat=./my-smaller-llama",
    "weights": "model=weight, as in chat=2",
    "api_keys": "name=key, as in search=a-long-secret",
}
ALLOWED_NAMES = "letters, digits, dots, dashes and underscores, 128 at most"


def read_pairs(value: Any, info: ValidationInfo) -> Any:
    """A mapping (a table in the file), a list of name=value, or such a list in one string."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        return value
    named: dict[str, str] = {}
    secret = info.field_name == "api_keys"
    for item in value:
        name, equals, given = (part.strip() for part in str(item).partition("="))
        if not equals or not given:
            quoted = "what is given" if secret else repr(item)
            raise ValueError(f"{quoted} is not of the form {PAIRS[str(info.field_name)]}")
        if name in named:
            raise ValueError(f"{name!r} is named twice; every name stands once")
        named[name] = given
    return named


def check_models(value: Mapping[str, str]) -> Mapping[str, str]:
    for name in value:
        if not is_name(name):
            raise ValueError(f"{name!r} is no name: {ALLOWED_NAMES}; an adapter's has one colon, after its model's")
        base = trunk_of(name)
        if base and base not in value:
            raise ValueError(f"{name!r} is an adapter of {base!r}, which is not served; name its source too")
    return value


def check_weights(value: Mapping[str, float]) -> Mapping[str, float]:
    for name, weight in value.items():
        if not 0.001 <= weight <= 1000:
            raise ValueError(f"the weight of {name!r} must be between 0.001 and 1000, got {weight}")
    return value


def check_key(value: SecretStr) -> SecretStr:
    """A key, or the hash of one; not what `polyhead config` shows in its place."""
    given = value.get_secret_value()
    if given == MASK:
        raise ValueError(f"{MASK} is what is shown instead of a key, it is none")
    if given.startswith("sha256:") and not HASH.fullmatch(given):
        raise ValueError("after sha256: there must be the hash of a key, 64 hexadecimal digits in lower case")
    return value


def check_named_keys(value: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
    for name, key in value.items():
        if name and not key.get_secret_value():
            raise ValueError(f"the key of {name[:LONGEST_NAME]!r} is empty")
        check_key(key)
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name: {ALLOWED_NAMES}")
    return value


def check_collector(value: str) -> str:
    """The base, as OTEL_EXPORTER_OTLP_ENDPOINT has it; what it is must be plain before anything is sent."""
    base, address = value.rstrip("/"), urlsplit(value)
    if value and (address.scheme not in ("http", "https") or not address.hostname):
        raise ValueError("must be an address, as in http://collector:4318")
    if address.username is not None or address.query or address.fragment:
        raise ValueError("must have no user, query or fragment; headers go into OTEL_EXPORTER_OTLP_HEADERS")
    if base.endswith("/v1/traces"):
        raise ValueError("must be the collector's address without /v1/traces, which is added")
    return base


ModelSources = Annotated[Mapping[str, str], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_models)]
DraftSources = Annotated[Mapping[str, str], NoDecode, BeforeValidator(read_pairs)]
ModelWeights = Annotated[Mapping[str, float], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_weights)]
ApiKey = Annotated[SecretStr, AfterValidator(check_key)]
ApiKeys = Annotated[Mapping[str, SecretStr], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_named_keys)]
CollectorAddress = Annotated[str, AfterValidator(check_collector)]
