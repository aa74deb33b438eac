"""Attribution by occlusion: how much a goal's value falls when tokens are hidden. The network runs once for each hidden
window, as many texts together as fit in a piece."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from .explain_types import Attribution, Explanation, ExplanationRequest, InputTokens, Share
from .head_scores import GoalReader
from .instrumented_network import InstrumentedNetwork

Doubles = NDArray[np.float64]


def occlusion(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[Share, None, Explanation]:
    """A goal's value minus its value with a window of rows replaced by the baseline's token (Zeiler and Fergus 2014,
    arXiv:1311.2901).

    Windows begin at every row. The difference is spread evenly over the rows of a window; a row's attribution is the
    mean over the windows that contain it, and 0 if none does.
    """
    reader, places = (yield from network.read_goals(request, piece)), list(windows(request))
    [score] = yield from goal_values(network, reader, [request.text], piece)
    yield None
    totals, times = np.zeros((len(request.goals), request.text.row_count)), np.zeros(request.text.row_count)
    together = max(1, piece // request.text.row_count)
    for first in range(0, len(places), together):
        some = places[first : first + together]
        values = yield from goal_values(network, reader, [hide_rows(request, place) for place in some], piece)
        for place, value in zip(some, values, strict=True):
            totals[:, place.start : place.stop] += (score - value)[:, None] / len(place)
            times[place.start : place.stop] += 1
        yield (first + len(some)) / len(places)
    rows = (totals / times.clip(1)).astype(np.float32)
    pairs = zip(rows, score.tolist(), strict=True)
    return Explanation(attributions=tuple(Attribution(values, value, float("nan")) for values, value in pairs))


def goal_values(
    network: InstrumentedNetwork, reader: GoalReader, texts: Sequence[InputTokens], piece: int
) -> Generator[None, None, Doubles]:
    """[N, G] the goals' values of N texts."""
    states = yield from network.states_in_pieces(texts, piece)
    with torch.no_grad():
        values: Doubles = reader(states).double().cpu().numpy()
    return values


def windows(request: ExplanationRequest) -> Iterator[range]:
    """The windows of rows that are hidden together: neighbours in one text without kept rows. A range shorter than a
    window is hidden whole."""
    read, rows = len(request.text.source), request.text.row_count
    for first, end in free_ranges(request.kept_rows | {-1, rows}, read, rows):
        size = min(request.window, end - first)
        yield from (range(start, start + size) for start in range(first, end - size + 1))


def free_ranges(walls: frozenset[int] | set[int], read: int, rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows between walls, divided at the border of source and target."""
    edges = sorted({(wall, wall + 1) for wall in walls if wall <= rows} | {(read, read)})
    for (_, first), (end, _) in pairwise(edges):
        if first < end:
            yield first, end


def hide_rows(request: ExplanationRequest, hidden: range) -> InputTokens:
    """The text with the baseline's token in the hidden rows."""
    read = len(request.text.source)
    rows = [*request.text.source, *request.text.tokens]
    rows[hidden.start : hidden.stop] = [request.baseline] * len(hidden)
    return replace(request.text, source=tuple(rows[:read]), tokens=tuple(rows[read:]))
