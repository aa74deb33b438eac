"""Send the same requests to real replicas and to simulated ones, and print the errors of the simulation.

    python -m benchmarks.simulation.replay [--replicas 1] [--rate 3] [--seconds 120] [--seed 1] [--policy affinity]

SmolLM2 in int8, one thread and one core for each replica; the ingress and the client share the first core. Prompts are
numbers used as tokens, and answers have the lengths of the trace. The text of an answer differs from the trace's, so
the next turn's prompt contains the trace's numbers, here and in the simulation.
"""

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.simulation import costs
from benchmarks.simulation.costs import StepCosts, times
from benchmarks.simulation.figures import share
from benchmarks.simulation.fleet import Fleet, Plan
from benchmarks.simulation.load import Heard, fleet, replayed
from benchmarks.simulation.measure import slowed
from benchmarks.simulation.traffic import CONVERSATION, Traffic

SHAPE = replace(CONVERSATION, scale=1 / 32)


def simulated(plan: Plan) -> Heard:
    run = Fleet(plan)
    log = run.run()
    tokens = len(log.waits) + len(log.gaps)
    return Heard(list(log.waits), list(log.gaps), log.prompts, log.cached, log.ended, tokens, run.last)


def figures(heard: Heard) -> dict[str, float]:
    waits, gaps = sorted(heard.waits), sorted(heard.gaps)
    return {
        "requests": heard.ended,
        "throughput, tokens/s": heard.tokens / heard.last,
        "found stored": heard.cached / heard.prompts,
        "first token, mean, ms": fmean(waits) * 1e3,
        "first token, p50, ms": share(waits, 0.5) * 1e3,
        "first token, p95, ms": share(waits, 0.95) * 1e3,
        "token to token, mean, ms": fmean(gaps) * 1e3,
        "token to token, p50, ms": share(gaps, 0.5) * 1e3,
        "token to token, p90, ms": share(gaps, 0.9) * 1e3,
        "token to token, p95, ms": share(gaps, 0.95) * 1e3,
        "token to token, p99, ms": share(gaps, 0.99) * 1e3,
    }


def table(*runs: Heard) -> str:
    """What was measured, then what was simulated and how far that is off."""
    real, *told = map(figures, runs)
    lines = []
    for name, value in real.items():
        off = [f" {each[name]:.4g} | {each[name] / value - 1 if value else 0.0:+.1%} |" for each in told]
        lines.append(f"| {name} | {value:.4g} |" + "".join(off))
    return "\n".join(lines)


def run(options: argparse.Namespace, traffic: Traffic, known: StepCosts) -> tuple[Heard, float]:
    with tempfile.TemporaryDirectory() as folder:
        with fleet(options.replicas, options.policy, Path(folder) / "steps") as (ingress, replicas):
            heard = asyncio.run(replayed(ingress.port, traffic))
            print("processor, s:", ingress.cpu_s(), [each.cpu_s() for each in replicas])
        return heard, slowed(Path(folder), known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second for each replica")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="affinity")
    options, known = parser.parse_args(), costs.read()
    step = known.step if options.replicas == 1 else times(known.step, known.beside)
    traffic = Traffic(SHAPE, options.rate * options.replicas, options.seconds, options.seed, kept=False)
    real, slower = run(options, traffic, step)
    plan = Plan(traffic, step, known.ingress, options.replicas, policy=options.policy, bounded=True)
    print(f"steps took {slower:.3f} times what they did when costs were measured; simulated without that, and with it:")
    print(table(real, simulated(plan), simulated(replace(plan, step=times(step, slower)))))


if __name__ == "__main__":
    main()
