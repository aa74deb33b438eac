"""Wire objects of the Open Inference Protocol, and the requests they are read into.

Requests differ by head only in the options among their parameters and in their text tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ....core.errors import BadRequest
from ....core.request import Task
from ....text.encoder_inputs import EncodingRequest
from ....text.generation_request import GenerationRequest
from ...shared.dialect import Count, EngineRequest, NeutralValues, Wire, between, max_items
from ...shared.head_options import (
    EmbeddingOptions,
    FillMaskOptions,
    HfTruncateOptions,
    QuestionOptions,
    TokenClassifyOptions,
    read_embed_inputs,
    read_fill_inputs,
    read_span_inputs,
    read_tag_inputs,
)
from ...shared.sampling_options import HfSamplingOptions, option_error, read_generation
from .tensors import InputTensor, read_texts, split_tensors

MAX_TENSORS = 8
DEFAULT_PRIORITY, LOWEST_PRIORITY = 101, 201  # Triton's 1 to 201 are the engine's 100 to -100
SHARED_MEMORY_FIELDS: NeutralValues = {
    "shared_memory_region": (),
    "shared_memory_byte_size": (),
    "shared_memory_offset": (),
}
Size = Annotated[int, between(0, (1 << 31) - 1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


class InputParameters(Wire):
    unsupported: ClassVar[NeutralValues] = SHARED_MEMORY_FIELDS

    binary_data_size: Size = -1  # -1: the data is in the JSON


class InferInput(Wire):
    name: Name
    datatype: Annotated[str, Field(max_length=20)]
    shape: Annotated[list[Size], Field(max_length=8)]
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(Wire):
    """`classification`: so many of the largest numbers of each row, as texts "value:index:label"; 0: the numbers."""

    unsupported: ClassVar[NeutralValues] = SHARED_MEMORY_FIELDS

    binary_data: bool = False
    classification: Size = 0


class InferOutput(Wire):
    name: Name
    parameters: OutputParameters = OutputParameters()


class OipParameters(Wire):
    """Parameters of all requests; `timeout` is in microseconds, and of `priority` 1 goes first, 0 is the default."""

    unsupported: ClassVar[NeutralValues] = {
        "sequence_id": (0, ""),
        "sequence_start": (False,),
        "sequence_end": (False,),
    }

    timeout: Annotated[int, between(1000, 10**15)] = 0
    priority: Annotated[int, between(0, LOWEST_PRIORITY)] = 0

    @property
    def engine_request(self) -> EngineRequest:
        priority = DEFAULT_PRIORITY - (self.priority or DEFAULT_PRIORITY)
        if not self.timeout:
            return EngineRequest(priority=priority)
        return EngineRequest(priority=priority, timeout=self.timeout / 1e6)


class TensorParameters(OipParameters):
    """Parameters of all heads."""

    binary_data_output: bool = False


class ScoreOptions(TensorParameters, HfTruncateOptions):
    """`raw`: the head's scores without its activation function."""

    raw: bool = False


class EmbedOptions(TensorParameters, EmbeddingOptions):
    unsupported: ClassVar[NeutralValues] = {**OipParameters.unsupported, **EmbeddingOptions.unsupported}


class LabelOptions(TensorParameters, TokenClassifyOptions):
    pass


class AnswerOptions(TensorParameters, QuestionOptions):
    pass


class FillOptions(TensorParameters, FillMaskOptions):
    pass


class OipSamplingOptions(OipParameters, HfSamplingOptions):
    """`max_tokens` is this protocol's name for max_new_tokens."""

    unsupported: ClassVar[NeutralValues] = {**OipParameters.unsupported, **HfSamplingOptions.unsupported}

    max_tokens: Count = 0
    include_stop_str_in_output: bool = False


class GenerateOptions(OipSamplingOptions, TensorParameters):
    pass


class OipTextOptions(OipSamplingOptions):
    """`stream`: many events, or one with the whole text.  `details`: finish reason and tokens."""

    stream: bool = False
    details: bool = False


class TextRequest(OipTextOptions):
    """The generate extension: one text, with its options beside it or as parameters."""

    id: Annotated[str, Field(max_length=1000)] = ""
    text_input: Annotated[str, Field(min_length=1)]
    parameters: OipTextOptions = OipTextOptions()

    @property
    def options(self) -> OipTextOptions:
        top_level = self.model_fields_set & OipTextOptions.model_fields.keys()
        if top_level and self.parameters.model_fields_set:
            name = sorted(top_level)[0]
            raise BadRequest(f"{name}: give all options beside text_input, or all in parameters", param=name)
        return self if top_level else self.parameters


class InferRequest(Wire):
    model_name: str = ""  # KServe's client repeats the name in the path
    id: Annotated[str, Field(max_length=1000)] = ""
    parameters: TensorParameters = TensorParameters()
    inputs: Annotated[list[InferInput], Field(min_length=1), max_items(MAX_TENSORS)]
    outputs: Annotated[list[InferOutput], max_items(MAX_TENSORS)] = Field(default_factory=list)


class ScoreRequest(InferRequest):
    parameters: ScoreOptions = ScoreOptions()


class OipEmbedRequest(InferRequest):
    parameters: EmbedOptions = EmbedOptions()


