"""What an answer must look like, as it is asked for.

Knows no dialect and no engine.
"""

from dataclasses import dataclass
from typing import Literal

MAX_REGEX_CHARS = 1 << 14  # characters of a regular expression, and of each pattern in a schema
MAX_TOOL_SCHEMA_CHARS = 1 << 18  # characters of the schemas of all tools
MAX_GRAMMAR_CHARS = 1 << 16  # characters of a grammar, of a schema as text, and of all choices together


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source` is a JSON schema as text, a regular expression, a JSON list of the strings to choose from, or a grammar
    in llguidance's variant of Lark; empty for any JSON object.  `field` is the wire's name for it."""

    kind: Literal["object", "schema", "regex", "choice", "lark"]
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """The model thinks before it answers, until it writes `end`, which it does at the latest after `budget` tokens.

    `begin` is what it writes first; empty where the prompt has that already.  A grammar holds for what comes after.
    """

    begin: str
    end: str
    budget: int = -1  # -1: as many as it likes
