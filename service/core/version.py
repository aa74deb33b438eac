"""The version of the installed distribution: said once, in pyproject.toml."""

from importlib.metadata import version

VERSION = version("polyhead")
