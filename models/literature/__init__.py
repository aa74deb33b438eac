"""Attention of the literature besides the transformer: score functions, SNAIL, glimpses."""
