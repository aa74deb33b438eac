"""A soak: mixed load for a given time, with disconnecting clients and invalid requests; then nothing of it may be left.

    python -m benchmarks.soak [--minutes 5] [--pause 0] [--real] [a flag of `polyhead serve` ...]

Between periods of load the server is checked while it is idle. Its gauges must be zero. The counts of its metrics page
must be complete: received = done + failed + aborted + rejected + expired; and they must equal the client's own counts.
Memory, descriptors and threads must not grow. Every answer must equal the answer of the same request alone.

Then the check itself is tested: a server that leaks a few hundred bytes a request (benchmarks.leaking) is checked in
the same way, for as many requests as that takes. The soak fails if that server passes. It also fails if its growth,
beyond that of the correct server over the same requests, is not the leak: growth during warm-up proves nothing. A leak
of large pieces is visible later, because it first fills memory that loading freed in the heap, about 12 MiB here.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks.mixture import KEY, Mixture, Names, Tally
from benchmarks.serving import Running, machine, serve
from benchmarks.vitals import ENDED, MIB, OUTCOMES, PER, Bounds, Page, Vitals, growth, leaks
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart
from tests.support import checkpoints

LEAK = 384  # bytes a request that the control keeps: 3.7 MiB in 10,000
PATIENCE_S = 10.0  # for the server to come to rest
POLL_S = 0.05
TINY = ("--threads", "1", "--cache-tokens", "768", "--max-running", "8", "--prefill-chunk", "16")


@dataclass(frozen=True)
class Plan:
    """How long, in bouts of how many requests, by how many clients at once.

    The first `warm` requests only warm it up; at least so many `looks` follow, however long that takes.
    """

    seconds: float = 300.0
    looks: int = 12
    bout: int = 400
    width: int = 16
    warm: int = 5000
    pause: float = 0.0  # seconds between bouts, for a machine that others use
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True)
class Verdict:
    """What came of a soak; nothing to complain of is a pass."""

    complaints: list[str]
    tally: Tally
    vitals: list[Vitals]  # once warm
    page: Page
    seconds: float

    @property
    def leaky(self) -> bool:
        return any(complaint.startswith("memory") for complaint in self.complaints)


def soak(server: Running, names: Names, plan: Plan) -> Verdict:
    """The load of `plan` on `server`, judged."""
    mixture = Mixture(names)
    asyncio.run(mixture.learn(server.url))
    began, page = time.monotonic(), rest(server)
    complaints: list[str] = []
    looks: list[Vitals] = []
    while (time.monotonic() - began < plan.seconds or len(looks) < plan.looks) and not complaints:
        asyncio.run(mixture.bout(server.url, plan.bout, plan.width))
        time.sleep(plan.pause)
        page = rest(server)
        if mixture.tally.sent > plan.warm:
            looks.append(Vitals.of(server.pid, mixture.tally.sent))
        complaints += [*page.unrest(), *page.imbalance(), *disagreement(page, mixture.tally), *mixture.tally.wrong]
    complaints += [*leaks(looks, plan.bounds), *unwell(server)]
    return Verdict(complaints, mixture.tally, looks, page, time.monotonic() - began)


def rest(server: Running) -> Page:
    """The metrics page once the server has come to rest, or when it should have."""
    until = time.monotonic() + PATIENCE_S
    while True:
        page = Page(httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text)
        if time.monotonic() >= until or not [*page.unrest(), *page.imbalance()]:
            return page
        time.sleep(POLL_S)


def disagreement(page: Page, tally: Tally) -> Iterator[str]:
    """Where the server's books are not the client's.  What the client cut off may have ended in any way but badly."""
    counted = {outcome: page.total(ENDED, outcome=outcome) for outcome in OUTCOMES}
    expired = tally.refused[504]
    exact = {"failed": 0, "expired": expired, "rejected": tally.refused.total() - expired}
    for outcome, expected in exact.items():
        if counted[outcome] != expected:
            yield f"{counted[outcome]:g} requests {outcome} by the metrics, {expected} by the client"
    if not tally.answered <= counted["done"] <= tally.answered + tally.cut:
        yield f"{counted['done']:g} requests done by the metrics, {tally.answered} answered and {tally.cut} cut off"
    if counted["aborted"] > tally.cut:
        yield f"{counted['aborted']:g} requests aborted by the metrics, {tally.cut} cut off by the client"


def unwell(server: Running) -> Iterator[str]:
    """The server's metrics and log at the end."""
    for probe in ("livez", "readyz"):
        answer = httpx.get(f"{server.url}/{probe}", timeout=PATIENCE_S)
        if answer.status_code != 200:
            yield f"/{probe} is {answer.status_code}: {answer.text[:200]}"
    if log := server.log().strip():
        yield f"the log has: {log[:1000]}"


