"""Measure the time from start to ready, and the memory of an idle server; with the server's own times of its stages.

python -m benchmarks.startup [--rounds 5] [NAME=SOURCE ...] [FLAGS OF SERVE]

Without a source the quick-start models are served. Bytecode is kept under .bench, as an installation keeps it beside
the code. The first start writes it, reads files into the page cache, and is not counted.
"""

import argparse
import os
import re
import statistics
import time
from pathlib import Path

from benchmarks.serving import Running, machine, serve

SETTLED_S = 3.0  # after which what was only needed to load has been given back
BYTECODE = Path(".bench/bytecode").resolve()


def started(arguments: list[str]) -> tuple[float, float, str]:
    """Seconds to ready, resident MB at rest, and the stages."""
    with serve(*arguments) as server:
        time.sleep(SETTLED_S)
        return server.ready_s, server.resident_mb(), stages(server)


def stages(server: Running) -> str:
    found = re.search(r"ready on .* in [\d.]+ s \((?P<stages>.*)\)", server.log())
    return found["stages"] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    options, arguments = parser.parse_known_args()
    os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    started(arguments)
    seconds, resident, said = zip(*(started(arguments) for _ in range(options.rounds)), strict=True)
    print(machine())
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    print(f"start to ready:  median {statistics.median(seconds):.2f} s ({spread})")
    print(f"resident memory: median {statistics.median(resident):.0f} MB")
    for line in said:
        print(line)


if __name__ == "__main__":
    main()
