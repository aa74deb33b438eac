"""Control tokens with which code models are trained to write the text between two others (Bavarian et al. 2022,
arXiv:2207.14255).

The prompt is `prefix` text-before `suffix` text-after `middle`; the answer is the text between. Codestral puts the text
after first.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The spellings of the control tokens. `ends`: other tokens that end an answer.

    `suffix_first`: the text after comes first, and the answer follows the text before.
    """

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.prefix, self.suffix, self.middle) if self.middle else (self.prefix, self.suffix)

    def join(self, before: str, after: str) -> str:
        """The prompt; the marks are control tokens in it."""
        if self.suffix_first:
            return f"{self.suffix}{after}{self.prefix}{before}"
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"


# Qwen2.5-Coder and CodeGemma; StarCoder and Granite Code; SantaCoder; Code Llama; DeepSeek-Coder; CodeGeeX; Codestral.
KNOWN_MARKS = (
    FillMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    FillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<file_sep>")),
    FillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>",)),
    FillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    FillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    FillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillMarks("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


def find_fill_marks(token_id: Callable[[str], int | None], is_special: Callable[[int], bool]) -> FillMarks | None:
    """The first marks of which all are control tokens of a vocabulary, with those `ends` that it has."""
    for marks in KNOWN_MARKS:
        ids = [token_id(piece) for piece in marks.tokens]
        if all(each is not None and is_special(each) for each in ids):
            ends = tuple(piece for piece in marks.ends if token_id(piece) is not None)
            return FillMarks(marks.prefix, marks.suffix, marks.middle, ends, marks.suffix_first)
    return None
