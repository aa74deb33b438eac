"""Objectives of whole networks: causal, masked, translation, and how translations are scored."""
