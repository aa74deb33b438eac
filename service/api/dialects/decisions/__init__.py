"""OpenAI's decisions: POST /v1/decisions."""
