"""Shared by the dialects: reading bodies, options, streams, and calls of the engine."""
