"""Anthropic's dialect: messages, and the count of their tokens."""
