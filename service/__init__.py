"""Everything that comes in over a wire: requests, engine, HTTP dialects, metrics, command line."""
