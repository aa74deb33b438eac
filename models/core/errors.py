"""Errors of checkpoints, and of the text and messages that a tokenizer or chat template is given.

ModelError                 the base: the message is a sentence for people
├── CheckpointError        a folder or file that cannot be loaded: names the file, and the tensor if there is one
│   └── UnsupportedError   an intact checkpoint of a kind that is not supported: says what to do instead
├── InvarianceError        this machine's kernels cannot give answers that are independent of the batch
├── TemplateError          a chat template that refused the messages, took too long or wrote too much
└── EncodingError          text with lone surrogates, or token ids outside the vocabulary

StepInputError stands alone: it is a fault of the program and no message for people.
"""

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_SHOWN_ITEMS = 50  # of a list or an object that a message shows


class ModelError(Exception):
    """The message is complete, for people, and carries no traceback."""


class CheckpointError(ModelError):
    """A checkpoint that cannot be loaded.

    `file` is the path of the faulty file or folder, `tensor` the name of the faulty tensor; each is empty if there is
    none. Values quoted from a checkpoint may be of any length, so messages are truncated.
    """

    def __init__(self, message: str, *, file: str = "", tensor: str = "") -> None:
        self.file, self.tensor = file, tensor
        where = " ".join(part for part in (file, f"tensor {truncate(repr(tensor))}" if tensor else "") if part)
        super().__init__(f"{where}: {truncate(message)}" if where else truncate(message))


def truncate(text: str, longest: int = 1000) -> str:
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text) - longest} more characters)"


class _ShortRepr(reprlib.Repr):
    """Writes values out of a file: the first items of a list or an object, and of those inside only how many."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple = 2, MAX_SHOWN_ITEMS, MAX_SHOWN_ITEMS

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002
        return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}..."

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """As the library's, which sorts all keys first."""
        if level <= 0 and x:
            return "{...}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, MAX_SHOWN_ITEMS)]
        return f"{{{', '.join(shown)}{', ...' * (len(x) > MAX_SHOWN_ITEMS)}}}"


def show_value(value: object, longest: int = 200) -> str:
    """A value out of a file as a message shows it, cut to `longest` characters.

    A list of millions of numbers takes seconds to be written, while other threads wait, so only its beginning is
    written.
    """
    short = _ShortRepr()
    short.maxstring = short.maxlong = short.maxother = longest
    shown = short.repr(value)
    return shown if len(shown) <= longest + len("''...") else f"{shown[:longest]}..."


class UnsupportedError(CheckpointError):
    """A checkpoint of a kind that is not supported; the message says what to do instead."""


class InvarianceError(ModelError):
    """A deterministic mode that this machine's kernels cannot provide; names the kernel and the shape."""


class TemplateError(ModelError):
    """A chat template that failed, refused the messages, or exceeded its limits."""


class EncodingError(ModelError):
    """Input that cannot be encoded."""


class GrowthError(EncodingError):
    """A tokenizer may make a text many times as long."""


class StepInputError(ValueError):
    """A number of a step that is out of range: names the number, its value and the bound.

    The code that built the step should have refused the number. It is a broken invariant that is checked under `python
    -O` too.
    """
