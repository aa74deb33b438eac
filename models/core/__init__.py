"""Errors of checkpoints, files that are read within limits, and turns of a thread that others wait for."""
