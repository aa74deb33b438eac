"""Asks a server questions about rows, several in a call of JSON lines; rows without an answer are sent again."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import httpx
import orjson

from ..concurrency.outcome import cancel_tasks
from .client import ClientError, error_message
from .decision_rows import DecisionRow

RETRIED_STATUSES = (429, 502, 503, 504)
SPLIT_STATUSES = (408, 413)  # of a call of several rows: one of them may be too large, or all of them together
MAX_TRIES = 8  # of a row, and of a server that does not answer
MAX_PAUSE_S = 60.0
LINES = {"Content-Type": "application/x-ndjson"}
KEPT_FIELDS = ("model", "answers", "diagnostics", "usage")

Line = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class AskedRow:
    """A row, and the line that will be written for it."""

    row: DecisionRow
    line: "asyncio.Future[Line]"

    def set_answer(self, answer: Line) -> None:
        self._set({name: answer[name] for name in KEPT_FIELDS if name in answer})

    def set_error(self, error: Line) -> None:
        self._set({"error": error})

    def _set(self, content: Line) -> None:
        if not self.line.done():  # otherwise the command was interrupted
            named = {} if self.row.id is None else {"id": self.row.id}
            self.line.set_result({"index": self.row.index, **named, **content})


class CallTooLarge(Exception):
    """The rows of a call are too many for the server, or one of them is too large."""


class DecisionClient:
    """Sends rows to the server, in at most as many calls at a time as `free` allows."""

    def __init__(self, http: httpx.AsyncClient, fields: Mapping[str, Any], free: asyncio.Semaphore) -> None:
        self._http, self._fields, self._free = http, orjson.dumps(fields), free

    async def answer_rows(self, rows: Sequence[AskedRow]) -> None:
        """Set the line of each row. Raises ClientError for what is wrong with all rows."""
        bodies = {each: body for each in rows if (body := write_row(each))}
        for number in range(1, MAX_TRIES + 1):
            if not bodies:
                return
            try:
                async with self._free:
                    pause = await self._send(bodies, is_last=number == MAX_TRIES)
            except CallTooLarge:
                for each in bodies:
                    await self.answer_rows([each])
                return
            bodies = {each: body for each, body in bodies.items() if not each.line.done()}
            if bodies:
                await asyncio.sleep(min(0.5 * 2**number, MAX_PAUSE_S) if pause is None else pause)

    async def _send(self, bodies: Mapping[AskedRow, bytes], *, is_last: bool) -> float | None:
        """One call. Lines are set as they come, but for those that are to be sent again, unless the call is the last.
        Returns the pause that the server asks for.
        """
        content, asked = b"\n".join((self._fields, *bodies.values())), list(bodies)
        try:
            async with self._http.stream("POST", "/v1/systemone", content=content, headers=LINES) as response:
                if response.is_error:
                    await response.aread()
                    return self._read_refusal(response, asked, is_last=is_last)
                async for text in response.aiter_lines():
                    read_line(text, asked, is_last=is_last)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            if is_last or isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
                reason = str(error) or type(error).__name__
                message = f"{self._http.base_url} does not answer: {reason}; is the server running? See --url"
                raise ClientError(message) from None
            return None
        if is_last and any(not each.line.done() for each in asked):
            raise ClientError(f"{self._http.base_url} does not answer all rows of a call")
        return None

    def _read_refusal(self, response: httpx.Response, asked: Sequence[AskedRow], *, is_last: bool) -> float | None:
        """Set the rows of a call that was refused, or return the pause before it is sent again.

        Raises CallTooLarge, and ClientError for what is wrong with all rows.
        """
        status, error = response.status_code, read_error(response)
        if status in RETRIED_STATUSES and not is_last:
            return read_pause(response.headers.get("retry-after", ""))
        if len(asked) > 1 and (status in SPLIT_STATUSES or error.get("code") == "too_many"):
            raise CallTooLarge
        if status < 500 and status not in (*RETRIED_STATUSES, *SPLIT_STATUSES):
            raise ClientError(str(error["message"]))
        for each in asked:
            each.set_error(kept_error(error, status))
        return None


def write_row(each: AskedRow) -> bytes:
    """The line that is sent for a row; empty if it has a problem, which is its answer then."""
    problem = each.row.problem
    if not problem:
        try:
            return orjson.dumps({"state": each.row.state})
        except orjson.JSONEncodeError as error:
            problem = f"state: cannot be sent: {error}"
    each.set_error({"message": problem, "code": "invalid_row"})
    return b""


def read_line(text: str, asked: Sequence[AskedRow], *, is_last: bool) -> None:
    """Set the line of the row that an answer is for, unless it is to be sent again. Raises ClientError."""
    try:
        found = orjson.loads(text)
        each = asked[found["index"]]
        error = kept_error(found["error"], found.get("status", 0)) if "error" in found else None
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        raise ClientError("the server's answer is no line of JSON with the index of a row") from None
    if error is None:
        each.set_answer(found)
    elif is_last or found.get("status") not in RETRIED_STATUSES:
        each.set_error(error)


def kept_error(error: Line, status: int) -> Line:
    return {name: error[name] for name in ("message", "code", "param") if error.get(name)} | {"status": status}


def read_pause(given: str) -> float | None:
    """Seconds until the next try, if the server says them, within MAX_PAUSE_S."""
    return min(float(given), MAX_PAUSE_S) if given.isdecimal() else None


def read_error(response: httpx.Response) -> Mapping[str, Any]:
    """The error object of a response."""
    try:
        found = response.json()["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    return found if isinstance(found, dict) and "message" in found else {"message": error_message(response)}


class RowCalls:
    """The calls that are under way. `lines` has what is to be written for the rows of all calls, in order."""

    def __init__(self, client: DecisionClient, rows_per_call: int) -> None:
        self._client, self._rows_per_call = client, rows_per_call
        self._tasks = set[asyncio.Task[None]]()
        self.lines = deque[asyncio.Future[Line]]()

    def start(self, rows: Iterator[DecisionRow], most: int) -> bool:
        """Start calls for further rows, so that at most `most` are to be written. Returns whether one was started."""
        started = False
        while len(self.lines) + self._rows_per_call <= most and (part := list(islice(rows, self._rows_per_call))):
            asked = [AskedRow(row, asyncio.get_running_loop().create_future()) for row in part]
            self.lines += (each.line for each in asked)
            self._tasks.add(task := asyncio.create_task(self._client.answer_rows(asked)))
            task.add_done_callback(partial(self._end, asked))
            started = True
        return started

    def _end(self, asked: Sequence[AskedRow], task: asyncio.Task[None]) -> None:
        """What a call raised is raised where the first row without an answer would be written."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            next(each.line for each in asked if not each.line.done()).set_exception(error)

    async def stop(self) -> None:
        await cancel_tasks(*self._tasks)
        for line in self.lines:
            line.cancel()
