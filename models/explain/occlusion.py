"""Attribution by occlusion: how much a goal's value falls when tokens are hidden. The network runs once for each hidden
window, as many texts together as fit in a piece."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from .explain_types import Attribution, Explanation, ExplanationRequest, InputTokens
from .head_scores import GoalReader
from .instrumented_network import InstrumentedNetwork

Doubles = NDArray[np.float64]


def occlusion(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """A goal's value minus its value with a window of rows replaced by the baseline's token (Zeiler and Fergus 2014,
    arXiv:1311.2901).

    Windows begin at every row. The difference is spread evenly over the rows of a window; a row's attribution is the
    mean over the windows that contain it, and 0 if none does.
    """
    reading, places = (yield from watched.read_goals(asked, piece)), list(windows(asked))
    [score] = yield from goal_values(watched, reading, [asked.text], piece)
    yield
    lost, times = np.zeros((len(asked.goals), asked.text.row_count)), np.zeros(asked.text.row_count)
    together = max(1, piece // asked.text.row_count)
    for first in range(0, len(places), together):
        some = places[first : first + together]
        values = yield from goal_values(watched, reading, [hide_rows(asked, place) for place in some], piece)
        for place, value in zip(some, values, strict=True):
            lost[:, place.start : place.stop] += (score - value)[:, None] / len(place)
            times[place.start : place.stop] += 1
        yield
    rows = (lost / times.clip(1)).astype(np.float32)
    pairs = zip(rows, score.tolist(), strict=True)
    return Explanation(attributions=tuple(Attribution(values, value, float("nan")) for values, value in pairs))


def goal_values(
    watched: InstrumentedNetwork, reading: GoalReader, texts: Sequence[InputTokens], piece: int
) -> Generator[None, None, Doubles]:
    """[N, G] the goals' values of N texts."""
    states = yield from watched.states_in_pieces(texts, piece)
    with torch.no_grad():
        values: Doubles = reading(states).double().cpu().numpy()
    return values


def windows(asked: ExplanationRequest) -> Iterator[range]:
    """The windows of rows that are hidden together: neighbours in one text without kept rows. A range shorter than a
    window is hidden whole."""
    read, rows = len(asked.text.source), asked.text.row_count
    for first, end in free_ranges(asked.kept_rows | {-1, rows}, read, rows):
        size = min(asked.window, end - first)
        yield from (range(start, start + size) for start in range(first, end - size + 1))


def free_ranges(walls: frozenset[int] | set[int], read: int, rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows between walls, divided at the border of source and target."""
    edges = sorted({(wall, wall + 1) for wall in walls if wall <= rows} | {(read, read)})
    for (_, first), (end, _) in pairwise(edges):
        if first < end:
            yield first, end


def hide_rows(asked: ExplanationRequest, hidden: range) -> InputTokens:
    """The text with the baseline's token in the hidden rows."""
    read = len(asked.text.source)
    rows = [*asked.text.source, *asked.text.tokens]
    rows[hidden.start : hidden.stop] = [asked.baseline] * len(hidden)
    return replace(asked.text, source=tuple(rows[:read]), tokens=tuple(rows[read:]))
