"""Writes the page of all routes from the server's OpenAPI description."""

from collections.abc import Iterator, Mapping
from typing import Any

from polyhead.service.config.settings import Settings
from polyhead.service.server.assembly import assemble

Json = Mapping[str, Any]
HEAD = """# API

Every route, its fields and the statuses of its answers. This page is written from the OpenAPI description that a server
has at `/openapi.json`; `/docs` of a running server shows the same with an example of each body.
[Dialects](../dialects.md) has the effect of every field. Unknown fields are refused by name. The routes under `/admin`
and `/v2/repository` exist where a key has the scope admin.
"""
DEEPEST = 3  # levels of nested objects that are listed
MOST_NAMES = 8  # values of an enumeration that are listed


def describe_api() -> Json:
    """The OpenAPI description of a server with all routes. Nothing is loaded or started."""
    app = assemble(Settings(models={"any": "./any"}, admin_key="any-key-of-the-description"), lambda _: None)
    description: Json = app.openapi()
    return description


def as_markdown(description: Json | None = None) -> str:
    api = description or describe_api()
    tags: dict[str, list[str]] = {}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            [tag, *_] = operation.get("tags", ["other"])
            tags.setdefault(tag, []).append(describe_operation(f"{method.upper()} {path}", operation))
    sections = (f"## {tag[0].upper()}{tag[1:]}\n\n" + "\n".join(operations) for tag, operations in tags.items())
    return "\n".join([HEAD, *sections])


def describe_operation(name: str, operation: Json) -> str:
    words = [f"### `{name}`", operation.get("summary", ""), operation.get("description", "")]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    rows = list(field_rows(body)) if body else []
    if rows:
        words.append("| field | type | default |\n|---|---|---|\n" + "\n".join(dict.fromkeys(rows)))
    statuses = ", ".join(operation["responses"])
    access = "no key" if not operation.get("security") else "a key, if the server has keys"
    return "\n\n".join([*filter(None, words), f"Answers: {statuses}. Needs {access}.", ""])


def field_rows(schema: Json, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """A row of the table for each field, those of nested objects after their own."""
    for kind in variants(schema):
        if kind.get("type") == "array":
            yield from field_rows(kind.get("items", {}), f"{prefix.rstrip('.')}[].", depth)
        if isinstance(kind.get("additionalProperties"), dict):  # under names that the client chooses
            yield from field_rows(kind["additionalProperties"], f"{prefix}NAME.", depth)
        needed = kind.get("required", ())
        for name, field in kind.get("properties", {}).items():
            default = "required" if name in needed else shown(field.get("default"))
            yield f"| `{prefix}{name}` | {describe_type(field)} | {default} |"
            if depth < DEEPEST:
                yield from field_rows(field, f"{prefix}{name}.", depth + 1)


def variants(schema: Json) -> list[Json]:
    return [each for kind in ("anyOf", "oneOf") if kind in schema for each in schema[kind]] or [schema]


def describe_type(schema: Json) -> str:
    kinds = variants(schema)
    if len(kinds) > 1:
        return " or ".join(dict.fromkeys(map(describe_type, kinds)))
    [kind] = kinds
    if "const" in kind or "enum" in kind:
        values = [kind["const"]] if "const" in kind else kind["enum"]
        more = ", ..." if len(values) > MOST_NAMES else ""
        return ", ".join(f"`{value}`" for value in values[:MOST_NAMES]) + more
    if kind.get("type") == "array":
        return f"list of {describe_type(kind.get('items', {}))}"
    least, most = kind.get("minimum"), kind.get("maximum")
    bounds = f" {least} to {most}" if least is not None and most is not None else ""
    return f"{kind.get('type', 'anything')}{bounds}"


def shown(value: Any) -> str:
    return "" if value is None or value in ("", [], {}) else f"`{value}`"
