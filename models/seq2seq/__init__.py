"""Sequence-to-sequence models in general: their protocol, decoding and beam search."""
