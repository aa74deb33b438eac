"""The output of `polyhead config`: the settings that a server would have, and the origin of each.

The output is a valid settings file with the origin beside every line; only keys are masked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import SecretStr

from .keys import Key
from .setting_types import LIST_EXAMPLES, MASK, PAIR_EXAMPLES
from .settings import Settings, environment_variables, read_config_file
from .yaml_file import YamlDocument

ORIGIN_COLUMN = 40  # the column of the origins
SCHEMA_DRAFT = "https://json-schema.org/draft/2020-12/schema"
CONFIG_SETTING = "config"  # the setting that names the file itself, so no file has it


def find_origins(flags: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """Return the origin of each setting's value; `settings` were read with the same `flags`."""
    variables = environment_variables()
    document = read_config_file(settings.config) if settings.config else YamlDocument("", {}, {})

    def origin(name: str) -> str:
        if name in flags:
            return "arguments" if name == "models" else f"flag --{name.replace('_', '-')}"
        if name in variables:
            return f"environment {variables[name]}"
        return document.location(name) if name in document.values else "default"

    return {name: origin(name) for name in Settings.model_fields}


def printable_value(value: Any) -> Any:
    """Return a value as YAML and JSON have it. Keys are replaced by a mask, the names of keys remain."""
    match value:
        case SecretStr():
            return MASK if value.get_secret_value() else ""
        case Mapping():
            return {name: printable_value(each) for name, each in value.items()}
        case Path():
            return str(value)
        case _:
            return value


def as_yaml(settings: Settings, origin: Mapping[str, str], keys: tuple[Key, ...]) -> str:
    """Return a settings file with the same values. Masked values are commented out."""
    lines = []
    for name, where in origin.items():
        first, *more = yaml_lines(name, printable_value(getattr(settings, name)))
        hidden = "# " if name == CONFIG_SETTING or MASK in "".join([first, *more]) else ""
        lines.append(f"{hidden}{first}".ljust(ORIGIN_COLUMN - 1) + f" # {where}")
        lines += [f"{hidden}{line}" for line in more]
    return "\n".join([*lines, *(f"# key {describe_key(key)}" for key in keys)])


def yaml_lines(name: str, value: Any) -> list[str]:
    """Return the lines of a setting. Its value is on the first, unless it is a mapping, since the origin goes there."""
    style = '"' if "\n" in str(value) else None
    text: str = yaml.safe_dump({name: value}, sort_keys=False, default_style=style, width=1 << 20)
    return text.splitlines()


def as_json(settings: Settings, origin: Mapping[str, str], keys: tuple[Key, ...]) -> str:
    every = {
        name: {"value": printable_value(getattr(settings, name)), "origin": where} for name, where in origin.items()
    }
    key_objects = {key.name: key_fields(key) for key in keys}
    return orjson.dumps({"settings": every, "keys": key_objects}, option=orjson.OPT_INDENT_2).decode()


def describe_key(key: Key) -> str:
    fields = key_fields(key)
    return f"{key.name}: " + ", ".join(f"{name} {value}" for name, value in fields.items())


def key_fields(key: Key) -> dict[str, Any]:
    return {
        "scopes": " ".join(sorted(key.scopes)),
        "models": " ".join(key.models) or "*",
        "requests_per_minute": key.requests_per_minute or "unlimited",
        "tokens_per_minute": key.tokens_per_minute or "unlimited",
    }


def settings_schema() -> str:
    """Return the JSON schema of the settings file."""
    whole = Settings.model_json_schema()
    del whole["properties"][CONFIG_SETTING]
    for name, example in PAIR_EXAMPLES.items():
        whole["properties"][name] = allow_pair_forms(whole["properties"][name], example)
    for name, example in LIST_EXAMPLES.items():
        listed = whole["properties"][name]
        items = {"type": listed.pop("type"), "items": listed.pop("items")}
        whole["properties"][name] = listed | {"anyOf": [items, {"type": "string"}], "$comment": example}
    titled = {"$schema": SCHEMA_DRAFT, **whole, "title": "Settings of Polyhead", "description": "The file of --config."}
    return orjson.dumps(titled, option=orjson.OPT_INDENT_2).decode()


def allow_pair_forms(mapping: dict[str, Any], example: str) -> dict[str, Any]:
    """Return the schema of pairs: a mapping, a list of name=value, or such a list in one string."""
    outside = {name: mapping.pop(name) for name in ("title", "description", "default") if name in mapping}
    listed = {"type": "array", "items": {"type": "string", "pattern": "="}}
    return outside | {"anyOf": [mapping, listed, {"type": "string"}], "$comment": example}
