"""The dialect of text-generation-inference."""
