"""Reranking as Cohere and Jina have it, under /v1/rerank."""
