"""`polyhead decide`: asks a server questions about each row of a file, and writes a line with the answers for each.

Rows are asked several at a time and written in order. A request that the server has no room for is sent again. An
output file can be continued after an interrupt: rows that have a line in it are not asked again.
"""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import orjson

from polyhead.models.core.errors import ModelError

from ..core.logs import escape_for_terminal
from .client import TIMEOUT, ClientError, error_message
from .decision_rows import (
    STANDARD_INPUT,
    DecisionRow,
    ReadPosition,
    read_answers,
    read_decision_rows,
    read_questions_file,
    repair_answers,
)
from .decision_summary import DecisionSummary

RETRIED_STATUSES = (429, 502, 503, 504)
MAX_TRIES = 8  # of a row, and of a server that does not answer
MAX_PAUSE_S = 60.0
ROW_CODES = ("context_length_exceeded", "empty_input", "too_complex")  # errors of a row; others of 400 are of all rows
KEPT_FIELDS = ("model", "answers", "diagnostics", "usage")
TERMINAL_PAUSE_S, FILE_PAUSE_S = 0.2, 10.0  # between two lines of progress
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
        headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
        most = arguments.concurrency
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
        async with httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=TIMEOUT, limits=limits) as http:
            client = DecisionClient(http, self.fields, asyncio.Semaphore(arguments.concurrency))
            begun = deque[asyncio.Task[Mapping[str, Any]]]()
            try:
                while self.start_rows(rows, begun, client) or begun:
                    line = await begun[0]
                    begun.popleft()
                    output.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                    output.flush()
                    self.summary.add(line)
                    self.asked += 1
                    self.progress.show(self.asked, time.monotonic() - self.began)
            finally:
                for task in begun:
                    task.cancel()
                await asyncio.gather(*begun, return_exceptions=True)

    def start_rows(
        self, rows: Iterator[DecisionRow], begun: "deque[asyncio.Task[Mapping[str, Any]]]", client: "DecisionClient"
    ) -> bool:
        """Start to ask about further rows, as far ahead of the next to be written as is allowed. Returns whether one
        was started.
        """
        started = False
        while len(begun) < ROWS_AHEAD * self.arguments.concurrency and (row := next(rows, None)) is not None:
            begun.append(asyncio.create_task(client.answer_row(row)))
            started = True
        return started


class DecisionClient:
    """Asks about one row at a time, at most as many at once as `free` allows."""

    def __init__(self, http: httpx.AsyncClient, fields: Mapping[str, Any], free: asyncio.Semaphore) -> None:
        self._http, self._fields, self._free = http, fields, free

    async def answer_row(self, row: DecisionRow) -> dict[str, Any]:
        """The line for a row: its answers, or an error. Raises ClientError for what is wrong with all rows."""
        named = {"index": row.index} | ({} if row.id is None else {"id": row.id})
        if row.problem:
            return {**named, "error": {"message": row.problem, "code": "invalid_row"}}
        try:
            body = orjson.dumps({**self._fields, "state": row.state})
        except orjson.JSONEncodeError as problem:
            return {**named, "error": {"message": f"state: cannot be sent: {problem}", "code": "invalid_row"}}
        async with self._free:
            response = await self._send(body)
        if not response.is_error:
            answer = response.json()
            return {**named, **{name: answer[name] for name in KEPT_FIELDS if name in answer}}
        error = read_error(response)
        if response.status_code < 500 and not is_of_row(response.status_code, error):
            raise ClientError(str(error["message"]))
        kept = {name: error.get(name) for name in ("message", "code", "param") if error.get(name)}
        return {**named, "error": {**kept, "status": response.status_code}}

    async def _send(self, body: bytes) -> httpx.Response:
        """The response; where the server has no room, is loading, or does not answer, that of a later try."""
        headers = {"Content-Type": "application/json"}
        for number in range(1, MAX_TRIES + 1):
            pause = min(0.5 * 2**number, MAX_PAUSE_S)
            try:
                response = await self._http.post("/v1/systemone", content=body, headers=headers)
                if response.status_code not in RETRIED_STATUSES or number == MAX_TRIES:
                    return response
                pause = read_pause(response.headers.get("retry-after", ""), pause)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                if number == MAX_TRIES or isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
                    reason = str(error) or type(error).__name__
                    url = self._http.base_url
                    message = f"{url} does not answer: {reason}; is the server running? See --url"
                    raise ClientError(message) from None
            await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")


def read_pause(given: str, otherwise: float) -> float:
    """Seconds until the next try: what the server says, within MAX_PAUSE_S."""
    return min(float(given), MAX_PAUSE_S) if given.isdecimal() else otherwise


def read_error(response: httpx.Response) -> Mapping[str, Any]:
    """The error object of a response."""
    try:
        found = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        found = None
    return found if isinstance(found, dict) and "message" in found else {"message": error_message(response)}


def is_of_row(status: int, error: Mapping[str, Any]) -> bool:
    """Whether an error is of one row. Otherwise it is of all: a wrong question, key or model."""
    if status in (400, 422):
        place = str(error.get("param") or "").partition(".")[0]
        return place == "state" or error.get("code") in ROW_CODES or str(error["message"]).startswith("the body")
    return status in (408, 413, *RETRIED_STATUSES)


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


def write_line(text: str) -> None:
    sys.stderr.write(escape_for_terminal(text, sys.stderr) + "\n")
