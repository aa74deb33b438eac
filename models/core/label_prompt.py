"""How a model reads the labels of a request beside a text: GLiNER (Zaratiana et al. 2024, arXiv:2311.08526) and
GLiClass (Stepanov et al. 2025, arXiv:2508.07662)."""

from dataclasses import dataclass

MAX_LABELS = 100  # labels of one request


@dataclass(frozen=True)
class LabelPrompt:
    """A token `label` is put before each label, and `separator` after the last one; `label_id` is that token's id.

    With `max_words` the text is read word by word, and spans of words are answered: a word is represented by its first
    token, with `uses_last_piece` by its last one. A span has at most `max_width` words; 0: of any length, from scores
    of single words.

    Otherwise the whole text is classified. It stands after the labels, or before them without `is_first`. With
    `starts_at_separator` its representation is read from the separator on; else from all tokens.
    """

    label: str
    separator: str
    label_id: int
    is_first: bool = True
    max_words: int = 0
    max_width: int = 0
    uses_last_piece: bool = False
    starts_at_separator: bool = False

    @property
    def columns(self) -> int:
        """Scores of a word for each label: one for each width of a span, or those of its start, end and inside."""
        return self.max_width or 3
