"""The order of entries in a fair queue, and their deadlines."""

from polyhead.service.concurrency.fair_queue import Deadlines, FairQueue


def test_the_queue_goes_by_priority_then_owner_then_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for entry, owner, priority in (("a1", "a", 0), ("a2", "a", 0), ("b1", "b", 0), ("c1", "c", 9), ("a0", "a", -1)):
        queue.add(entry, owner, priority)
    assert len(queue) == 5
    order = []
    while (entry := queue.peek()) is not None:
        assert entry in queue
        queue.remove(entry)
        queue.charge(entry[0], 10)
        order.append(entry)
    assert order == ["c1", "a1", "b1", "a2", "a0"]
    assert not len(queue)


def test_an_entry_that_is_put_back_is_the_next_of_its_owner() -> None:
    queue: FairQueue[str] = FairQueue()
    for entry in ("a", "b", "c"):
        queue.add(entry, "", 0)
    queue.remove("b")
    queue.put_back("b", "", 0)
    assert queue.peek() == "b"
    assert set(queue) == {"a", "b", "c"}


def test_deadlines() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for entry, until in (("soon", 1.0), ("late", 5.0), ("never", float("inf"))):
        deadlines.add(entry, until)
    assert len(deadlines) == 2
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(1.0) == deadlines.expired(1.5) == ["soon"]
    deadlines.remove("soon")
    deadlines.remove("never")
    assert deadlines.expired(4.0) == []
    assert deadlines.expired(6.0) == ["late"]
