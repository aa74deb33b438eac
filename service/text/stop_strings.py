"""Stop strings: what ends an answer before the model does, found in text that comes in parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StopRules:
    """What ends an answer beside the model's own stop tokens. With `keep`, it stays at the end of the text."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    keep: bool = False

    @cached_property
    def failure_tables(self) -> tuple[Sequence[int], ...]:
        """The failure table of each string, computed once for all answers of a call."""
        return tuple(failure_table(string) for string in self.strings)


def failure_table(stop: str) -> list[int]:
    """Return at k how many characters of `stop` still match if the character after the first k differs."""
    falls = [0, 0]
    for char in stop[1:]:
        fall = falls[-1]
        while fall and stop[fall] != char:
            fall = falls[fall]
        falls.append(fall + (stop[fall] == char))
    return falls


class StopString:
    """Searches one string, a character at a time (Knuth, Morris, Pratt 1977, doi:10.1137/0206024).

    `matched`: how many of its characters the text ends with. `falls`: its failure table.
    """

    __slots__ = ("falls", "matched", "stop")

    def __init__(self, stop: str, falls: Sequence[int]) -> None:
        self.stop, self.falls, self.matched = stop, falls, 0

    def push(self, char: str) -> bool:
        """Whether the stop string ends with this character. Not to be called again after that."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self.falls[self.matched]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)


class StopBuffer:
    """Holds back the end of a text while it may be the beginning of a stop string.

    The string that is complete first ends the text, before it, or after it with `keep`. Of several that end at the same
    character, the longest counts.
    """

    def __init__(self, stops: StopRules) -> None:
        self.stops = [StopString(stop, falls) for stop, falls in zip(stops.strings, stops.failure_tables, strict=True)]
        self.pending = ""
        self.found = ""
        self.keep = stops.keep

    def push(self, text: str) -> str:
        """Add text; return what certainly precedes any stop string."""
        self.pending += text
        for end, char in enumerate(text, len(self.pending) - len(text) + 1):
            # each of them must get the character, so no short-circuit
            ended = [stop.stop for stop in self.stops if stop.push(char)]
            if ended:
                self.found = max(ended, key=len)
                self.pending = self.pending[: end if self.keep else end - len(self.found)]
                return self.flush()
        return self.release(max((stop.matched for stop in self.stops), default=0))

    def release(self, keep: int) -> str:
        certain = len(self.pending) - keep
        shown, self.pending = self.pending[:certain], self.pending[certain:]
        return shown

    def flush(self) -> str:
        return self.release(0)
