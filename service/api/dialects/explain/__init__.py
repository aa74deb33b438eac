"""Explanations of answers, under /v1/explain."""
