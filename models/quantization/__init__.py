"""Quantises weights to 4 bits, and measures how far the answers of two models diverge."""
