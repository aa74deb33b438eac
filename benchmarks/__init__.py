"""Side-by-side measurements against named peers, one script each; run as `python -m benchmarks.NAME`."""
