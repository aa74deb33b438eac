"""Writes the page of all settings from their declarations."""

import json
from collections.abc import Mapping
from typing import Any

from polyhead.service.config.effective_settings import settings_schema
from polyhead.service.config.settings import ENVIRONMENT_PREFIX, Settings

HEAD = """# Settings

Every setting of `polyhead serve`. `max_requests` is the flag `--max-requests`, the environment variable
`POLYHEAD_MAX_REQUESTS`, or a line of the YAML file that `--config` names. Flags take precedence over variables, these
over the file. `polyhead config` prints the effective values and the origin of each. This page is written from their
declarations.

| setting | type | default | |
|---|---|---|---|
"""


def as_markdown() -> str:
    properties = json.loads(settings_schema())["properties"]
    assert ENVIRONMENT_PREFIX == "POLYHEAD_", "the text above names a variable"
    rows = [
        row(name, properties.get(name, {}), field.description or "") for name, field in Settings.model_fields.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


def row(name: str, schema: Mapping[str, Any], description: str) -> str:
    default = schema.get("default")
    shown = "" if default is None or default in ("", [], {}) else f"`{json.dumps(default).strip(chr(34))}`"
    return f"| `{name}` | {kind(schema)} | {shown} | {description.replace('|', chr(92) + '|')} |"


def kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    least, most = (schema.get(f"{end}imum", schema.get(f"exclusive{end.title()}imum")) for end in ("min", "max"))
    bounds = f", {least:,} to {most:,}" if least is not None and most is not None else ""
    types = [str(each.get("type", "")) for each in schema.get("anyOf", [schema])]
    return " or ".join(dict.fromkeys(filter(None, types))) + bounds
