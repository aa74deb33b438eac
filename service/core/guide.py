"""Constraints on generated tokens, as the engine uses them: which tokens may come next, and which must.

A Guide is compiled once for any number of answers; a GuideState is the position of one answer in it.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .grammar import Grammar, Thinking


class GuideBusy(Exception):
    """The guide cannot give a mask yet.  It can be asked again when `ready` is done."""

    def __init__(self, ready: Future[Any]) -> None:
        super().__init__("the guide is being compiled again")
        self.ready = ready


class GuideFinished(Exception):
    """The answer is complete: nothing may follow."""


class GuideState(Protocol):
    """The position of one answer in a guide.  One thread at a time calls it.

    Only `fill_mask` may take long.  What `advance` and `forced_tokens` could not do at once, it does first.

    Its methods raise PolyheadError where the guide has become too costly to follow.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the answer is known to be complete: nothing may follow."""

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        """Set the bits of the allowed tokens, bit i of `mask` [ceil(V / 32)] for token i.

        Returns False, and sets nothing, where all are allowed.  Raises GuideBusy where it takes longer; nothing has
        changed then.  Raises GuideFinished where the answer turns out to be complete, although `is_finished` was
        false.
        """

    def advance(self, token: int) -> None:
        """`token` was appended; it was allowed, or it ends the answer."""

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        """The tokens that must come next, where there is no choice; `advance` is called when they are appended.

        Where `computes` is false, those that would take work are left to the next mask.
        """


class Guide(Protocol):
    @property
    def spec(self) -> "GuideSpec":
        """What it was compiled from: plain values, which another process can compile again."""

    def new_state(self, owner: str = "") -> GuideState:
        """The beginning of an answer of `owner`, the name of a key."""


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """The form of an answer: its grammar, and the thinking before it."""

    grammar: Grammar | None
    thinking: Thinking | None
