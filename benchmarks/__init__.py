"""Measurements of Polyhead beside other programs, one script each; run as `python -m benchmarks.NAME`."""
