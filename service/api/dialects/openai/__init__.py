"""OpenAI's dialect: completions, chat, embeddings and models, under /v1."""
