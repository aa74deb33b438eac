"""The conversation, or the text, in which a reranker that generates gets a query and a document."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLACES = re.compile(r"\{(query|document)\}")


@dataclass(frozen=True)
class PairPrompt:
    """A query and a document are two messages with the roles "query" and "document", as sentence-transformers makes
    them. `system` is a message before them; empty: none. `variables` are those of the chat template.

    `in_parts`: the content of a message is a list of parts, and not a string.
    """

    system: str = ""
    in_parts: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def build_messages(self, query: str, document: str) -> list[dict[str, Any]]:
        """The conversation about a pair."""
        texts = {"system": self.system, "query": query, "document": document}
        if not self.system:
            del texts["system"]
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self.in_parts else text}
            for role, text in texts.items()
        ]


@dataclass(frozen=True)
class PairTemplate:
    """A query and a document between tokens, without a chat template. `texts` may name {query} and {document}, each
    once; each text is tokenised on its own, and nothing in it is a control token. `before` and `after` are tokens
    around them.

    It is no format string: a replica of a fleet sends it, and a width in a format takes any memory.
    """

    before: tuple[int, ...]
    texts: tuple[str, ...]
    after: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ValueError if a query or a document would stand there more than once."""
        places = PLACES.findall("".join(self.texts))
        if len(places) > len({*places}):
            raise ValueError("texts: {query} or {document} stands there more than once")

    def build_texts(self, query: str, document: str) -> list[str]:
        """The texts about a pair."""
        values = {"query": query, "document": document}
        return [PLACES.sub(lambda place: values[place[1]], text) for text in self.texts]
