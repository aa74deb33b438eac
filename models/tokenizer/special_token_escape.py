"""Text of people inside a prompt of a template's: what it spells is no control token.

Knows no vocabulary, only how its control tokens are spelled.  The one idea: before the template is given a text, every
control token in it is broken by a mark, so those that are whole in what the template writes are its own; what stands
between them is read as the plain text that it looks like, without the marks.
"""

import re
from collections.abc import Iterable

MARK = "\ufdd0"  # no character: Unicode keeps it for uses of this kind


class Quoting:
    """For the `control` tokens of a vocabulary; of those of one character none can be broken."""

    def __init__(self, control: Iterable[str]) -> None:
        spelled = sorted((piece for piece in control if len(piece) > 1), key=len, reverse=True)
        self._control = re.compile("(" + ("|".join(map(re.escape, spelled)) or "(?!)") + ")")

    def quote(self, text: str) -> str:
        """The text with its control tokens broken; those that this leaves, which began inside of one, too."""
        while self._control.search(text):
            text = self._control.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text

    def parts(self, text: str) -> list[str]:
        """A text in which some are broken: plain, a control token, plain, a control token, ..., plain."""
        return [part.replace(MARK, "") for part in self._control.split(text)]
