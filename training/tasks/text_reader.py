"""Encodes texts for training.

A text that is too long is an error unless the recipe sets a limit; then each encoded text records whether it was
truncated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyhead.models.tokenizer import Encoding, Tokenizer

from ..loop.errors import RecipeError

Text = str | tuple[str, str]


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text or a pair; `offsets` are the code points that each covers, in its own text."""

    tokens: list[int]
    segments: list[int]
    offsets: list[tuple[int, int]]
    is_truncated: bool


@dataclass(frozen=True)
class TextReader:
    """Encodes texts of at most `limit` tokens; longer ones are truncated if `may_truncate`."""

    tokenizer: Tokenizer
    limit: int
    may_truncate: bool

    def __call__(self, texts: Sequence[Text]) -> list[EncodedText]:
        """Encode texts.  Raises RecipeError for a text that is too long and may not be truncated."""
        return [self.fit_text(text, each) for text, each in zip(texts, self.tokenizer.encode_batch(texts), strict=True)]

    def fit_text(self, text: Text, encoding: Encoding) -> EncodedText:
        if len(encoding) <= self.limit:
            return EncodedText(encoding.ids, encoding.segments, encoding.offsets, is_truncated=False)
        if not self.may_truncate:
            shown = text if isinstance(text, str) else " / ".join(text)
            message = f"data.most_tokens: {len(encoding)} tokens, at most {self.limit}; set how many are read"
            raise RecipeError(f"{message}: {shown[:60]!r}")
        closing = encoding.special[::-1].index(False)  # special tokens after a text
        kept_tokens = self.limit - closing
        ids, segments, offsets = (
            [*values[:kept_tokens], *values[len(values) - closing :]]
            for values in (encoding.ids, encoding.segments, encoding.offsets)
        )
        return EncodedText(ids, segments, offsets, is_truncated=True)
