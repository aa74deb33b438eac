"""Weights as 8-bit and 4-bit numbers, and how far the answers of two models diverge."""
