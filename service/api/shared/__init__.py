"""What several dialects have in common: reading bodies, options, streams, and calls of the engine."""
