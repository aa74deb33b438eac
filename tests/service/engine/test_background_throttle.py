"""Who takes what others leave stays within its share where others are busy, and has all of it where they are not."""

from dataclasses import dataclass

import pytest

from polyhead.service.engine import background_throttle as pace
from polyhead.service.engine.background_throttle import BACKGROUND_SHARE, DECAY_S, BackgroundThrottle


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


def live(clock: Clock, step: float, pause: float, piece: float, seconds: float) -> tuple[float, float]:
    """Time that others and the patient one had, where others want a step after every pause, if they get it or not."""
    turns, others, mine = BackgroundThrottle(), 0.0, 0.0
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


def test_a_moment_between_two_steps_is_not_taken(clock: Clock) -> None:
    live(clock, 0.040, 0.002, 0.1, 5 * DECAY_S)
    others, mine = live(clock, 0.040, 0.002, 0.1, 60.0)
    assert mine / (others + mine) == pytest.approx(BACKGROUND_SHARE, rel=0.25)


def test_one_that_is_alone_has_all_of_the_time(clock: Clock) -> None:
    turns = BackgroundThrottle()
    for _ in range(5):
        assert turns.select_runnable([MINE]) == [MINE]
        turns.record_turn(MINE, clock.now, clock.now + 0.1)
        clock.now += 0.1
        assert turns.wait_s is None


@pytest.mark.parametrize("piece", [0.02, 0.3, 1.5])
def test_a_short_step_of_others_does_not_hold_back_who_is_alone_after_it(clock: Clock, piece: float) -> None:
    turns = BackgroundThrottle()
    turns.record_turn(OTHERS, clock.now, clock.now + 0.001)
    clock.now += 0.001
    for _ in range(100):
        assert turns.select_runnable([MINE]) == [MINE]
        turns.record_turn(MINE, clock.now, clock.now + piece)
        clock.now += piece


def test_long_pieces_stay_within_the_share_where_others_are_busy(clock: Clock) -> None:
    live(clock, 0.040, 0.002, 1.5, 5 * DECAY_S)
    others, mine = live(clock, 0.040, 0.002, 1.5, 300.0)
    assert mine / (others + mine) == pytest.approx(BACKGROUND_SHARE, rel=0.25)


def test_where_others_want_little_the_rest_is_taken(clock: Clock) -> None:
    others, mine = live(clock, 0.005, 0.095, 0.05, 30.0)
    assert mine > 5 * others


def after_both(clock: Clock) -> BackgroundThrottle:
    """Others were busy for long, then the patient one had a tenth of a second."""
    turns = BackgroundThrottle()
    turns.record_turn(OTHERS, clock.now, clock.now + 5)
    turns.record_turn(MINE, clock.now + 5, clock.now + 5.1)
    clock.now += 5.1
    return turns


def test_others_are_never_held(clock: Clock) -> None:
    turns = after_both(clock)
    assert turns.select_runnable([MINE, OTHERS]) == [OTHERS]
    assert turns.wait_s == pytest.approx(0.1 * (1 / BACKGROUND_SHARE - 1))
    clock.now += 10 * DECAY_S  # they have been quiet
    assert turns.select_runnable([MINE]) == [MINE]


def test_nobody_is_waited_for_where_nobody_patient_wants_anything(clock: Clock) -> None:
    turns = after_both(clock)
    assert turns.select_runnable([OTHERS]) == [OTHERS]
    assert turns.wait_s is None
