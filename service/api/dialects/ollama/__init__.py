"""Ollama's dialect: generate, chat, embed, and the list of models, under /api."""
