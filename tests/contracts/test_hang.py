"""Contract: a step that hangs is detected and logged, and it does not delay the exit."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from polyhead.service.config.settings import Settings
from tests.support.crowd import COMPLETIONS, Moment, ask, completion, leave
from tests.support.faults import Fault
from tests.support.processes import PATIENCE, FaultServer

STALL, HANG, DRAIN = 0.5, 5.0, 1


def test_a_step_that_hangs(start_fault_server: Callable[..., FaultServer], tiny_generator: Path) -> None:
    limits = ("--stall-seconds", str(STALL), "--hang-seconds", str(HANG), "--drain-seconds", str(DRAIN))
    server = start_fault_server(f"chat={tiny_generator}", *limits)
    time.sleep(STALL)
    assert server.get("/readyz").status_code == 200, "an idle engine is reported as hanging"

    def answers(path: str, status: int) -> float:
        """The seconds between the start of the hanging step and the first such answer."""
        server.until(lambda: server.get(path).status_code == status)
        return time.monotonic() - began

    server.arm(Fault("hang"))
    began = time.monotonic()
    asyncio.run(leave(server.url, COMPLETIONS, completion([201], 1), Moment(0.1)))
    server.until(lambda: server.page.total("requests_total", outcome="aborted"))
    time.sleep(STALL)
    assert server.get("/readyz").status_code == 200, "no request waits"

    async def hung() -> None:
        nonlocal began
        began = time.monotonic()
        waiting = asyncio.create_task(ask(server.url, COMPLETIONS, completion([201], 1)))
        assert await asyncio.to_thread(answers, "/readyz", 503) > STALL
        assert server.get("/livez").status_code == 200
        assert "no step has been finished for" in server.get("/readyz").json()["reasons"][0]
        assert await asyncio.to_thread(answers, "/livez", 503) > HANG
        server.arm()
        assert (await waiting).status == 200

    asyncio.run(hung())
    assert server.get("/readyz").status_code == server.get("/livez").status_code == 200

    before = server.page.received_and_ended[0]

    async def leaving() -> None:
        server.arm(Fault("hang"))
        waiting = asyncio.create_task(ask(server.url, COMPLETIONS, completion([201], 1)))
        await asyncio.to_thread(server.until, lambda: server.page.received_and_ended[0] > before)
        server.child.send_signal(signal.SIGTERM)
        answer = await waiting
        assert (answer.status, answer.code) == (503, "stopped")

    asyncio.run(leaving())
    assert server.child.wait(PATIENCE) == 0, "the server did not exit while a step hung"


def test_a_hang_is_detected_in_ten_seconds_by_default() -> None:
    assert Settings().stall_seconds <= 8
