"""Served models: where they run, how they are loaded, checked, tested and unloaded."""
