"""Runs a call for each line of a body, several at a time, and writes a line for each as soon as it is answered.

The body is received whole, as every body is, before the first line is read (`service.api.access.middleware`): a client
that sends slowly holds no place in flight. The lines are parsed one by one, when their calls begin. No call begins
while a client does not read its answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fastapi import Request

from ...concurrency.outcome import cancel_tasks
from ...core.errors import EmptyInput, Overloaded, TooMany
from .dialect import request_context, server
from .json_body import Bytes, receive_body_in_turn
from .streaming import LineStream

CALLS_AHEAD = 32  # calls of one body at a time
CHARACTERS_AHEAD = 1 << 16  # characters that the calls of one body have the model read at a time, or one longer call
LINE_BYTES = 512  # bytes that are kept of a line until the end: its timing
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0  # before a call that had no room is tried again


@dataclass(frozen=True)
class Line:
    """A line that is not empty: its `number` in the body from 1, and its `index` among those after the first."""

    number: int
    index: int
    content: bytes


@dataclass(frozen=True)
class LineWork:
    """How one line is answered: `answer(request, line)` returns a line with the answer or an error, and lets Overloaded
    through; the model reads about `cost(line)` characters for it.
    """

    answer: Callable[[Request, Line], Coroutine[Any, Any, bytes]]
    cost: Callable[[Line], int]


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


def split_lines(body: Bytes) -> Iterator[tuple[int, bytes]]:
    """The lines of `body` that are not empty, with their numbers, each copied when it is reached."""
    start, number = 0, 0
    while start < len(body):
        end, number = body.find(b"\n", start), number + 1
        end = len(body) if end < 0 else end
        if content := bytes(body[start:end]).strip():
            yield number, content
        start = end + 1


async def answer_lines(request: Request, lines: Iterator[Line], work: LineWork) -> AsyncGenerator[bytes, None]:
    """The answer of each line as soon as it is there. Closing the generator aborts the calls that are running."""
    running, waiting = dict[asyncio.Task[bytes], RunningCall](), next(lines, None)
    try:
        while waiting is not None or running:
            while waiting is not None and has_room(running.values(), work.cost(waiting)):
                call = RunningCall(request, waiting, work)
                running[asyncio.create_task(call.run())] = call
                waiting = next(lines, None)
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: running[each].line.index):
                yield task.result()
                running.pop(task).context.claim.close()
    finally:
        await cancel_tasks(*running)
        for call in running.values():
            call.context.claim.close()


def has_room(running: Collection["RunningCall"], cost: int) -> bool:
    """Whether a call of this cost may begin beside those that are running or whose answers are not sent yet."""
    return not running or (len(running) < CALLS_AHEAD and sum(call.cost for call in running) + cost <= CHARACTERS_AHEAD)


class RunningCall:
    """The call of one line, with a part of the request's context. Its claim is closed once its answer is sent."""

    def __init__(self, request: Request, line: Line, work: LineWork) -> None:
        self.line, self.cost = line, work.cost(line)
        self.context = request_context(request).open_part()
        self._whole, self._work = request_context(request), work
        self._request = Request({**request.scope, "state": {**request.scope["state"], "context": self.context}})

    async def run(self) -> bytes:
        """The line of the answer. Where requests of others leave no room, it waits and tries again."""
        pause = MIN_PAUSE_S
        try:
            while True:
                try:
                    return await self._work.answer(self._request, self.line)
                except Overloaded:
                    self.context.cleanup.close()
                    self.context.claim.release()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE_S)
        finally:
            self.context.cleanup.close()
            self._whole.add_part(self.context)
