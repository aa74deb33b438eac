"""What an answer must look like, as the engine sees it: which tokens may come next, and which must.

Knows no grammar and no text.  The one idea: a Guide is what was compiled, once, for any number of answers; a Walk is
how far one answer has come.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .grammar import Grammar, Thinking


class GuideState(Protocol):
    """One answer's way through a guide.  One thread at a time calls it.

    Its methods raise PolyheadError where the guide has become too costly to follow.
    """

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the answer is whole."""

    def fill_mask(self, words: NDArray[np.int32]) -> bool:
        """Set the bits of the tokens that may come next, bit i of `words` [ceil(V / 32)] for token i.

        False, and nothing set, where any may.
        """

    def advance(self, token: int) -> None:
        """`token` has come, as was allowed; or it ends the answer."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice; to be told by `advance` when they have."""


class Guide(Protocol):
    @property
    def spec(self) -> "GuideSpec":
        """What it was compiled from: plain values, from which another process makes the same."""

    def new_state(self) -> GuideState: ...


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """What an answer must look like, and how its thought ends."""

    grammar: Grammar | None
    thinking: Thinking | None
