"""Turns panics of the tokenizers library into errors.

A panic of a library written in Rust reaches Python as a BaseException that is no Exception. `except Exception` does not
catch it, so it would end the thread.
"""

from collections.abc import Callable
from typing import TypeVar

from ..core.errors import CheckpointError, EncodingError, ModelError, truncate

T = TypeVar("T")
PANIC = "PanicException"  # the library creates this class at run time, so it cannot be imported


class TokenizerError(ModelError):
    """The tokenizers library panics on an input of a loaded checkpoint's tokenizer."""


def run_library(
    run: Callable[[], T], astray: Callable[[str], ModelError], unread: Callable[[str], ModelError] | None = None
) -> T:
    """The result of `run`. If the library panics, raises `astray` of the first line of its message. If it raises a bare
    Exception, as it does only for bad data, raises `unread` of that line if `unread` is given."""
    try:
        return run()
    except BaseException as problem:
        known = {PANIC: astray, "Exception": unread}.get(type(problem).__name__)
        if known is None:
            raise
        raise known(truncate(next(iter(str(problem).strip().splitlines()), ""), 200)) from None


def load_failure(file: str = "") -> Callable[[str], CheckpointError]:
    """For `run_library`, when a tokenizer is made from a checkpoint's `file`."""
    return lambda said: CheckpointError(f"the tokenizers library fails on the tokenizer: {said}", file=file)


def text_failure(said: str) -> TokenizerError:
    """For `run_library`, when a tokenizer is used."""
    return TokenizerError(f"the tokenizers library fails on this text: {said}")


def encoding_failure(said: str) -> EncodingError:
    """For `run_library`, when the library cannot encode a text."""
    return EncodingError(f"the tokenizer cannot read this text: {said}")
