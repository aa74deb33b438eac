"""OpenAI's responses: items in, items out, under /v1/responses."""
