"""A server with injected faults, as a child of tests: `python tests/support/fault_server.py FAULTS SERVE-FLAGS...`,
see tests/support/faults.py.

It is the real server, started by the real `serve`; only its executors have faults. At SIGUSR1 it logs the number of
its tasks and threads."""

import asyncio
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from polyhead.service.config import flags, settings
from polyhead.service.core import logs

log = logging.getLogger("faulty")


def census(sig: int, frame: FrameType | None) -> None:
    log.info("census", extra={"tasks": len(asyncio.all_tasks()), "threads": threading.active_count()})


def main(faults: Path, arguments: list[str]) -> int:
    chosen = settings.read_settings(flags.parse_flags(arguments))
    settings.set_library_defaults()  # before torch is loaded
    from polyhead.service.server.assembly import serve
    from tests.support.faults import Armed, FaultyExecutor

    logs.configure_logging(chosen.log_format, chosen.log_level)
    signal.signal(signal.SIGUSR1, census)
    armed = Armed(faults)
    return serve(chosen, executor_hook=lambda executor: FaultyExecutor(executor, armed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
