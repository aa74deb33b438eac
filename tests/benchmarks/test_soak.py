"""A short soak test, its control run with a leak, and proof that each of its checks can fail."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from benchmarks import mixture, soak
from benchmarks.mixture import Mixture, Names, Tally, same
from benchmarks.soak import Plan, Verdict, disagreement, shown
from benchmarks.vitals import ENDED, GAUGES, MIB, OUTCOMES, RECEIVED, Bounds, Page, Vitals, growth, leaks

# With so few requests the growth of warming up is still visible: one or two megabytes, which is 8 to 64 MiB in 10,000
# requests. The bound here is therefore 200 MiB; `make soak` sends tens of thousands of requests with a bound of 1 MiB.
SMALL = Plan(seconds=0, looks=8, bout=45, width=8, warm=220, bounds=Bounds(memory=200))
LEAK = 64 << 10  # bytes a request: 625 MiB in 10,000
AT_REST = "".join(f"{name} 0.0\n" for name in GAUGES)


@pytest.fixture
def soaked(tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path) -> Callable[[int], Verdict]:
    sources = {"generator": tiny_generator, "classifier": tiny_classifier, "embedder": tiny_embedder}

    def run(leak: int) -> Verdict:
        with soak.served(sources, soak.TINY, leak) as server:
            return soak.soak(server, Names(), SMALL)

    return run


def test_nothing_is_left_after_a_mixed_load(soaked: Callable[[int], Verdict]) -> None:
    verdict = soaked(0)
    assert not verdict.complaints
    assert verdict.tally.refused.keys() == {400, 401, 404, 413, 504}
    ends = {outcome: verdict.page.total(ENDED, outcome=outcome) for outcome in OUTCOMES}
    assert ends.pop("failed") == 0
    assert all(ends.values()), ends


@pytest.mark.thorough
def test_the_check_finds_a_leak(soaked: Callable[[int], Verdict]) -> None:
    verdict = soaked(LEAK)
    assert verdict.leaky
    assert len(verdict.complaints) == 1, verdict.complaints


def vitals(count: int = 12, **per_measurement: int) -> list[Vitals]:
    """`count` measurements, a hundred requests apart; each is larger than the one before by `per_measurement`."""
    start = {"memory": 200 * MIB, "descriptors": 9, "threads": 5}
    return [
        Vitals(100 * look, **{name: first + look * per_measurement.get(name, 0) for name, first in start.items()})
        for look in range(count)
    ]


def verdict(complaints: list[str], looks: list[Vitals]) -> Verdict:
    return Verdict(complaints, Tally(), looks, Page(AT_REST), 1.0)


def test_a_control_must_grow_by_its_leak() -> None:
    """Growth that a server without a leak also has while it warms up does not count."""
    warming, grown = vitals(memory=100 * 1024), vitals(memory=100 * (1024 + 384))
    settled = [replace(warming[-1], requests=look.requests + 1200) for look in vitals()]
    without_leak = verdict([], warming + settled)  # over the whole run its memory does not grow
    assert shown(verdict(["memory grew"], grown), without_leak, 384)
    assert not shown(verdict([], grown), without_leak, 384)
    assert not shown(verdict(["memory grew"], warming), without_leak, 384)


def test_growth_is_the_slope_over_requests() -> None:
    assert growth(vitals(memory=100 * 1024)) == pytest.approx(10_000 * 1024 / MIB)
    outlier = [*vitals(memory=1024)[:11], replace(vitals()[11], memory=300 * MIB)]
    assert growth(outlier) == pytest.approx(10_000 * 1024 / 100 / MIB, rel=0.1)


@pytest.mark.parametrize("what", ["memory", "descriptors", "threads"])
def test_what_grows_is_named(what: str) -> None:
    steady = list(leaks(vitals(), Bounds()))
    assert not steady
    (complaint,) = leaks(vitals(**{what: MIB if what == "memory" else 1}), Bounds())
    assert complaint.startswith(f"{what} grew by")


def test_gauges_that_are_missing_or_not_zero_at_rest_are_named() -> None:
    assert not list(Page(AT_REST).unrest())
    busy = Page(AT_REST.replace(f"{GAUGES[1]} 0.0", f'{GAUGES[1]}{{model="a"}} 0.0\n{GAUGES[1]}{{model="b"}} 2.0'))
    assert list(busy.unrest()) == [f"{GAUGES[1]} is 2 at rest"]
    assert list(Page(AT_REST.replace(f"{GAUGES[0]} 0.0\n", "")).unrest()) == [f"{GAUGES[0]} is not on the page"]


def page(received: int, **ended: int) -> Page:
    labels = 'model="chat",task="generate"'
    lines = [f'{ENDED}{{{labels},outcome="{outcome}"}} {count}' for outcome, count in ended.items()]
    return Page("\n".join([f"{RECEIVED}{{{labels}}} {received}", *lines, ""]))


def test_a_difference_between_received_and_ended_requests_is_named() -> None:
    assert not list(page(9, done=4, failed=1, aborted=1, rejected=2, expired=1).imbalance())
    assert list(page(9, done=8).imbalance()) == ["chat generate: 9 requests received, 8 ended"]
    assert list(page(9, done=8, lost=1).imbalance())


@pytest.mark.parametrize(
    ("ended", "complaint"),
    [
        ({"done": 9, "aborted": 1, "rejected": 2, "expired": 1}, ""),
        ({"done": 7, "aborted": 1, "rejected": 2, "expired": 1}, "7 requests done by the metrics, 8 answered"),
        ({"done": 9, "aborted": 3, "rejected": 2, "expired": 1}, "3 requests aborted by the metrics, 2 cut off"),
        ({"done": 9, "rejected": 1, "expired": 1}, "1 requests rejected by the metrics, 2 by the client"),
        ({"done": 9, "rejected": 2}, "0 requests expired by the metrics, 1 by the client"),
        ({"done": 9, "rejected": 2, "expired": 1, "failed": 1}, "1 requests failed by the metrics, 0 by the client"),
    ],
)
def test_counts_of_the_metrics_must_equal_those_of_the_client(ended: dict[str, int], complaint: str) -> None:
    tally = Tally(sent=13, answered=8, cut=2)
    tally.refused.update({400: 2, 504: 1})
    complaints = list(disagreement(page(0, **ended), tally))
    assert [one[: len(complaint)] for one in complaints] == ([complaint] if complaint else [])


def bout(monkeypatch: pytest.MonkeyPatch, corrupted: bool) -> Tally:
    """One round of requests to a stub server. With `corrupted` its answers change after the expected ones are known."""
    learned = False

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.headers["authorization"] == "Bearer wrong":
            return httpx.Response(401)
        await asyncio.sleep(0.002)
        body = {"choices": [{"text": "other" if learned and corrupted else "known"}]}
        if json.loads(request.content).get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, json=body)

    monkeypatch.setattr(
        mixture,
        "client",
        lambda url: httpx.AsyncClient(
            base_url=url, transport=httpx.MockTransport(answer), headers={"Authorization": "Bearer x"}
        ),
    )
    traffic = Mixture(Names())
    traffic.traps = [trap for trap in traffic.traps if trap.status == 401]
    asyncio.run(traffic.learn("http://127.0.0.1"))
    learned = True
    asyncio.run(traffic.bout("http://127.0.0.1", 300, 4))
    return traffic.tally


def test_a_wrong_answer_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = bout(monkeypatch, corrupted=False), bout(monkeypatch, corrupted=True)
    assert not right.wrong
    assert right.answered + right.cut + right.refused.total() == right.sent
    assert min(right.answered, right.cut, right.refused[401]) > 0
    assert "'other' instead of 'known'" in wrong.wrong[0]


def test_answers_are_compared_with_a_tolerance() -> None:
    assert same("a", "a")
    assert same([0.25, 0.75], [0.25001, 0.74999])
    assert not same("a", "b")
    assert not same([0.25, 0.75], [0.26, 0.74])
    assert not same([0.25], [0.25, 0.75])
