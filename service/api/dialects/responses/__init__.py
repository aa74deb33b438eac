"""OpenAI's responses API, under /v1/responses."""
