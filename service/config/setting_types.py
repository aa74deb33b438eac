"""Types of settings that are more than a number, a word or a path: pairs, lists, keys and addresses.

Part of service.config.settings. A type has all its checks, so a setting is one line. A check raises ValueError;
pydantic adds the name of the setting.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr, ValidationInfo
from pydantic_settings import NoDecode

from ..core.names import MAX_NAME_CHARS, NAME_PATTERN, base_model_name, is_name

KEY_HASH_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")  # accepted in place of a key
MASK = "********"  # shown in place of a key

# Settings that are name=value pairs, each with an example.
PAIR_EXAMPLES = {
    "models": "name=source, as in chat=./my-llama, or base:name=adapter for an adapter of the model base",
    "drafts": "model=source, as in chat=./my-smaller-llama",
    "weights": "model=weight, as in chat=2",
    "calibrations": "model=file, as in judge=./judge.calibration.json, or judge=none",
    "api_keys": "name=key, as in search=a-long-secret",
}
LIST_EXAMPLES = {  # settings that are lists, each with an example in one string
    "allowed_hosts": "names separated by commas, as in models.example.com,*.example.com",
    "proxy_headers": "addresses or networks separated by commas, as in 127.0.0.1,10.0.0.0/8",
    "cors_origins": "origins separated by commas, as in https://app.example.com,http://127.0.0.1:3000",
}
HOST_PATTERN = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
ORIGIN_PATTERN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
ALLOWED_NAMES = "letters, digits, dots, dashes and underscores, 128 at most"


def read_pairs(value: Any, info: ValidationInfo) -> Any:
    """Read a mapping (in the file), a list of name=value, or such a list in one string."""
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
            raise ValueError(f"{quoted} is not of the form {PAIR_EXAMPLES[str(info.field_name)]}")
        if name in named:
            raise ValueError(f"{name!r} is named twice; every name stands once")
        named[name] = given
    return named


def check_models(value: Mapping[str, str]) -> Mapping[str, str]:
    for name in value:
        if not is_name(name):
            raise ValueError(f"{name!r} is no name: {ALLOWED_NAMES}; an adapter's has one colon, after its model's")
        base = base_model_name(name)
        if base and base not in value:
            raise ValueError(f"{name!r} is an adapter of {base!r}, which is not served; name its source too")
    return value


def check_weights(value: Mapping[str, float]) -> Mapping[str, float]:
    for name, weight in value.items():
        if not 0.001 <= weight <= 1000:
            raise ValueError(f"the weight of {name!r} must be between 0.001 and 1000, got {weight}")
    return value


def check_paths(value: Mapping[str, str]) -> Mapping[str, str]:
    for path in value.values():
        expand_home(Path(path))
    return value


def check_key(value: SecretStr) -> SecretStr:
    """Check a key or the hash of one. The mask that `polyhead config` prints is rejected."""
    given = value.get_secret_value()
    if given == MASK:
        raise ValueError(f"{MASK} is what is shown instead of a key, it is none")
    if given.startswith("sha256:") and not KEY_HASH_PATTERN.fullmatch(given):
        raise ValueError("after sha256: there must be the hash of a key, 64 hexadecimal digits in lower case")
    return value


def check_named_keys(value: Mapping[str, SecretStr]) -> Mapping[str, SecretStr]:
    for name, key in value.items():
        if name and not key.get_secret_value():
            raise ValueError(f"the key of {name[:MAX_NAME_CHARS]!r} is empty")
        check_key(key)
    for name in value:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{name!r} is no name: {ALLOWED_NAMES}")
    return value


def check_collector(value: str) -> str:
    """Return the base address, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    base, address = value.rstrip("/"), urlsplit(value)
    if value and (address.scheme not in ("http", "https") or not address.hostname):
        raise ValueError("must be an address, as in http://collector:4318")
    if address.username is not None or address.query or address.fragment:
        raise ValueError("must have no user, query or fragment; headers go into OTEL_EXPORTER_OTLP_HEADERS")
    if base.endswith("/v1/traces"):
        raise ValueError("must be the collector's address without /v1/traces, which is added")
    return base


def read_list(value: Any) -> Any:
    """Read a list (in the file), or a list in one string, separated by commas."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def check_hosts(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts in lower case, IPv6 addresses without brackets."""
    for host in value:
        if not HOST_PATTERN.fullmatch(host) and not is_address(host.strip("[]")):
            raise ValueError(
                f"{host[:MAX_NAME_CHARS]!r} must be a name or an address without scheme and port, as in "
                "models.example.com, *.example.com or 10.0.0.5; * allows any"
            )
    return tuple(host.lower().strip("[]").removesuffix(".") for host in value)


def is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def check_proxies(value: tuple[str, ...]) -> tuple[str, ...]:
    for address in value:
        try:
            if address != "*":
                ip_network(address)
        except ValueError:
            raise ValueError(
                f"{address[:MAX_NAME_CHARS]!r} must be an IP address or a network whose host bits are zero, as in "
                "127.0.0.1, 10.0.0.0/8 or fd00::/8; * trusts any"
            ) from None
    return value


def check_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the origins as browsers write them: in lower case, without the default port of their scheme."""
    for origin in value:
        if not ORIGIN_PATTERN.fullmatch(origin):
            raise ValueError(
                f"{origin[:MAX_NAME_CHARS]!r} must be an origin, scheme://host and perhaps :port with nothing behind "
                "it, as in https://app.example.com or http://127.0.0.1:3000; * allows any"
            )
    return tuple(without_default_port(origin.lower()) for origin in value)


def without_default_port(origin: str) -> str:
    return origin.removesuffix(DEFAULT_PORTS.get(origin.partition(":")[0], ":"))


ModelSources = Annotated[Mapping[str, str], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_models)]
DraftSources = Annotated[Mapping[str, str], NoDecode, BeforeValidator(read_pairs)]
CalibrationFiles = Annotated[Mapping[str, str], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_paths)]
ModelWeights = Annotated[Mapping[str, float], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_weights)]
ApiKey = Annotated[SecretStr, AfterValidator(check_key)]
ApiKeys = Annotated[Mapping[str, SecretStr], NoDecode, BeforeValidator(read_pairs), AfterValidator(check_named_keys)]
CollectorAddress = Annotated[str, AfterValidator(check_collector)]
Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_list), AfterValidator(check_hosts)]
Proxies = Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_list), AfterValidator(check_proxies)]
WebOrigins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_list), AfterValidator(check_origins)]


def expand_home(path: Path) -> Path:
    """`path` with ~ and ~user replaced by that user's home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("begins with ~ and the name of no user of this machine; give the whole path") from None
