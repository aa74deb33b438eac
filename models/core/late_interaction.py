"""How texts are read by a model that compares a query with a document token by token (ColBERT)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextRole:
    """How the texts of one role, query or document, are read.

    `prompt` is put before a text, and the token `prefix` after its first token (-1: none). A text has at most
    `max_tokens` tokens, and is filled up to `expanded` tokens (0: it is not). Tokens in `skipped` have no vector.
    """

    prompt: str
    prefix: int
    max_tokens: int
    expanded: int
    skipped: frozenset[int]


@dataclass(frozen=True)
class LateInteraction:
    """The two roles of texts (Khattab and Zaharia 2020, arXiv:2004.12832).

    Short queries are filled up with `expansion_token`; with `hides_expansion` no token attends to those. The score of a
    document is the sum over the query's vectors of the largest product with one of the document's; with `averages` the
    mean.
    """

    query: TextRole
    document: TextRole
    expansion_token: int
    hides_expansion: bool
    averages: bool
