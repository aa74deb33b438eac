"""The order in which free threads take work of several owners."""

from threading import Thread

from polyhead.service.concurrency.work_queue import WorkQueue


def taken(backlog: WorkQueue[str], count: int) -> list[str]:
    pieces = [backlog.get() for _ in range(count)]
    return [piece for piece in pieces if piece is not None]


def test_the_pieces_of_one_owner_do_not_delay_another_s_for_long() -> None:
    backlog: WorkQueue[str] = WorkQueue()
    for number in range(100):
        backlog.put(f"evil {number}", "evil", 250_000)
    taken(backlog, 10)
    for number in range(3):
        backlog.put(f"good {number}", "good", 300_000)
    order = taken(backlog, 12)
    assert [piece for piece in order if piece.startswith("good")] == ["good 0", "good 1", "good 2"]
    assert order.index("good 0") <= 2


def test_many_small_pieces_do_not_delay_another_owner_s_large_one() -> None:
    backlog: WorkQueue[str] = WorkQueue()
    for number in range(100):
        backlog.put(f"evil {number}", "evil", 1)
    taken(backlog, 10)
    backlog.put("good", "good", 300_000)
    assert "good" in taken(backlog, 4)


def test_a_small_piece_passes_large_ones_of_the_same_owner() -> None:
    backlog: WorkQueue[str] = WorkQueue()
    for number in range(100):
        backlog.put(f"large {number}", "", 250_000)
    taken(backlog, 11)
    backlog.put("small", "", 5)
    assert "small" in taken(backlog, 2)


def test_no_piece_waits_for_ever() -> None:
    """Small pieces keep coming, of its owner and of another."""
    backlog: WorkQueue[str] = WorkQueue()
    backlog.put("large", "a", 250_000)
    order = list[str]()
    for number in range(20):
        backlog.put(f"{number} of a", "a", 1)
        backlog.put(f"{number} of b", "b", 1)
        order += taken(backlog, 2)
    assert "large" in order


def test_an_owner_with_enough_work_under_way_is_passed_over_until_some_ends() -> None:
    backlog: WorkQueue[str] = WorkQueue(per_owner=2)
    for number in range(4):
        backlog.put(f"slow {number}", "slow", 1)
    backlog.put("other 0", "other", 1000)
    backlog.put("other 1", "other", 1000)
    assert sorted(taken(backlog, 4)) == ["other 0", "other 1", "slow 0", "slow 1"]
    found = list[str | None]()
    waiting = Thread(target=lambda: found.append(backlog.get()))
    waiting.start()
    backlog.end("slow")
    waiting.join()
    assert found == ["slow 2"]
    assert backlog.close() == ["slow 3"]


def test_cancelled_work_is_not_taken() -> None:
    backlog: WorkQueue[str] = WorkQueue()
    for name in ("first", "second", "third"):
        backlog.put(name, "", 1)
    backlog.discard("second")
    backlog.discard("nothing")
    assert taken(backlog, 2) == ["first", "third"]
    backlog.discard("first")


def test_closing_wakes_waiting_threads_and_returns_remaining_work() -> None:
    backlog: WorkQueue[str] = WorkQueue()
    found = list[str | None]()
    waiting = Thread(target=lambda: found.append(backlog.get()))
    waiting.start()
    assert backlog.close() == []
    waiting.join()
    backlog = WorkQueue()
    backlog.put("late", "", 1)
    assert (backlog.close(), backlog.get(), found) == (["late"], None, [None])
