"""The form of an answer as the client asks for it: a grammar, and thinking before the answer."""

from dataclasses import dataclass
from typing import Literal

MAX_REGEX_CHARS = 1 << 14  # characters of a regular expression, and of each pattern in a schema
MAX_TOOL_SCHEMA_CHARS = 1 << 18  # characters of the schemas of all tools
MAX_GRAMMAR_CHARS = 1 << 16  # characters of a grammar, of a schema as text, and of all choices together


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the answer.

    `source` is a JSON schema as text, a regular expression, a JSON list of strings to choose from, or a grammar in
    llguidance's variant of Lark: the client's ("lark"), or one that calls of tools are written in ("calls"); empty for
    any JSON object.  In a "schema" an object that names its properties has no
    others unless it says so; an "open_schema" is read as JSON Schema defines it.  `field` is the name of the field of
    the request.
    """

    kind: Literal["object", "schema", "open_schema", "regex", "choice", "lark", "calls"]
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The model thinks before it answers, until it writes `end`, at the latest after `budget` tokens.

    `begin` is the text that starts the thought; empty where the prompt ends with it.  A grammar applies after the
    thought.
    """

    begin: str
    end: str
    budget: int = -1  # -1: no limit
