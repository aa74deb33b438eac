"""Requests in, events out: the thread that owns the arithmetic, and the workers that batch it."""
