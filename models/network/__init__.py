"""The parts of a transformer: configuration, attention, positions, caches, adapters, heads."""
