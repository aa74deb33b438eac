"""The server process: its assembly, its signals and shutdown, its traces."""
