"""Errors of checkpoints, and of the text and messages that a tokenizer or chat template is given.

ModelError                 the base: the message is a sentence for people
├── CheckpointError        a folder or file that cannot be loaded: names the file, and the tensor if there is one
│   └── UnsupportedError   an intact checkpoint of a kind that is not supported: says what to do instead
├── InvarianceError        this machine's kernels cannot give answers that are independent of the batch
├── TemplateError          a chat template that refused the messages, took too long or wrote too much
└── EncodingError          text with lone surrogates, or token ids outside the vocabulary

StepInputError stands alone: it is a fault of the program and no message for people.
"""


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


class UnsupportedError(CheckpointError):
    """A checkpoint of a kind that is not supported; the message says what to do instead."""


class InvarianceError(ModelError):
    """A deterministic mode that this machine's kernels cannot provide; names the kernel and the shape."""


class TemplateError(ModelError):
    """A chat template that failed, refused the messages, or exceeded its limits."""


class EncodingError(ModelError):
    """Input that cannot be encoded."""


class StepInputError(ValueError):
    """A number of a step that is out of range: names the number, its value and the bound.

    The code that built the step should have refused the number. It is a broken invariant that is checked under `python
    -O` too.
    """
