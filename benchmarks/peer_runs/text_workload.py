"""The texts that every peer reads, and the measurements of its answers.

Independent of peers and of tokens: a run passes `answer`, which takes a list of texts as the peer's users would. Needs
only the standard library, because it runs inside every peer's own environment.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import TypeVar

from benchmarks.peer_runs.workload import WORK, Work, times

TEXTS = Path(__file__).parents[2] / ".bench" / "models" / "texts.json"
EXACT, MIXED, MANY = (16, 64, 256), "mixed", "many"  # tokens, special ones included; documents as they were written
SHORTER = EXACT[:2]
WHOLE = "whole"  # the mixed ones in one call, which who sorts by length can make the most of
LONGEST = 256  # tokens of a document: the model was made for no more
BATCH = 32
TEXTS_EACH, MIXED_TEXTS = 512, 256  # of which the mixed are all read by everybody: no two batches are alike
SECONDS = 2.0  # of one figure, at most, or three calls
SAMPLE = 16  # texts of each length whose answers are compared
Answer = Callable[[list[str]], Sequence[object]]
T = TypeVar("T")


def texts() -> dict[str, list[str]]:
    """By length."""
    read: dict[str, list[str]] = json.loads(TEXTS.read_text())
    return read


def reading(answer: Answer, work: Work = WORK["full"], pid: int | str = "self") -> dict[str, object]:
    """Texts a second in batches, milliseconds of a text alone, memory of the process that computes, some answers."""
    given, figures = texts(), dict[str, object]()
    for name in (*map(str, EXACT), MIXED) if work.has_long else map(str, SHORTER):
        some = given[name]
        batches = [some[first : first + BATCH] for first in range(0, len(some), BATCH)]
        taken = times(answer, batches, math.inf if name == MIXED else SECONDS)
        figures[f"texts/s {name}"] = BATCH * len(taken) / sum(taken)
        figures |= spans(name, times(answer, [[text] for text in some], SECONDS))
    sample = [text for name in (*map(str, EXACT), MIXED) for text in given[name][:SAMPLE]]
    figures |= {**memory(pid), "answers": answer(sample)}
    if not work.has_long:
        return figures
    began = perf_counter()
    answer(given[MIXED])
    return {**figures, f"texts/s {WHOLE}": len(given[MIXED]) / (perf_counter() - began)}


def spans(name: str, taken: Sequence[float]) -> dict[str, object]:
    """Milliseconds of calls."""
    return {
        f"p50 {name}": statistics.median(taken) * 1000,
        f"p99 {name}": statistics.quantiles(taken, n=100)[98] * 1000,
    }


def memory(pid: int | str) -> dict[str, object]:
    """Resident, in MB: now, and at most so far (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {name: int(fields[field].split()[0]) * 1024 / 1e6 for name, field in (("MB", "VmRSS"), ("MB peak", "VmHWM"))}


def loading(load: Callable[[], T]) -> tuple[T, dict[str, object]]:
    """What `load` returns, and what it took: seconds, processor seconds of all threads, the most memory until then."""
    began, computed = perf_counter(), process_time()
    loaded = load()
    taken = {"load": perf_counter() - began, "load processor": process_time() - computed}
    return loaded, {**taken, "load MB peak": memory("self")["MB peak"]}
