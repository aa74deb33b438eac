"""Writes trained networks and adapters as checkpoint folders."""
