"""Reranking in the format of Cohere and Jina, under /v1/rerank."""
