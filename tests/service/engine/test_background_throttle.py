"""Background work stays within its share while other workers are busy, and gets all of the time while they are idle."""

from dataclasses import dataclass
from math import log
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyhead.service.engine import background_throttle as pace
from polyhead.service.engine.background_throttle import BACKGROUND_SHARE, BUSY_FRACTION, DECAY_S, BackgroundThrottle


@dataclass(eq=False)
class Party:
    is_background: bool


OTHERS, MINE = Party(False), Party(True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "perf_counter", clock)
    return clock


def simulate(
    clock: Clock, step: float, pause: float, piece: float, seconds: float, turns: BackgroundThrottle | None = None
) -> tuple[float, float]:
    """The time of the other workers and of the background work, if the others want a step after every pause, whether
    they get it or not."""
    turns, others, mine = turns or BackgroundThrottle(), 0.0, 0.0
    until, wanted = clock.now + seconds, clock.now
    while clock.now < until:
        wanting = [MINE, OTHERS] if clock.now >= wanted else [MINE]
        free = turns.select_runnable(wanting)
        if OTHERS in free:
            began, clock.now = clock.now, clock.now + step
            turns.record_turn(OTHERS, began, clock.now)
            others, wanted = others + step, clock.now + pause
        elif free:
            began, clock.now = clock.now, clock.now + piece
            turns.record_turn(MINE, began, clock.now)
            mine += piece
        else:
            assert turns.wait_s is not None
            clock.now = min(clock.now + turns.wait_s + 1e-6, wanted)
    return others, mine


def test_background_work_does_not_use_the_gap_between_two_steps(clock: Clock) -> None:
    simulate(clock, 0.040, 0.002, 0.1, 5 * DECAY_S)
    others, mine = simulate(clock, 0.040, 0.002, 0.1, 60.0)
    assert mine / (others + mine) == pytest.approx(BACKGROUND_SHARE, rel=0.25)


def test_background_work_alone_gets_all_of_the_time(clock: Clock) -> None:
    turns = BackgroundThrottle()
    for _ in range(5):
        assert turns.select_runnable([MINE]) == [MINE]
        turns.record_turn(MINE, clock.now, clock.now + 0.1)
        clock.now += 0.1
        assert turns.wait_s is None


@pytest.mark.parametrize("piece", [0.02, 0.3, 1.5])
def test_a_short_step_of_others_does_not_delay_background_work_that_is_alone_afterwards(
    clock: Clock, piece: float
) -> None:
    turns = BackgroundThrottle()
    turns.record_turn(OTHERS, clock.now, clock.now + 0.001)
    clock.now += 0.001
    for _ in range(100):
        assert turns.select_runnable([MINE]) == [MINE]
        turns.record_turn(MINE, clock.now, clock.now + piece)
        clock.now += piece


def test_long_pieces_stay_within_the_share_while_others_are_busy(clock: Clock) -> None:
    simulate(clock, 0.040, 0.002, 1.5, 5 * DECAY_S)
    others, mine = simulate(clock, 0.040, 0.002, 1.5, 300.0)
    assert mine / (others + mine) == pytest.approx(BACKGROUND_SHARE, rel=0.25)


def test_background_work_uses_the_time_that_others_leave(clock: Clock) -> None:
    others, mine = simulate(clock, 0.005, 0.095, 0.05, 30.0)
    assert mine > 5 * others


def state_after_both(clock: Clock) -> BackgroundThrottle:
    """The others were busy for long, then the background work had a tenth of a second."""
    turns = BackgroundThrottle()
    turns.record_turn(OTHERS, clock.now, clock.now + 5)
    turns.record_turn(MINE, clock.now + 5, clock.now + 5.1)
    clock.now += 5.1
    return turns


def test_other_workers_are_never_delayed(clock: Clock) -> None:
    turns = state_after_both(clock)
    assert turns.select_runnable([MINE, OTHERS]) == [OTHERS]
    assert turns.wait_s == pytest.approx(DECAY_S * log(1 / BUSY_FRACTION), rel=0.01), "until the others count as idle"
    clock.now += 10 * DECAY_S  # they were idle
    assert turns.select_runnable([MINE]) == [MINE]


def test_without_background_work_there_is_no_wait(clock: Clock) -> None:
    turns = state_after_both(clock)
    assert turns.select_runnable([OTHERS]) == [OTHERS]
    assert turns.wait_s is None


# Any machine, by a simulated clock


@given(pieces=st.lists(st.floats(1e-4, 60.0), min_size=1, max_size=50), begun=st.floats(0.0, 10.0))
def test_on_an_idle_machine_background_work_never_sleeps(pieces: list[float], begun: float) -> None:
    """Whatever the pieces take, and although another worker took a step before, long enough ago."""
    clock = Clock()
    with mock.patch.object(pace, "perf_counter", clock):
        turns = BackgroundThrottle()
        turns.record_turn(OTHERS, clock.now, clock.now + begun)
        clock.now += begun + 5 * DECAY_S
        for piece in pieces:
            assert turns.select_runnable([MINE]) == [MINE]
            assert turns.wait_s is None
            turns.record_turn(MINE, clock.now, clock.now + piece)
            clock.now += piece


@settings(max_examples=25)
@example(step=0.0078125, rest=0.125, piece=1.0)
@given(step=st.floats(0.005, 0.2), rest=st.floats(0.0, 0.2), piece=st.floats(0.01, 2.0))
def test_busy_workers_keep_their_share(step: float, rest: float, piece: float) -> None:
    """`rest`: the pause after each step, as a part of it."""
    clock = Clock()
    with mock.patch.object(pace, "perf_counter", clock):
        turns = BackgroundThrottle()
        simulate(clock, step, rest * step, piece, 60 * max(piece, step), turns)
        others, mine = simulate(clock, step, rest * step, piece, 200 * max(piece, step), turns)
    # After idle time, the first 70 ms of foreground work are not held against background work yet.
    assert mine / (others + mine) < 2 * BACKGROUND_SHARE
