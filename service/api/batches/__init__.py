"""Batches: files of requests that are answered in the background, and the folder where these files are kept."""
