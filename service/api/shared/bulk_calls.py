"""Runs a call for each line of a body, several at a time, and writes a line for each as soon as it is answered.

The body is received whole, as every body is, before the first line is read (`service.api.access.middleware`): a client
that sends slowly holds no place in flight. The lines are parsed one by one, when their calls begin. No call begins
while a client does not read its answers. The memory of a line is released with its answer.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastapi import Request

from ...concurrency.outcome import cancel_tasks
from ...core.errors import EmptyInput, TooMany
from ...resources.request_memory import BYTES_PER_BODY_BYTE
from ..access.admission import Admission
from .dialect import request_context, server
from .json_body import receive_body_in_turn
from .streaming import LineStream

CALLS_AHEAD = 32  # calls of one body at a time
CHARACTERS_AHEAD = 1 << 16  # characters that the calls of one body have the model read at a time, or one longer call
LINE_BYTES = 512  # bytes that are kept of a line until the end: its timing
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0  # before a call that had no room is tried again
MAX_IDLE_S = 10.0  # of pauses in which no request makes progress; then a line is answered that there is no room
MAX_WAIT_S = 120.0  # of pauses in all since a line of the body was answered; then, too
SHORT_WAIT_S = 0.5  # instead of these for lines after one that has waited in vain, until one has room


@dataclass(frozen=True)
class Line:
    """A line that is not empty: its `number` in the body from 1, and its `index` among those after the first."""

    number: int
    index: int
    content: bytes


@dataclass(frozen=True)
class LineWork:
    """How one line is answered: `answer(request, line)` returns a line with the answer or an error, and raises NoRoom
    where it may be tried again; the model reads about `cost(line)` characters for it.
    """

    answer: Callable[[Request, Line], Coroutine[Any, Any, bytes]]
    cost: Callable[[Line], int]


class NoRoom(Exception):
    """Other requests leave no room for the call of a line; `answer` is the line that says so."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


def sends_lines(request: Request) -> bool:
    """Whether the body is a JSON value on each line."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == LineStream.media_type


async def receive_lines(request: Request) -> tuple[bytes, Iterator[Line]]:
    """The first line of the body, and the others. Raises EmptyInput if there are none, and TooMany."""
    body = await receive_body_in_turn(request)
    most, count = server(request).settings.max_batch_texts, body.count(b"\n") - body.endswith(b"\n")
    if count > most:
        raise TooMany(f"the body: has {count} lines after the first, at most {most} are read")
    request_context(request).claim.grow(LINE_BYTES * count, "the lines of the body")
    filled = split_lines(body)
    first, second = next(filled, None), next(filled, None)
    if first is None or second is None:
        raise EmptyInput("the body: must have a line with the questions and a line for each state after it")
    lines = (Line(number, index, content) for index, (number, content) in enumerate(chain((second,), filled)))
    return first[1], lines


def split_lines(body: bytearray) -> Iterator[tuple[int, bytes]]:
    """The lines of `body` that are not empty, with their numbers, each taken out of it when it is reached."""
    number = 0
    while body:
        end, number = body.find(b"\n"), number + 1
        end = len(body) if end < 0 else end
        content = bytes(body[:end]).strip()
        del body[: end + 1]  # the rest is moved to less memory whenever it has become half as long
        if content:
            yield number, content


async def answer_lines(request: Request, lines: Iterator[Line], work: LineWork) -> AsyncGenerator[bytes, None]:
    """The answer of each line as soon as it is there. Closing the generator aborts the calls that are running."""
    patience = Patience(server(request).admission)
    running, waiting = dict[asyncio.Task[bytes], RunningCall](), next(lines, None)
    try:
        while waiting is not None or running:
            while waiting is not None and has_room(running.values(), work.cost(waiting)):
                call = RunningCall(request, waiting, work, patience)
                running[asyncio.create_task(call.run())] = call
                waiting = next(lines, None)
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: running[each].line.index):
                yield task.result()
                running.pop(task).release()
    finally:
        await cancel_tasks(*running)
        for call in running.values():
            call.release()


def has_room(running: Collection["RunningCall"], cost: int) -> bool:
    """Whether a call of this cost may begin beside those that are running or whose answers are not sent yet."""
    return not running or (len(running) < CALLS_AHEAD and sum(call.cost for call in running) + cost <= CHARACTERS_AHEAD)


class Patience:
    """How long the lines of one body wait for room: while requests make progress, its other lines included, and not for
    ever, since it holds the memory of the lines after them. Of two bodies that wait for each other, both give up lines
    until one of them has room.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.idle_s, self.wait_s = MAX_IDLE_S, MAX_WAIT_S
        self.ended_lines = 0

    @property
    def answered_tokens(self) -> int:
        """Tokens of all requests that the engine has answered since the start."""
        return self._admission.answered_tokens

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to do."""
        return not self._admission.tokens_in_flight

    def note_answer(self) -> None:
        """A line had room: those after it may wait as long as the first."""
        self.ended_lines += 1
        self.idle_s, self.wait_s = MAX_IDLE_S, MAX_WAIT_S

    def note_refusal(self, *, was_idle: bool) -> None:
        """A line has waited in vain: its memory is released, and those after it wait a short time."""
        self.ended_lines += 1
        if was_idle:
            self.idle_s = SHORT_WAIT_S
        else:
            self.wait_s = SHORT_WAIT_S


class LineWait:
    """The pauses of one line that has no room."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._pause_s = patience, MIN_PAUSE_S
        self._ended_lines, self._answered_tokens = patience.ended_lines, patience.answered_tokens
        self._idle_s = self._waited_s = 0.0

    def is_over(self) -> bool:
        """Whether the line has waited long enough. Called after each try."""
        patience = self._patience
        if self._ended_lines != patience.ended_lines:
            self._idle_s = self._waited_s = 0.0
        elif self._answered_tokens != patience.answered_tokens or not patience.is_idle:
            self._idle_s = 0.0
        self._ended_lines, self._answered_tokens = patience.ended_lines, patience.answered_tokens
        was_idle = self._idle_s >= patience.idle_s
        is_over = was_idle or self._waited_s >= patience.wait_s
        if is_over:
            patience.note_refusal(was_idle=was_idle)
        return is_over

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._idle_s += self._pause_s
        self._waited_s += self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)


class RunningCall:
    """The call of one line, with a part of the request's context. It is released once its answer is sent."""

    def __init__(self, request: Request, line: Line, work: LineWork, patience: Patience) -> None:
        self.line, self.cost = line, work.cost(line)
        self.context = request_context(request).open_part()
        self._whole, self._work, self._patience = request_context(request), work, patience
        scope = {**request.scope, "state": {**request.scope["state"], "context": self.context}}
        self._request = Request(scope, request.receive)

    async def run(self) -> bytes:
        """The line of the answer. Where requests of others leave no room, it waits and tries again, for a time."""
        wait = LineWait(self._patience)
        try:
            while True:
                try:
                    answer = await self._work.answer(self._request, self.line)
                except NoRoom as refused:
                    self.context.cleanup.close()
                    self.context.claim.release()
                    if wait.is_over():
                        return refused.answer
                    await wait.pause()
                else:
                    self._patience.note_answer()
                    return answer
        finally:
            self.context.cleanup.close()
            self._whole.add_part(self.context)

    def release(self) -> None:
        """Release the memory of the line and of its call."""
        self.context.claim.close()
        self._whole.claim.shrink(BYTES_PER_BODY_BYTE * len(self.line.content))
