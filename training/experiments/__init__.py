"""Experiments of the literature that train in seconds."""
