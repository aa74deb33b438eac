"""Run all measurements, one after the other: `python -m benchmarks`."""

from benchmarks import encoder, generation, startup

if __name__ == "__main__":
    for measurement in (generation, encoder, startup):
        print(f"\n{measurement.__name__}")
        measurement.main()
