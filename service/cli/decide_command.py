"""`polyhead decide`: asks a server questions about each row of a file, and writes a line with the answers for each.

Rows are sent as JSON lines, several in a call, and their answers are written in order. A row that the server has no
room for is sent again. An output file can be continued after an interrupt: rows that have a line in it are not asked
again.
"""

import asyncio
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
import orjson

from polyhead.models.core.errors import ModelError

from ..core.logs import escape_for_terminal
from .client import TIMEOUT, expected_form, open_async_client
from .decision_client import DecisionClient, Line, RowCalls
from .decision_rows import (
    STANDARD_INPUT,
    ReadPosition,
    read_answers,
    read_decision_rows,
    read_questions_file,
    repair_answers,
)
from .decision_summary import DecisionSummary

TERMINAL_PAUSE_S, FILE_PAUSE_S = 0.2, 10.0  # between two lines of progress
ROWS_PER_CALL = 16  # at most
ROWS_AHEAD = 8  # rows that may be answered before the one that is written next, for each row that is asked at a time


@dataclass(frozen=True)
class DecideArguments:
    """The arguments of the command."""

    questions: Path
    rows: Path
    output: Path | None
    field: str
    resume: bool
    concurrency: int
    url: str
    key: str


def decide(arguments: DecideArguments) -> int:
    """Run the command; returns its exit code. Raises ModelError for files, ClientError for the server."""
    run = DecideRun(arguments)
    try:
        with ExitStack() as stack:
            output = open_output(arguments, run.summary, stack)
            rows = open_rows(arguments.rows, run.position, stack)
            asyncio.run(run.answer_rows(rows, output))
    except KeyboardInterrupt:
        run.progress.clear()
        write_line(
            f"polyhead: stopped after {run.summary.rows} rows{'; --resume continues' if arguments.output else ''}"
        )
        return 130
    except BrokenPipeError:  # who reads the answers has all that was wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would report it at its end
        return 1
    except OSError as error:
        raise ModelError(f"{arguments.output or 'standard output'}: cannot be written: {error.strerror}") from None
    finally:
        run.progress.clear()
    for line in run.summary.describe(time.monotonic() - run.began, run.asked):
        write_line(line)
    return 1 if run.summary.failed else 0


def open_rows(path: Path, position: ReadPosition, stack: ExitStack) -> BinaryIO:
    if path == STANDARD_INPUT:
        return sys.stdin.buffer
    try:
        position.total = path.stat().st_size
        return stack.enter_context(path.open("rb"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None


def open_output(arguments: DecideArguments, summary: DecisionSummary, stack: ExitStack) -> BinaryIO:
    """The output, at its end. The answers that it has already are counted in `summary`."""
    path = arguments.output
    if path is None:
        if arguments.resume:
            raise ModelError("--resume: continues a file; name it with --output")
        return sys.stdout.buffer
    try:
        is_new = not path.exists()
        if not is_new and not arguments.resume:
            raise ModelError(f"--output: {path} exists already; --resume continues it")
        file = stack.enter_context(path.open("xb" if is_new else "r+b"))
        if not is_new:
            repair_answers(file)
            count_answers(arguments, summary)
        return file
    except OSError as error:
        raise ModelError(f"--output: {path} cannot be written: {error.strerror or error}") from None


def count_answers(arguments: DecideArguments, summary: DecisionSummary) -> None:
    """Count the answers that the output has. Raises ModelError if they are to other questions."""
    assert arguments.output is not None, "it is continued"
    asked = read_questions_file(arguments.questions)["questions"].keys()
    with arguments.output.open("rb") as before:
        for line in read_answers(arguments.output, before):
            if "answers" in line and line["answers"].keys() != asked:
                raise ModelError(f"--resume: {arguments.output} has answers to other questions, so it is not continued")
            summary.add(line)


class DecideRun:
    """One run of the command."""

    def __init__(self, arguments: DecideArguments) -> None:
        self.arguments, self.began = arguments, time.monotonic()
        self.fields = read_questions_file(arguments.questions)
        self.summary, self.position, self.asked = DecisionSummary(), ReadPosition(), 0
        self.progress = Progress(self.position)

    async def answer_rows(self, file: BinaryIO, output: BinaryIO) -> None:
        """Ask about the rows that have no line yet, and write their lines in order."""
        arguments, skipped = self.arguments, self.summary.rows
        rows = iter(read_decision_rows(arguments.rows, file, arguments.field, self.position))
        if sum(1 for _, _ in zip(range(skipped), rows, strict=False)) < skipped:
            raise ModelError(f"--resume: {arguments.output} has {skipped} answers, more than {arguments.rows} has rows")
        self.position.skipped = self.position.done
        rows_per_call = min(-(-arguments.concurrency // 2), ROWS_PER_CALL)
        calls = arguments.concurrency // rows_per_call
        limits = httpx.Limits(max_connections=calls, max_keepalive_connections=calls)
        async with open_async_client(arguments.url, arguments.key, timeout=TIMEOUT, limits=limits) as http:
            asked = RowCalls(DecisionClient(http, self.fields, asyncio.Semaphore(calls)), rows_per_call)
            try:
                while asked.start(rows, ROWS_AHEAD * arguments.concurrency) or asked.lines:
                    line = await asked.lines[0]
                    asked.lines.popleft()
                    with expected_form(http.base_url):
                        self.summary.add(line)
                    output.write(format_line(line, is_shown=output is sys.stdout.buffer))
                    output.flush()
                    self.asked += 1
                    self.progress.show(self.asked, time.monotonic() - self.began)
            finally:
                await asked.stop()


class Progress:
    """Lines of progress on standard error: one that is overwritten on a terminal, else one now and then."""

    def __init__(self, position: ReadPosition) -> None:
        self._position, self._is_terminal = position, sys.stderr.isatty()
        self._shown, self._has_line = time.monotonic(), False

    def show(self, rows: int, seconds: float) -> None:
        now = time.monotonic()
        if now - self._shown < (TERMINAL_PAUSE_S if self._is_terminal else FILE_PAUSE_S):
            return
        self._shown, part = now, self._position.part
        left = f", {part:.0%}, about {format_seconds(seconds * (1 - part) / part)} left" if part else ""
        text = f"{rows} rows, {rows / seconds:.1f} rows/s{left}"
        sys.stderr.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()
        self._has_line = self._is_terminal

    def clear(self) -> None:
        if self._has_line:
            sys.stderr.write("\r\x1b[K")
            self._has_line = False


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_line(line: Line, *, is_shown: bool) -> bytes:
    """`line` as JSON. On a terminal control characters of a server's answer are escaped."""
    written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    return escape_for_terminal(written.decode(), sys.stdout).encode() if is_shown else written


def write_line(text: str) -> None:
    sys.stderr.write(escape_for_terminal(text, sys.stderr) + "\n")
