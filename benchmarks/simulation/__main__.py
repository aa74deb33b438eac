"""The command of this package; see its docstring."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.simulation import costs
from benchmarks.simulation.drawing import draw
from benchmarks.simulation.runs import STUDIES, Line, Studies

KEPT = Path(__file__).parent.parent.parent / ".bench" / "simulation.json"


def lines() -> list[Line]:
    return [Line(**line) for line in json.loads(KEPT.read_text("utf-8"))] if KEPT.exists() else []


def keep(study: str, found: list[Line]) -> None:
    """In place of what it found before."""
    others = [line for line in lines() if line.study != study]
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps([asdict(line) for line in others + found]), "utf-8")


def told(line: Line) -> str:
    case = " ".join(f"{name}={value}" for name, value in line.case.items())
    rest = " ".join(f"{name}={value:.3g}" for name, value in line.figures.items() if not isinstance(value, list))
    return f"{line.study}: {case}: {rest}"


def run(names: list[str], short: float) -> Iterator[Line]:
    studies = Studies(costs.read(), short)
    for name in names:
        found = []
        for line in STUDIES[name](studies):
            found.append(line)
            yield line
        keep(name, found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate a fleet of replicas; see docs/scaling.md.")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--short", type=float, default=1.0, help="part of the time that is simulated, for a first look")
    parser.add_argument("--plots", type=Path, help="draw what was found, the last time it was looked for, there")
    options = parser.parse_args()
    if options.plots is not None:
        if not (found := lines()):
            parser.error("--plots: nothing was simulated yet")
        draw(found, options.plots)
        return
    for line in run(options.only, options.short):
        print(told(line), flush=True)


if __name__ == "__main__":
    main()
