"""The version of the installed distribution, which is set in pyproject.toml."""

from importlib.metadata import version

VERSION = version("polyhead")
