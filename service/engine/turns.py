"""Whose turn it is on one engine thread.

Knows nothing of what a turn does, only what it cost.  The one idea is virtual time (start-time fair queueing, Goyal et
al. 1996): every worker has a clock of the seconds it used, and the busy one furthest behind goes.  One that was idle
rejoins at the time of those that worked, so that resting earns no credit.
"""

from service.engine.worker import Worker


class Turns:
    """Workers and the seconds each has used."""

    def __init__(self) -> None:
        self._used: dict[Worker, float] = {}
        self._now = 0.0  # the clock of the worker that went last

    def add(self, worker: Worker) -> None:
        self._used[worker] = self._now

    def remove(self, worker: Worker) -> None:
        self._used.pop(worker, None)

    def rejoin(self, worker: Worker) -> None:
        """To be called when an idle worker gets something to do."""
        self._used[worker] = max(self._used[worker], self._now)

    def charge(self, worker: Worker, seconds: float) -> None:
        self._used[worker] += seconds

    def next(self) -> Worker | None:
        """The busy worker furthest behind; None if all are idle."""
        worker = min((worker for worker in self._used if worker.busy), key=self._used.__getitem__, default=None)
        if worker is not None:
            self._now = self._used[worker]
        return worker
