"""A server with faults, as a child of tests: `python tests/support/faulty.py FAULTS SERVE-FLAGS...`, see
tests/support/faults.py.

It is the real one, put together by the real `serve`; only what its executors compute goes through the faults.  At
SIGUSR1 it logs how many tasks and threads it has.
"""

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
    from tests.support.faults import Armed, Faulty

    logs.configure_logging(chosen.log_format, chosen.log_level)
    signal.signal(signal.SIGUSR1, census)
    armed = Armed(faults)
    return serve(chosen, executor_hook=lambda executor: Faulty(executor, armed))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
