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
    run: Callable[[], T], on_panic: Callable[[str], ModelError], on_error: Callable[[str], ModelError] | None = None
) -> T:
    """The result of `run`. If the library panics, raises `on_panic` of the first line of its message. If it raises a
    bare Exception, as it does only for bad data, raises `on_error` of that line if `on_error` is given."""
    try:
        return run()
    except BaseException as problem:
        known = {PANIC: on_panic, "Exception": on_error}.get(type(problem).__name__)
        if known is None:
            raise
        raise known(truncate(next(iter(str(problem).strip().splitlines()), ""), 200)) from None


def load_failure(file: str = "") -> Callable[[str], CheckpointError]:
    """For `run_library`, when a tokenizer is made from a checkpoint's `file`."""
    return lambda message: CheckpointError(f"the tokenizers library fails on the tokenizer: {message}", file=file)


def text_failure(message: str) -> TokenizerError:
    """For `run_library`, when a tokenizer is used."""
    return TokenizerError(f"the tokenizers library fails on this text: {message}")


def encoding_failure(message: str) -> EncodingError:
    """For `run_library`, when the library cannot encode a text."""
    return EncodingError(f"the tokenizer cannot read this text: {message}")
