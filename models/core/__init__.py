"""Errors of checkpoints, and files that are read within limits."""
