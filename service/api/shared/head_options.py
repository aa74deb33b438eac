"""Options of each head, by the names that transformers' pipelines use, and the functions that build encoding requests.

Every dialect decides where its clients put these options.  For generators see `sampling_options`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...text.answer_spans import SpanOptions
from ...text.encoder_inputs import EncoderInput, EncodingRequest, WindowOptions
from ...text.entities import Aggregation
from .dialect import Count, NeutralValues, Wire, between, max_items, must_be

INT64_LIMIT = 1 << 63
MAX_LABEL_CHARS, MAX_LABELS = 256, 1000  # characters of a label or target, and the number of them
MAX_STOP_CHARS, MAX_STOPS = 1000, 16
MAX_TOP_K = 1000
DEFAULT_WINDOW, DEFAULT_OVERLAP = 384, 128  # default size of a context's windows in tokens, and their default overlap
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
    """What to do with a text that is too long: raise an error, or truncate it."""

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
    """The same, with the name that tokenizers use for it."""

    truncation: bool = False

    @property
    def truncates(self) -> bool:
        return self.truncate or self.truncation


class ClassifyOptions(HfTruncateOptions):
    """`function_to_apply` replaces the checkpoint's own; labels that score less than `threshold` are left out."""

    top_k: Count = 0
    function_to_apply: Literal["", "sigmoid", "softmax", "none"] = ""
    threshold: Annotated[float, between(-1e9, 1e9)] = -1e9


class EmbeddingOptions(HfTruncateOptions):
    """`normalize`: the default is the checkpoint's."""

    unsupported: ClassVar[NeutralValues] = {"encoding_format": ("float",)}

    prompt_name: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = ""
    normalize: bool = False
    dimensions: Count = 0


class TokenClassifyOptions(HfTruncateOptions):
    """With a `stride` long texts are read in windows that overlap by so many tokens."""

    aggregation_strategy: Aggregation = "none"
    ignore_labels: Annotated[list[Label], Field(fail_fast=True), max_items(MAX_LABELS)] = Field(
        default_factory=lambda: ["O"]
    )
    stride: Annotated[int, between(0, 1 << 20)] = -1  # -1: not given


class QuestionOptions(Wire):
    """With `doc_stride` or `max_seq_len` long contexts are read in windows of `max_seq_len` tokens.

    Two windows overlap by `doc_stride` tokens.
    """

    top_k: Annotated[int, between(1, MAX_TOP_K)] = 1
    doc_stride: Annotated[int, between(0, 1 << 20)] = -1  # -1: not given
    max_answer_len: Annotated[int, between(1, 1000)] = 15
    max_seq_len: Count = 0
    max_question_len: Count = 64  # ignored: transformers never uses it together with windows
    handle_impossible_answer: bool = False
    align_to_words: bool = True


class FillMaskOptions(HfTruncateOptions):
    """The most likely words, of the whole vocabulary or of `targets`."""

    top_k: Annotated[int, between(1, MAX_TOP_K)] = 5
    targets: LabelList = Field(default_factory=list)


# `field` is the name of the texts in the body


def read_classify_inputs(field: str, inputs: tuple[EncoderInput, ...], options: ClassifyOptions) -> EncodingRequest:
    return EncodingRequest(field=field, inputs=inputs, raw=bool(options.function_to_apply), truncate=options.side)


def read_embed_inputs(field: str, inputs: tuple[EncoderInput, ...], options: EmbeddingOptions) -> EncodingRequest:
    is_given = "normalize" in options.model_fields_set
    return EncodingRequest(
        field=field,
        inputs=inputs,
        prompt=options.prompt_name,
        raw=is_given and not options.normalize,
        unit=options.normalize,
        dimensions=options.dimensions,
        truncate=options.side,
    )


def read_tag_inputs(field: str, inputs: tuple[EncoderInput, ...], options: TokenClassifyOptions) -> EncodingRequest:
    windowed = options.stride >= 0
    if windowed and options.aggregation_strategy == "none":
        message = (
            "parameters.stride: needs an aggregation_strategy: tokens that two windows share would be reported twice"
        )
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
