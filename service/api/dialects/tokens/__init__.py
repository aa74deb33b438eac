"""Tokens of prompts and texts, in vLLM's words: /tokenize and /detokenize."""
