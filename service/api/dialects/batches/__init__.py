"""OpenAI's files and batches: /v1/files, /v1/batches."""
