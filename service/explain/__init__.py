"""Explanations of answers: the request a client makes, and the answer it gets."""
