"""From start to ready with the three quick-start models, and what memory they take.

python -m benchmarks.startup [--rounds 5]
"""

import argparse
import statistics

from benchmarks.serving import machine, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds, resident = [], []
    for _ in range(rounds):
        with serve() as server:
            seconds.append(server.ready_s)
            resident.append(server.resident_mb())
    print(machine())
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    print(f"start to ready, three models: median {statistics.median(seconds):.1f} s ({spread})")
    print(f"resident memory when ready:   median {statistics.median(resident):.0f} MB")


if __name__ == "__main__":
    main()
