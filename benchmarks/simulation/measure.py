"""Measure the time of a replica's step on one core of this machine and the costs of an ingress, and write costs.json.

    python -m benchmarks.simulation.measure [--seconds 10]

A real replica runs on its own core behind an ingress, with several requests of different lengths at once. A step is
measured from its beginning to the beginning of the next, so all other work of the process on its core (scheduling,
sampling, sending events) is included. Steps after which the replica may have waited for work are left out. The fit
minimises the relative error, without negative costs. Every third step is not used for the fit, and the printed error is
that of these steps.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
from scipy.optimize import nnls

from benchmarks.serving import machine
from benchmarks.simulation import costs
from benchmarks.simulation.costs import IngressCosts, Measured, StepCosts, Work, summed
from benchmarks.simulation.figures import share
from benchmarks.simulation.load import CACHE, asked, fleet
from benchmarks.simulation.traffic import Turn

TOGETHER = (1, 2, 4, 8, 16, 32, 64)  # requests at once
FIRST, LONGEST = 48, 1500  # tokens of a prompt, of those at the start and of those that follow
KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows
ALONE, MANY = 40, 16  # requests one after the other, and at once, to know what one costs
APART_S = 0.02  # two steps of a busy replica are not so far apart
Steps = Sequence[tuple[Work, float]]


def requests(together: int) -> Iterator[Turn]:
    """Lengths are spread evenly over their logarithm; so many fit in the cache together."""
    random, fits = Random(together), min(CACHE // together - 110, LONGEST)
    for number in count():
        prompt = round(8 * ((FIRST if number < together else fits) / 8) ** random.random())
        yield Turn((together << 12) + number, 0, 0, 0, prompt, round(4 * 25 ** random.random()), 0.0)


def steps(path: Path) -> Steps:
    """What was computed, and until when it kept its core."""
    told = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    found = []
    for (began, ended, *work), (following, *_) in pairwise(told):
        if following - ended < APART_S:
            found.append((Work(*work), following - began))
    return found


def features(work: Work) -> list[float]:
    """How much of each knot's time, then the other three."""
    hats = [float(np.interp(work.rows, KNOTS, np.eye(len(KNOTS))[place])) for place in range(len(KNOTS))]
    return [*hats, float(work.wanted), float(work.looked), float(work.sequences)]


def fit(found: Steps) -> StepCosts:
    """Least squares of the relative error, again and again: what was far off weighs less the next time."""
    took = np.array([seconds for _, seconds in found])
    matrix = np.array([features(work) for work, _ in found]) / took[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-9)
    weights = np.ones(len(found))
    for _ in range(5):
        answer, _ = nnls(matrix / scale * weights[:, None], weights)
        off = np.abs(matrix / scale @ answer - 1)
        weights = np.sqrt(0.1 / np.maximum(off, 0.1))
    *base, wanted, looked, sequence = (float(value) for value in answer / scale)
    base[0] = base[1]  # no step is empty
    return StepCosts(KNOTS, tuple(base), wanted, looked, sequence)


def error(step: StepCosts, found: Steps) -> str:
    told = [step.of(work.rows, work.wanted, work.looked, work.sequences) for work, _ in found]
    off = sorted(abs(one / took - 1) for one, (_, took) in zip(told, found, strict=True))
    whole = sum(told) / sum(took for _, took in found) - 1
    return (
        f"of {len(found)} steps not fitted: half within {share(off, 0.5):.1%}, "
        f"nine of ten within {share(off, 0.9):.1%}, their sum {whole:+.1%}"
    )


def replica(seconds: float) -> tuple[StepCosts, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        with fleet(1, "two-choices", path) as (ingress, _):
            for together in TOGETHER:
                asyncio.run(asked(ingress.port, requests(together), together, seconds))
        found = steps(Path(f"{path}0"))
    step = fit([one for place, one in enumerate(found) if place % 3])
    return step, error(step, found[::3])


def beside(step: StepCosts, seconds: float) -> float:
    """How much longer steps take of two replicas, a core each, that are both at work all the time."""
    with tempfile.TemporaryDirectory() as folder:
        with fleet(2, "two-choices", Path(folder) / "steps") as (ingress, _):
            for together in (2 * each for each in TOGETHER[1:]):
                asyncio.run(asked(ingress.port, requests(together), together, seconds))
        return slowed(Path(folder), step)


def slowed(folder: Path, known: StepCosts) -> float:
    """How much longer the steps told there took than they do by what is known of them."""
    found = [step for path in folder.iterdir() for step in steps(path)]
    works = [work for work, _ in found]
    return sum(took for _, took in found) / summed(works, known)


def short(answer: int, start: int) -> Iterator[Turn]:
    return (Turn(start + number, 0, 0, 0, 24, answer, 0.0) for number in count())


def ingress() -> IngressCosts:
    """Its processor time over requests of one token, and over answers; ways are what a wait is without a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        with fleet(1, "two-choices", path) as (process, _):
            waits = asyncio.run(asked(process.port, islice(short(1, 0), ALONE))).waits
            told = [json.loads(line) for line in Path(f"{path}0").read_text("ascii").splitlines()[-ALONE:]]
            spent = [process.cpu_s()]
            for turns in (islice(short(1, 1 << 12), 6 * MANY), islice(short(41, 1 << 13), 2 * MANY)):
                asyncio.run(asked(process.port, turns, MANY))
                spent.append(process.cpu_s())
    request = (spent[1] - spent[0]) / (6 * MANY)
    token = (spent[2] - spent[1] - 2 * MANY * request) / (2 * MANY * 40)
    ways = sorted(wait - (ended - began) - request for wait, (began, ended, *_) in zip(waits, told, strict=True))
    return IngressCosts(request, token, share(ways, 0.5) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for each number of requests at once")
    options = parser.parse_args()
    step, off = replica(options.seconds)
    print(step, off, flush=True)
    slower = beside(step, options.seconds)
    told = Measured(machine(), "SmolLM2-135M-Instruct, int8, one thread", off, step, slower, ingress())
    print(f"{told.beside:.3f} times as long beside another,", told.ingress)
    costs.write(told)


if __name__ == "__main__":
    main()
