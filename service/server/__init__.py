"""The server as a process: its parts put together, its signals and its end, its traces."""
