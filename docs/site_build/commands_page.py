"""Writes the page of the command line from its declarations."""

from collections.abc import Iterator
from typing import Any

import typer

from polyhead.service.cli.main import app

HEAD = """# Command line

Every command of `polyhead`; `polyhead COMMAND --help` prints the same. This page is written from their declarations.
"""


def as_markdown() -> str:
    sections = (describe(name, command) for name, command in commands("polyhead", typer.main.get_command(app)))
    return "\n".join([HEAD, *sections])


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """All commands below `command` with their full names; a group is not a command itself."""
    nested = getattr(command, "commands", None)
    if nested is None:
        yield name, command
        return
    for word, each in nested.items():
        yield from commands(f"{name} {word}", each)


def describe(name: str, command: Any) -> str:
    rows = [row(option) for option in command.params if option.name != "help"]
    table = ["| argument or option | | default |\n|---|---|---|\n" + "\n".join(rows)] if rows else []
    more = ["Its flags are the [settings](settings.md)."] if name == "polyhead serve" else []
    return "\n\n".join([f"## `{name}`", command.help or "", *more, *table, ""])


def row(option: Any) -> str:
    name = ", ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
    default = (
        option.default if isinstance(option.default, str | int | float) and option.default not in ("", False) else ""
    )
    text = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
    return f"| `{name}` | {text} | {f'`{default}`' if default != '' else ''} |"