class LabelRequest(InferRequest):
    parameters: LabelOptions = LabelOptions()


class AnswerRequest(InferRequest):
    parameters: AnswerOptions = AnswerOptions()


class FillRequest(InferRequest):
    parameters: FillOptions = FillOptions()


class OipGenerateRequest(InferRequest):
    parameters: GenerateOptions = GenerateOptions()


@dataclass(frozen=True)
class HeadInputs:
    """The wire object of a head and the names of its text tensors: `required`, and an `optional` second one."""

    wire: type[InferRequest]
    required: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


HEAD_INPUTS: Mapping[Task, HeadInputs] = {
    "classify": HeadInputs(ScoreRequest, optional=("text_pair",)),
    "rank": HeadInputs(ScoreRequest, optional=("text_pair",)),
    "choose": HeadInputs(ScoreRequest, required=("text", "text_pair")),
    "embed": HeadInputs(OipEmbedRequest),
    "tag": HeadInputs(LabelRequest),
    "span": HeadInputs(AnswerRequest, required=("question", "context")),
    "fill": HeadInputs(FillRequest),
    "generate": HeadInputs(OipGenerateRequest),
}


# Reading


def read_columns(wire: InferRequest, head_inputs: HeadInputs, rest: bytes, max_texts: int) -> list[list[str]]:
    """The texts of each tensor, in the order of the head's inputs; all have the same length."""
    given = read_tensors(wire, rest)
    unknown = next((name for name in given if name not in head_inputs.names), "")
    if unknown:
        message = f"inputs: {unknown!r} is no input of this model; it takes {', '.join(head_inputs.names)}"
        raise BadRequest(message, param="inputs")
    missing = next((name for name in head_inputs.required if name not in given), "")
    if missing:
        raise BadRequest(f"inputs: the tensor {missing} is required", param="inputs")
    found = {name: read_texts(given[name], max_texts) for name in head_inputs.names if name in given}
    counts = {name: len(column) for name, column in found.items()}
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise BadRequest(f"inputs: must all have as many texts, {counts_text}", param="inputs")
    return list(found.values())


def read_tensors(wire: InferRequest, rest: bytes) -> dict[str, InputTensor]:
    sizes = [(each.name, each.parameters.binary_data_size) for each in wire.inputs]
    names = [name for name, _ in sizes]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise BadRequest(f"inputs: there are two tensors {twice!r}", param="inputs")
    for each in wire.inputs:
        if each.data is not None and each.parameters.binary_data_size >= 0:
            raise BadRequest(f"{each.name}: has data and a binary_data_size, give one", param=each.name)
    raws = split_tensors(rest, [(name, size) for name, size in sizes if size >= 0])
    return {
        each.name: InputTensor(each.name, each.datatype, tuple(each.shape), each.data, raws.get(each.name))
        for each in wire.inputs
    }


def read_infer(wire: InferRequest, found: Sequence[Sequence[str]]) -> EncodingRequest:
    """One column of texts, or two columns that form pairs."""
    rows = tuple(found[0]) if len(found) == 1 else tuple(zip(found[0], found[1], strict=True))
    match wire:
        case OipEmbedRequest():
            return read_embed_inputs("text", rows, wire.parameters)
        case LabelRequest():
            return read_tag_inputs("text", rows, wire.parameters)
        case AnswerRequest():
            return read_span_inputs("context", rows, wire.parameters)
        case FillRequest():
            return read_fill_inputs("text", rows, wire.parameters)
        case ScoreRequest():
            return EncodingRequest(field="text", inputs=rows, raw=wire.parameters.raw, truncate=wire.parameters.side)
    raise AssertionError("a request without a reader")


def read_oip_generate(wire: OipGenerateRequest, prompts: Sequence[str]) -> GenerationRequest:
    return build_generation("text", tuple(prompts), wire.parameters, "parameters.")


def read_text_request(wire: TextRequest, *, stream: bool) -> GenerationRequest:
    """`stream`: the route that streams; its client may still request a single event."""
    options = wire.options
    prefix = "parameters." if options is wire.parameters else ""
    if not stream and options.stream:
        raise option_error(prefix, "stream", "one answer here; generate_stream gives it piece by piece")
    if stream and options.num_return_sequences > 1:
        raise option_error(prefix, "num_return_sequences", "one answer is streamed; generate gives several")
    if stream and options.details:
        raise option_error(prefix, "details", "only of a whole answer; generate gives them")
    generation = build_generation("text_input", (wire.text_input,), options, prefix)
    return replace(generation, logprobs=0 if options.details else -1)


def build_generation(
    field: str, prompts: tuple[str, ...], options: OipSamplingOptions, prefix: str
) -> GenerationRequest:
    limits = {options.max_tokens, options.max_new_tokens} - {0}
    if len(limits) > 1:
        raise option_error(prefix, "max_tokens", "is another name of max_new_tokens; the two differ, give one")
    return replace(
        read_generation(field, prompts, options, prefix),
        max_tokens=max(limits, default=0),
        limit_field=f"{prefix}{'max_tokens' if options.max_tokens else 'max_new_tokens'}",
        keep_stop=options.include_stop_str_in_output,
    )
