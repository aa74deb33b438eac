"""What may be asked of each head beside the texts: options by the names that transformers' pipelines have for them.

Knows no dialect: each says where its clients put these.  The one idea: options are checked wire objects, and each head
has one pure function that makes a Reading of texts and options; for generators that is `drawing`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...text.answer_spans import Asking
from ...text.entities import Aggregation
from ...text.inputs import Input, Reading, Windows
from .dialect import Count, Neutral, Wire, at_most, between, described

INT64 = 1 << 63
LONGEST_WORD, MOST_WORDS = 256, 1000  # characters of a label or target, and how many of them
LONGEST_STOP, MOST_STOPS = 1000, 16
MOST_ANSWERS = 1000
WINDOW, OVERLAP = 384, 128  # tokens of a context's windows, and shared by two, unless it is said
Word = Annotated[str, Field(min_length=1, max_length=LONGEST_WORD)]
Words = Annotated[
    str | Annotated[list[Word], Field(fail_fast=True)],
    described(f"a string or a list of strings of 1 to {LONGEST_WORD} characters"),
    at_most(MOST_WORDS),
]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)],
    described(f"a string or a list of at most {MOST_STOPS} strings, each of 1 to {LONGEST_STOP} characters"),
]
Side = Literal["", "left", "right"]


class Cutting(Wire):
    """What to do with a text that is too long: an error, unless it is asked to be cut."""

    truncate: bool = False
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"

    @property
    def side(self) -> Side:
        if not self.cuts:
            return ""
        return "left" if self.truncation_direction in ("Left", "left") else "right"

    @property
    def cuts(self) -> bool:
        return self.truncate


class Truncating(Cutting):
    """The same by the name that tokenisers have for it, too."""

    truncation: bool = False

    @property
    def cuts(self) -> bool:
        return self.truncate or self.truncation


class Classifying(Truncating):
    """`function_to_apply` instead of the checkpoint's own; labels that score less than `threshold` are left out."""

    top_k: Count = 0
    function_to_apply: Literal["", "sigmoid", "softmax", "none"] = ""
    threshold: Annotated[float, between(-1e9, 1e9)] = -1e9


class Embedding(Truncating):
    """`normalize`: unless it is said, as the checkpoint does."""

    unsupported: ClassVar[Neutral] = {"encoding_format": ("float",)}

    prompt_name: Annotated[str, Field(max_length=LONGEST_WORD)] = ""
    normalize: bool = False
    dimensions: Count = 0


class Labelling(Truncating):
    """With a `stride` long texts are read in windows that share so many tokens."""

    aggregation_strategy: Aggregation = "none"
    ignore_labels: Annotated[list[Word], Field(fail_fast=True), at_most(MOST_WORDS)] = Field(
        default_factory=lambda: ["O"]
    )
    stride: Annotated[int, between(0, 1 << 20)] = -1  # it doesn't say


class Answering(Wire):
    """With a `doc_stride` or a `max_seq_len` long contexts are read in windows of so many tokens, sharing so many."""

    top_k: Annotated[int, between(1, MOST_ANSWERS)] = 1
    doc_stride: Annotated[int, between(0, 1 << 20)] = -1  # it doesn't say
    max_answer_len: Annotated[int, between(1, 1000)] = 15
    max_seq_len: Count = 0
    max_question_len: Count = 64  # harmless: what has windows, in transformers, never looked at it
    handle_impossible_answer: bool = False
    align_to_words: bool = True


class Filling(Truncating):
    """The likeliest words, of all or of `targets`."""

    top_k: Annotated[int, between(1, MOST_ANSWERS)] = 5
    targets: Words = Field(default_factory=list)


# What is asked of texts; `field` is the wire's name for them, `options` that of the object that options are in


def classifying(field: str, inputs: tuple[Input, ...], options: Classifying) -> Reading:
    return Reading(field=field, inputs=inputs, raw=bool(options.function_to_apply), truncate=options.side)


def embedding(field: str, inputs: tuple[Input, ...], options: Embedding) -> Reading:
    said = "normalize" in options.model_fields_set
    return Reading(
        field=field,
        inputs=inputs,
        prompt=options.prompt_name,
        raw=said and not options.normalize,
        unit=options.normalize,
        dimensions=options.dimensions,
        truncate=options.side,
    )


def labelling(field: str, inputs: tuple[Input, ...], options: Labelling) -> Reading:
    windowed = options.stride >= 0
    if windowed and options.aggregation_strategy == "none":
        message = "parameters.stride: needs an aggregation_strategy: tokens that two windows share would be told twice"
        raise BadRequest(message, param="parameters.stride")
    return Reading(
        field=field,
        inputs=inputs,
        truncate=options.side,
        windows=Windows(overlap=options.stride) if windowed else None,
        cure="parameters.stride reads it in windows",
        aggregation=options.aggregation_strategy,
        ignored=frozenset(options.ignore_labels),
    )


def answering(field: str, inputs: tuple[Input, ...], options: Answering) -> Reading:
    return Reading(
        field=field,
        inputs=inputs,
        windows=windows_of(options),
        cure="parameters.doc_stride or max_seq_len reads it in windows",
        asking=Asking(
            top_k=options.top_k,
            most_tokens=options.max_answer_len,
            impossible=options.handle_impossible_answer,
            whole_words=options.align_to_words,
        ),
    )


def windows_of(options: Answering) -> Windows | None:
    if options.doc_stride < 0 and not options.max_seq_len:
        return None
    size = options.max_seq_len or WINDOW
    return Windows(min(size // 2, OVERLAP) if options.doc_stride < 0 else options.doc_stride, size)


def filling(field: str, inputs: tuple[Input, ...], options: Filling) -> Reading:
    targets = (options.targets,) if isinstance(options.targets, str) else tuple(options.targets)
    return Reading(field=field, inputs=inputs, truncate=options.side, top_k=options.top_k, targets=targets)
