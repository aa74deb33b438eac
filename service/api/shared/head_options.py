"""What may be asked of each head beside the texts: options by the names that transformers' pipelines have for them.

Knows no dialect: each says where its clients put these.  The one idea: options are checked wire objects, and each head
has one pure function that makes a Reading of texts and options; for generators that is `drawing`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...text.answer_spans import SpanOptions
from ...text.encoder_inputs import EncoderInput, EncodingRequest, WindowOptions
from ...text.entities import Aggregation
from .dialect import Count, NeutralValues, Wire, between, max_items, must_be

INT64_LIMIT = 1 << 63
MAX_LABEL_CHARS, MAX_LABELS = 256, 1000  # characters of a label or target, and how many of them
MAX_STOP_CHARS, MAX_STOPS = 1000, 16
MAX_TOP_K = 1000
DEFAULT_WINDOW, DEFAULT_OVERLAP = 384, 128  # tokens of a context's windows, and shared by two, unless it is said
Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
LabelList = Annotated[
    str | Annotated[list[Label], Field(fail_fast=True)],
    must_be(f"a string or a list of strings of 1 to {MAX_LABEL_CHARS} characters"),
    max_items(MAX_LABELS),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)],
    must_be(f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"),
]
TruncationSide = Literal["", "left", "right"]


class TruncateOptions(Wire):
    """What to do with a text that is too long: an error, unless it is asked to be cut."""

    truncate: bool = False
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"

    @property
    def side(self) -> TruncationSide:
        if not self.truncates:
            return ""
        return "left" if self.truncation_direction in ("Left", "left") else "right"

    @property
    def truncates(self) -> bool:
        return self.truncate


class HfTruncateOptions(TruncateOptions):
    """The same by the name that tokenisers have for it, too."""

    truncation: bool = False

    @property
    def truncates(self) -> bool:
        return self.truncate or self.truncation


class ClassifyOptions(HfTruncateOptions):
    """`function_to_apply` instead of the checkpoint's own; labels that score less than `threshold` are left out."""

    top_k: Count = 0
    function_to_apply: Literal["", "sigmoid", "softmax", "none"] = ""
    threshold: Annotated[float, between(-1e9, 1e9)] = -1e9


class EmbeddingOptions(HfTruncateOptions):
    """`normalize`: unless it is said, as the checkpoint does."""

    unsupported: ClassVar[NeutralValues] = {"encoding_format": ("float",)}

    prompt_name: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = ""
    normalize: bool = False
    dimensions: Count = 0


class TokenClassifyOptions(HfTruncateOptions):
    """With a `stride` long texts are read in windows that share so many tokens."""

    aggregation_strategy: Aggregation = "none"
    ignore_labels: Annotated[list[Label], Field(fail_fast=True), max_items(MAX_LABELS)] = Field(
        default_factory=lambda: ["O"]
    )
    stride: Annotated[int, between(0, 1 << 20)] = -1  # it doesn't say


class QuestionOptions(Wire):
    """With a `doc_stride` or a `max_seq_len` long contexts are read in windows of so many tokens, sharing so many."""

    top_k: Annotated[int, between(1, MAX_TOP_K)] = 1
    doc_stride: Annotated[int, between(0, 1 << 20)] = -1  # it doesn't say
    max_answer_len: Annotated[int, between(1, 1000)] = 15
    max_seq_len: Count = 0
    max_question_len: Count = 64  # harmless: what has windows, in transformers, never looked at it
    handle_impossible_answer: bool = False
    align_to_words: bool = True


class FillMaskOptions(HfTruncateOptions):
    """The likeliest words, of all or of `targets`."""

    top_k: Annotated[int, between(1, MAX_TOP_K)] = 5
    targets: LabelList = Field(default_factory=list)


# What is asked of texts; `field` is the wire's name for them, `options` that of the object that options are in


def read_classify_inputs(field: str, inputs: tuple[EncoderInput, ...], options: ClassifyOptions) -> EncodingRequest:
    return EncodingRequest(field=field, inputs=inputs, raw=bool(options.function_to_apply), truncate=options.side)


def read_embed_inputs(field: str, inputs: tuple[EncoderInput, ...], options: EmbeddingOptions) -> EncodingRequest:
    said = "normalize" in options.model_fields_set
    return EncodingRequest(
        field=field,
        inputs=inputs,
        prompt=options.prompt_name,
        raw=said and not options.normalize,
        unit=options.normalize,
        dimensions=options.dimensions,
        truncate=options.side,
    )


def read_tag_inputs(field: str, inputs: tuple[EncoderInput, ...], options: TokenClassifyOptions) -> EncodingRequest:
    windowed = options.stride >= 0
    if windowed and options.aggregation_strategy == "none":
        message = "parameters.stride: needs an aggregation_strategy: tokens that two windows share would be told twice"
        raise BadRequest(message, param="parameters.stride")
    return EncodingRequest(
        field=field,
        inputs=inputs,
        truncate=options.side,
        windows=WindowOptions(overlap=options.stride) if windowed else None,
        truncation_hint="parameters.stride reads it in windows",
        aggregation=options.aggregation_strategy,
        ignored_labels=frozenset(options.ignore_labels),
    )


def read_span_inputs(field: str, inputs: tuple[EncoderInput, ...], options: QuestionOptions) -> EncodingRequest:
    return EncodingRequest(
        field=field,
        inputs=inputs,
        windows=read_windows(options),
        truncation_hint="parameters.doc_stride or max_seq_len reads it in windows",
        span_options=SpanOptions(
            top_k=options.top_k,
            max_tokens=options.max_answer_len,
            allows_no_answer=options.handle_impossible_answer,
            whole_words=options.align_to_words,
        ),
    )


def read_windows(options: QuestionOptions) -> WindowOptions | None:
    if options.doc_stride < 0 and not options.max_seq_len:
        return None
    size = options.max_seq_len or DEFAULT_WINDOW
    return WindowOptions(min(size // 2, DEFAULT_OVERLAP) if options.doc_stride < 0 else options.doc_stride, size)


def read_fill_inputs(field: str, inputs: tuple[EncoderInput, ...], options: FillMaskOptions) -> EncodingRequest:
    targets = (options.targets,) if isinstance(options.targets, str) else tuple(options.targets)
    return EncodingRequest(field=field, inputs=inputs, truncate=options.side, top_k=options.top_k, targets=targets)
