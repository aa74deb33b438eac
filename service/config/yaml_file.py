"""Strict reader of a YAML file: its values, and the line of each name.

Nothing is ambiguous. A name occurs once, references are rejected, and plain words are text (YAML 1.1 takes `no` for
false and 1:30 for 90).
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MAX_FILE_BYTES = 1 << 20  # bytes
# Unquoted values that are not text; a part of those that PyYAML quotes when it writes.
SCALAR_PATTERNS = {
    "null": (r"~|null|", ["~", "n", ""]),
    "bool": (r"true|false", ["t", "f"]),
    "int": (r"[-+]?(?:0|[1-9][0-9]{0,18})", list("-+0123456789")),
    "float": (r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]*(?:e[-+][0-9]+)?", list("-+0123456789")),
}


class YamlFileError(ValueError):
    """A file that cannot be used. The message begins with its path, and with the line of the error if there is one."""


class YamlReadError(YamlFileError):
    """A file that the system does not give now, whatever is in it."""


@dataclass(frozen=True)
class YamlDocument:
    """The values of a file, and the line of each name; `path` as it was given."""

    path: str
    values: dict[str, Any]
    lines: dict[str, int]

    def location(self, name: str) -> str:
        return f"{self.path}:{self.lines[name]}"


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Parses text to nodes. References are rejected (one that refers to another, ten deep, is a thousand million
    values), and so are tags, which change the type of a value.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own name and kind

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            problem = f"{'a reference' if isinstance(event, yaml.AliasEvent) else 'a tag'} is not read, write the value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


for kind, (pattern, first) in SCALAR_PATTERNS.items():
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z"), first)


def read_yaml(path: str) -> YamlDocument:
    """Read a file. Raises YamlFileError if it is not a mapping of names, or has a name twice at any depth."""
    try:
        return build_document(path, StrictLoader(read_file_text(path)))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise YamlFileError(f"{path}{line}: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        raise YamlFileError(f"{path} is not a YAML file: {error.reason}, at character {error.position}") from None
    except RecursionError:
        raise YamlFileError(f"{path} is nested too deeply") from None
    except YamlFileError:
        raise
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # PyYAML lets through what chr() and float() raise
        raise YamlFileError(f"{path} is not a YAML file that can be read: {error}") from None


def build_document(path: str, loader: StrictLoader) -> YamlDocument:
    node = loader.get_single_node()
    if node is None:  # only comments
        return YamlDocument(path, {}, {})
    if not isinstance(node, yaml.MappingNode):
        raise YamlFileError(f"{path} must be a mapping, lines of the form name: value")
    return YamlDocument(
        path, construct_value(loader, node), {name.value: name.start_mark.line + 1 for name, _ in node.value}
    )


def open_without_waiting(path: str, flags: int) -> int:
    """Opens a file for reading; a pipe at once, without waiting for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file_text(path: str) -> str:
    try:
        with open(Path(path).expanduser(), "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise YamlFileError(f"{path} is no regular file, and a pipe or device may never end")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise YamlReadError(f"{path} cannot be read: {error.strerror}") from None
    except RuntimeError:  # of expanduser
        raise YamlFileError(f"{path} begins with ~ and the name of no user of this machine") from None
    if len(data) > MAX_FILE_BYTES:
        raise YamlFileError(f"{path} has more than {MAX_FILE_BYTES} bytes, at most so many are read")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise YamlFileError(f"{path} is not UTF-8 text") from None


def construct_value(loader: StrictLoader, node: yaml.Node) -> Any:
    """Return the value of a node; names are text, whatever they look like."""
    match node:
        case yaml.MappingNode():
            values: dict[str, Any] = {}
            for name, value in node.value:
                if not isinstance(name, yaml.ScalarNode) or name.value in values:
                    problem = (
                        f"{name.value!r} stands twice"
                        if isinstance(name, yaml.ScalarNode)
                        else "a name must be plain text"
                    )
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=name.start_mark)
                values[name.value] = construct_value(loader, value)
            return values
        case yaml.SequenceNode():
            return [construct_value(loader, item) for item in node.value]
        case _:
            return loader.construct_object(node)
