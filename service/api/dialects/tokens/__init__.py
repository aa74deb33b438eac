"""Tokens of prompts and texts, in vLLM's format: /tokenize and /detokenize."""
