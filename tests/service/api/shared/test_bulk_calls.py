"""Bodies of lines: how they are split, and how long a line waits for room."""

import asyncio
from typing import Any

import pytest

from polyhead.service.api.access.admission import Admission, AdmissionLimits
from polyhead.service.api.shared import bulk_calls
from polyhead.service.api.shared.bulk_calls import (
    MAX_IDLE_S,
    MAX_PAUSE_S,
    MAX_WAIT_S,
    SHORT_WAIT_S,
    LineWait,
    Patience,
    split_lines,
)
from tests.support.scripted import FakeEngine


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"\n \r\n", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b'{"a": 1}\r\n\n "b" \nc', [(1, b'{"a": 1}'), (3, b'"b"'), (4, b"c")]),
    ],
    ids=["empty", "blank", "one", "with its end", "several"],
)
def test_empty_lines_are_counted_and_left_out(body: bytes, lines: list[tuple[int, bytes]]) -> None:
    given = bytearray(body)
    assert list(split_lines(given)) == lines
    assert not given, "what is read is kept no more"


class Pauses:
    """Pauses of lines that take no time. `during` is called in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.engine = FakeEngine()
        self.admission = Admission(AdmissionLimits(9, 1 << 20), self.engine)
        self.patience = Patience(self.admission)
        self.during: Any = lambda: None
        monkeypatch.setattr(bulk_calls.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.during()

    def of_one_line(self) -> float:
        """The seconds that one line waits in vain."""
        began = self.seconds

        async def run() -> None:
            wait = LineWait(self.patience)
            while not wait.is_over():
                await wait.pause()

        asyncio.run(run())
        return self.seconds - began


def test_a_line_waits_a_while_for_a_server_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)
    assert MAX_IDLE_S <= pauses.of_one_line() < MAX_IDLE_S + MAX_PAUSE_S
    for _ in range(3):
        assert SHORT_WAIT_S <= pauses.of_one_line() < SHORT_WAIT_S + MAX_PAUSE_S
    pauses.patience.note_answer()
    assert pauses.of_one_line() >= MAX_IDLE_S


def test_a_line_waits_longer_while_requests_make_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)
    pauses.engine.tokens = 9
    assert MAX_WAIT_S <= pauses.of_one_line() < MAX_WAIT_S + MAX_PAUSE_S, "they are computed"
    pauses.engine.tokens = 0
    pauses.patience.note_answer()
    pauses.during = lambda: pauses.admission.add_submitted("", 1)
    assert MAX_WAIT_S <= pauses.of_one_line() < MAX_WAIT_S + MAX_PAUSE_S, "they are answered between two looks"


def test_a_line_waits_as_long_as_others_of_its_body_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(monkeypatch)

    def answer_some() -> None:
        if pauses.seconds < 10 * MAX_WAIT_S:
            pauses.patience.note_answer()

    pauses.during = answer_some
    assert pauses.of_one_line() >= 10 * MAX_WAIT_S + MAX_IDLE_S - MAX_PAUSE_S
