"""Hugging Face's inference tasks, under /models/{name}."""
