"""Polyhead: a server of encoder classifiers and decoder generators.

This folder gives the repository's top-level packages one installed name: `polyhead.models`, `polyhead.service` and
`polyhead.training` are links to the folders beside it.  A wheel holds the files themselves.
"""
