"""OpenAI's moderations, by any served classifier."""