@contextlib.contextmanager
def served(sources: Mapping[str, Path | str], flags: Sequence[str], leak: int = 0) -> Iterator[Running]:
    """A server of these models that logs errors only; it leaks so many bytes a request."""
    named = [f"{name}={source}" for name, source in sources.items()]
    program = ("-m", "benchmarks.leaking", str(leak)) if leak else ("-m", "polyhead")
    with serve(*named, "--api-key", KEY, "--log-level", "error", *flags, program=program) as server:
        yield server


def tiny(folder: Path) -> Mapping[str, Path | str]:
    """Three small checkpoints, made in `folder`, under the names that `Names` has of itself."""
    made = (checkpoints.generator, checkpoints.classifier, checkpoints.embedder)
    return {make.__name__: make(folder / make.__name__) for make in made}


def shown(leaking: Verdict, honest: Verdict, leak: int) -> bool:
    """Whether the check failed `leaking` for its leak of so many bytes a request, at least half of which it saw."""
    last = max((look.requests for look in leaking.vitals), default=0)
    same = [look for look in honest.vitals if look.requests <= last]
    return leaking.leaky and growth(leaking.vitals) - growth(same) > leak * PER / MIB / 2


def show(name: str, verdict: Verdict) -> None:
    tally, looks = verdict.tally, verdict.vitals
    ends = ", ".join(f"{verdict.page.total(ENDED, outcome=outcome):.0f} {outcome}" for outcome in OUTCOMES)
    print(f"\n{name}: {tally.sent} HTTP requests in {verdict.seconds:.0f} s, looked at {len(looks)} times once warm")
    print(f"  by the metrics   {ends}")
    for first, last in zip(looks[:1], looks[-1:], strict=True):
        rate = f"{growth(looks):+.2f} MiB in {PER:,} requests"
        print(f"  memory           {first.memory / MIB:.1f} to {last.memory / MIB:.1f} MiB, {rate}")
        print(
            f"  descriptors      {first.descriptors} to {last.descriptors}, threads {first.threads} to {last.threads}"
        )
    for complaint in verdict.complaints:
        print(f"  WRONG            {complaint}")


def run(sources: Mapping[str, Path | str], names: Names, plan: Plan, flags: Sequence[str]) -> int:
    """The soak and its control; the exit status."""
    with served(sources, flags) as server:
        honest = soak(server, names, plan)
    show("soak", honest)
    with served(sources, flags, LEAK) as server:
        leaking = soak(server, names, replace(plan, seconds=0, pause=0))
    show(f"control, which leaks {LEAK} bytes a request and must be found out", leaking)
    proven = shown(leaking, honest, LEAK)
    if not proven:
        print("\nthe check proves nothing: it did not see the leak of the control")
    passed = proven and not honest.complaints
    print("\npassed" if passed else "\nfailed")
    return 0 if passed else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between bouts, for a machine that others use")
    parser.add_argument("--real", action="store_true", help="the quick-start models instead of tiny ones")
    options, flags = parser.parse_known_args()
    print(machine())
    plan = Plan(seconds=60 * options.minutes, pause=options.pause)
    if options.real:
        folder = settings.default_model_dir()
        quickstart.fetch_all(folder)
        raise SystemExit(run(dict(quickstart.sources(folder)), Names("smollm2", "sentiment", "minilm"), plan, flags))
    with tempfile.TemporaryDirectory() as made:
        raise SystemExit(run(tiny(Path(made)), Names(), plan, [*TINY, *flags]))


if __name__ == "__main__":
    main()
