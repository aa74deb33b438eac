"""What can be wrong with a checkpoint or with what is given to its tokenizer and template.

ModelError                 the base: a sentence for people
├── CheckpointError        a folder or file that cannot be loaded: names the file, and the tensor where there is one
│   └── UnsupportedError   intact, but of a kind that is not loaded here: says what to do instead
├── InvarianceError        this machine's kernels cannot give answers that do not depend on the batch
├── TemplateError          a chat template that refused the messages, or took too long or wrote too much
└── EncodingError          text that is no text (lone surrogates) or token ids outside the vocabulary

RowsError stands alone: it is a fault of the program, no sentence for people.
"""


class ModelError(Exception):
    """The message is complete, for people, and carries no traceback."""


class CheckpointError(ModelError):
    """A checkpoint that cannot be loaded.

    `file` is the path of the offending file or folder, `tensor` the name of the offending tensor, empty if none.
    What a checkpoint says of itself may be of any length; of what a message quotes the beginning is enough.
    """

    def __init__(self, message: str, *, file: str = "", tensor: str = "") -> None:
        self.file, self.tensor = file, tensor
        where = " ".join(part for part in (file, f"tensor {truncate(repr(tensor))}" if tensor else "") if part)
        super().__init__(f"{where}: {truncate(message)}" if where else truncate(message))


def truncate(text: str, longest: int = 1000) -> str:
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text) - longest} more characters)"


class UnsupportedError(CheckpointError):
    """A checkpoint of a kind that is not loaded here; the message says what to do instead."""


class InvarianceError(ModelError):
    """A deterministic mode that this machine's kernels cannot hold; says which of them and for what shape."""


class TemplateError(ModelError):
    """A chat template that failed, refused the messages, or exceeded its limits."""


class EncodingError(ModelError):
    """Input that cannot be encoded."""


class StepInputError(ValueError):
    """A step with a number that is out of range: names which one, its value and the bound.

    Who laid out the step should have refused it: a broken invariant, checked under `python -O` too.
    """
