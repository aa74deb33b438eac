"""Decisions: typed questions about a text, answered with a probability for every option."""
