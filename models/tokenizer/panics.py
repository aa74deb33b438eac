"""Panics of the tokenizers library as errors of ours.

A panic of a library written in Rust reaches Python as a BaseException that is no Exception.  `except Exception` does
not catch it, so it would end the thread on which it happens.
"""

from collections.abc import Callable
from typing import TypeVar

from ..core.errors import CheckpointError, EncodingError, ModelError, truncate

T = TypeVar("T")
PANIC = "PanicException"  # the library makes its own, which has no name to import


class TokenizerError(ModelError):
    """The tokenizers library panics on what a loaded checkpoint's tokenizer is given."""


def run_library(
    run: Callable[[], T], astray: Callable[[str], ModelError], unread: Callable[[str], ModelError] | None = None
) -> T:
    """What `run` returns; raises `astray` of the first line of what the library says where it panics, and `unread`, if
    it is given, of what it says where it raises bare Exception, as it does for bad data and nothing else does."""
    try:
        return run()
    except BaseException as problem:
        known = {PANIC: astray, "Exception": unread}.get(type(problem).__name__)
        if known is None:
            raise
        raise known(truncate(next(iter(str(problem).strip().splitlines()), ""), 200)) from None


def load_failure(file: str = "") -> Callable[[str], CheckpointError]:
    """For `followed`, where a tokenizer is made of a checkpoint's `file`."""
    return lambda said: CheckpointError(f"the tokenizers library fails on the tokenizer: {said}", file=file)


def text_failure(said: str) -> TokenizerError:
    """For `followed`, where a tokenizer is used."""
    return TokenizerError(f"the tokenizers library fails on this text: {said}")


def encoding_failure(said: str) -> EncodingError:
    """For `followed`, where the library cannot make tokens of a text."""
    return EncodingError(f"the tokenizer cannot read this text: {said}")
