"""Explanations of answers: the client's request, and the response."""
