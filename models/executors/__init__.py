"""Executors of a step: the protocol, its checks, and the torch executor."""
