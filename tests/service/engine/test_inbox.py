"""The inbox of the engine: owners do not wait for each other, and each of them keeps its order."""

import weakref
from functools import partial

from polyhead.service.engine.inbox import INBOX_LIMIT, Inbox


def run_turn(inbox: Inbox) -> None:
    for function in inbox.take_turn():
        function()


def test_one_request_is_accepted_before_the_next_step_whatever_another_owner_has_sent() -> None:
    inbox, run = Inbox(), list[tuple[str, int]]()
    for number in range(20 * INBOX_LIMIT):
        inbox.send(partial(run.append, ("many", number)), "many")
    inbox.send(partial(run.append, ("one", 0)), "one")
    run_turn(inbox)
    assert ("one", 0) in run
    assert [number for owner, number in run if owner == "many"] == list(range(INBOX_LIMIT))
    while inbox:
        run_turn(inbox)
    assert [number for owner, number in run if owner == "many"] == list(range(20 * INBOX_LIMIT))


def test_work_counts_towards_the_limit() -> None:
    inbox, run = Inbox(), list[int]()
    for number in range(5):
        inbox.send(partial(run.append, number), "a", work=INBOX_LIMIT // 2)
    run_turn(inbox)
    assert run == [0, 1]


def test_what_concerns_all_owners_waits_for_no_line_and_lets_none_wait() -> None:
    inbox, run = Inbox(), list[str]()
    for number in range(2 * INBOX_LIMIT):
        inbox.send(partial(run.append, f"before {number}"), "a")
    inbox.send_for_all(partial(run.append, "worker"))
    inbox.send_for_all(partial(run.append, "another"))
    inbox.send(partial(run.append, "after"), "b")
    run_turn(inbox)
    assert run[:2] == ["worker", "another"]
    assert "after" in run
    assert len(run) == 3 + INBOX_LIMIT
    run_turn(inbox)
    assert run[-1] == f"before {2 * INBOX_LIMIT - 1}"
    assert not inbox


def test_what_ends_a_subject_runs_after_what_was_sent_about_it_alone() -> None:
    inbox, run = Inbox(), list[tuple[str, int]]()
    for number in range(4 * INBOX_LIMIT):
        inbox.send(partial(run.append, ("old", number)), "ab"[number % 2], subject="old")
        inbox.send(partial(run.append, ("kept", number)), "a", subject="kept")
    inbox.send_for_all(partial(run.append, ("ended", 0)), ["old"])
    inbox.send(partial(run.append, ("new", 0)), "b", subject="new")
    for turn in range(1, 5):
        run_turn(inbox)
        assert sum(what == "old" for what, _ in run) == turn * INBOX_LIMIT, "no more in one turn than of an owner"
        assert sum(what == "kept" for what, _ in run) == turn * INBOX_LIMIT, "others go on"
        assert ("new", 0) in run
    assert ("ended", 0) not in run
    run_turn(inbox)
    assert ("ended", 0) in run
    assert not inbox
    for owner in (0, 1):
        own = [number for what, number in run if what == "old" and number % 2 == owner]
        assert own == sorted(own), "those of an owner keep their order"
    assert [number for what, number in run if what == "kept"] == list(range(4 * INBOX_LIMIT))


def test_what_ends_several_subjects_runs_after_what_ends_one_of_them() -> None:
    inbox, run = Inbox(), list[str]()
    for number in range(INBOX_LIMIT + 1):
        inbox.send(partial(run.append, str(number)), "a", subject="adapter")
    inbox.send_for_all(partial(run.append, "adapter"), ["adapter"])
    inbox.send_for_all(partial(run.append, "worker"), ["adapter", "base"])
    while inbox:
        run_turn(inbox)
    assert run[-2:] == ["adapter", "worker"]


def test_a_function_that_has_run_is_kept_nowhere() -> None:
    """The removal of a worker holds its model, whose memory the next function returns to the system."""

    class Removal:
        def __call__(self) -> None:
            pass

    inbox, removal = Inbox(), Removal()
    left = weakref.ref(removal)
    inbox.send(removal, "a", subject="worker")
    inbox.send_for_all(removal, ["worker"])
    del removal
    turn = inbox.take_turn()
    for _ in range(2):
        next(turn)()
    assert left() is None


def test_a_function_may_take_a_turn_itself() -> None:
    """A load lets others step between its parts."""
    inbox, run = Inbox(), list[str]()

    def load() -> None:
        inbox.send(partial(run.append, "meanwhile"), "a")
        run_turn(inbox)
        run.append("loaded")

    inbox.send_for_all(load)
    inbox.send(partial(run.append, "later"), "b")
    run_turn(inbox)
    assert sorted(run[:2]) == ["later", "meanwhile"]
    assert (run[2:], bool(inbox)) == (["loaded"], False)
