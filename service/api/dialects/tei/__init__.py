"""The dialect of text-embeddings-inference."""
