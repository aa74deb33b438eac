"""Trained networks and adapters, written as folders that others read."""
