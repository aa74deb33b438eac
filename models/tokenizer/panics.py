"""Panics of the tokenizers library as errors of ours.

A panic of a library written in Rust reaches Python as a BaseException that is no Exception.  `except Exception` does
not catch it, so it would end the thread on which it happens.
"""

from collections.abc import Callable
from typing import TypeVar

from models.errors import CheckpointError, ModelError, cut

T = TypeVar("T")
PANIC = "PanicException"  # the library makes its own, which has no name to import


class TokenizerError(ModelError):
    """The tokenizers library panics on what a loaded checkpoint's tokenizer is given."""


def followed(run: Callable[[], T], astray: Callable[[str], ModelError]) -> T:
    """What `run` returns; raises `astray` of the first line of what the library says where it panics."""
    try:
        return run()
    except BaseException as problem:
        if type(problem).__name__ == PANIC:
            raise astray(cut(next(iter(str(problem).strip().splitlines()), ""), 200)) from None
        raise


def refused(file: str = "") -> Callable[[str], CheckpointError]:
    """For `followed`, where a tokenizer is made of a checkpoint's `file`."""
    return lambda said: CheckpointError(f"the tokenizers library fails on the tokenizer: {said}", file=file)


def failed(said: str) -> TokenizerError:
    """For `followed`, where a tokenizer is used."""
    return TokenizerError(f"the tokenizers library fails on this text: {said}")
