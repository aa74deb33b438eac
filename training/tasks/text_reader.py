"""Texts to token ids, as a network in training reads them.

It doesn't know what is learned of them.  The one idea: nothing is cut off in silence.  A text that is too long is an
error, unless the recipe says how much of a text is read; then it is known of every text whether it was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyhead.models.tokenizer import Encoding, Tokenizer

from ..loop.errors import RecipeError

Text = str | tuple[str, str]


@dataclass(frozen=True)
class EncodedText:
    """A text, or a pair, as tokens; `offsets` are the code points that each covers, of its own text."""

    tokens: list[int]
    segments: list[int]
    offsets: list[tuple[int, int]]
    is_truncated: bool


@dataclass(frozen=True)
class TextReader:
    """Reads at most `limit` tokens; of longer texts the first ones if it may `cut`."""

    tokenizer: Tokenizer
    limit: int
    may_truncate: bool

    def __call__(self, texts: Sequence[Text]) -> list[EncodedText]:
        """RecipeError if a text is too long and may not be cut."""
        return [self.fit_text(text, each) for text, each in zip(texts, self.tokenizer.encode_batch(texts), strict=True)]

    def fit_text(self, text: Text, encoding: Encoding) -> EncodedText:
        if len(encoding) <= self.limit:
            return EncodedText(encoding.ids, encoding.segments, encoding.offsets, is_truncated=False)
        if not self.may_truncate:
            shown = text if isinstance(text, str) else " / ".join(text)
            message = f"data.most_tokens: {len(encoding)} tokens, at most {self.limit}; say how many are read"
            raise RecipeError(f"{message}: {shown[:60]!r}")
        closing = encoding.special[::-1].index(False)  # tokens that the model wants behind a text
        kept = self.limit - closing
        ids, segments, offsets = (
            [*values[:kept], *values[len(values) - closing :]]
            for values in (encoding.ids, encoding.segments, encoding.offsets)
        )
        return EncodedText(ids, segments, offsets, is_truncated=True)
