"""What the Open Inference Protocol is asked: its wire objects, and what each head reads from the tensors.

Knows no engine and no answer.  The one idea: a request is the same for all heads but for the options among its
parameters, and for which tensors of text it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ....core.errors import BadRequest
from ....core.request import Task
from ....text.encoder_inputs import EncodingRequest
from ....text.prompts import GenerationRequest
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
SHARED_MEMORY_FIELDS: NeutralValues = {
    "shared_memory_region": (),
    "shared_memory_byte_size": (),
    "shared_memory_offset": (),
}
Size = Annotated[int, between(0, (1 << 31) - 1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


class InputParameters(Wire):
    unsupported: ClassVar[NeutralValues] = SHARED_MEMORY_FIELDS

    binary_data_size: Size = -1  # the data is in the JSON


class InferInput(Wire):
    name: Name
    datatype: Annotated[str, Field(max_length=20)]
    shape: Annotated[list[Size], Field(max_length=8)]
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(Wire):
    unsupported: ClassVar[NeutralValues] = {**SHARED_MEMORY_FIELDS, "classification": (0,)}

    binary_data: bool = False


class InferOutput(Wire):
    name: Name
    parameters: OutputParameters = OutputParameters()


class OipParameters(Wire):
    """Those of any request; `timeout` in microseconds."""

    unsupported: ClassVar[NeutralValues] = {
        "sequence_id": (0, ""),
        "sequence_start": (False,),
        "sequence_end": (False,),
        "priority": (0,),
    }

    timeout: Annotated[int, between(1000, 10**15)] = 0

    @property
    def engine_request(self) -> EngineRequest:
        return EngineRequest(timeout=self.timeout / 1e6) if self.timeout else EngineRequest()


class TensorParameters(OipParameters):
    """Those of any head."""

    binary_data_output: bool = False


class ScoreOptions(TensorParameters, HfTruncateOptions):
    """`raw`: what the head says, without its closing function."""

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
    """`max_tokens` is this protocol's name of max_new_tokens."""

    unsupported: ClassVar[NeutralValues] = {**OipParameters.unsupported, **HfSamplingOptions.unsupported}

    max_tokens: Count = 0
    include_stop_str_in_output: bool = False


class GenerateOptions(OipSamplingOptions, TensorParameters):
    pass


class OipTextOptions(OipSamplingOptions):
    """`stream`: piece by piece, or all of it in one event; `details`: why it ended, and its tokens."""

    stream: bool = False
    details: bool = False


class TextRequest(OipTextOptions):
    """The generate extension: one text, its options beside it or as parameters."""

    id: Annotated[str, Field(max_length=1000)] = ""
    text_input: Annotated[str, Field(min_length=1)]
    parameters: OipTextOptions = OipTextOptions()

    @property
    def options(self) -> OipTextOptions:
        beside = self.model_fields_set & OipTextOptions.model_fields.keys()
        if beside and self.parameters.model_fields_set:
            name = sorted(beside)[0]
            raise BadRequest(f"{name}: give all options beside text_input, or all in parameters", param=name)
        return self if beside else self.parameters


class InferRequest(Wire):
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
    """The wire object of a head, and its tensors of text: one it `needs`, and a second one, which may be needed too."""

    wire: type[InferRequest]
    required: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


HEAD_INPUTS: Mapping[Task, HeadInputs] = {
    "classify": HeadInputs(ScoreRequest, optional=("text_pair",)),
    "rank": HeadInputs(ScoreRequest, optional=("text_pair",)),
    "embed": HeadInputs(OipEmbedRequest),
    "tag": HeadInputs(LabelRequest),
    "span": HeadInputs(AnswerRequest, required=("question", "context")),
    "fill": HeadInputs(FillRequest),
    "generate": HeadInputs(OipGenerateRequest),
}


# What is asked


def read_columns(wire: InferRequest, takes: HeadInputs, rest: bytes, most: int) -> list[list[str]]:
    """The texts of each tensor, in the order the head takes them; all have as many."""
    given = read_tensors(wire, rest)
    unknown = next((name for name in given if name not in takes.names), "")
    if unknown:
        message = f"inputs: {unknown!r} is no input of this model; it takes {', '.join(takes.names)}"
        raise BadRequest(message, param="inputs")
    missing = next((name for name in takes.required if name not in given), "")
    if missing:
        raise BadRequest(f"inputs: the tensor {missing} is required", param="inputs")
    found = {name: read_texts(given[name], most) for name in takes.names if name in given}
    counts = {name: len(column) for name, column in found.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise BadRequest(f"inputs: must all have as many texts, {said}", param="inputs")
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
    """Of one column of texts, or of two, which are pairs."""
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
    raise AssertionError("every head that reads has its request")


def read_oip_generate(wire: OipGenerateRequest, prompts: Sequence[str]) -> GenerationRequest:
    return build_continuation("text", tuple(prompts), wire.parameters, "parameters.")


def read_text_request(wire: TextRequest, *, stream: bool) -> GenerationRequest:
    """`stream`: events are wanted, of which a client may still want one."""
    asked = wire.options
    inside = "parameters." if asked is wire.parameters else ""
    if not stream and asked.stream:
        raise option_error(inside, "stream", "one answer here; generate_stream gives it piece by piece")
    if stream and asked.num_return_sequences > 1:
        raise option_error(inside, "num_return_sequences", "one answer is streamed; generate gives several")
    if stream and asked.details:
        raise option_error(inside, "details", "only of a whole answer; generate gives them")
    continuation = build_continuation("text_input", (wire.text_input,), asked, inside)
    return replace(continuation, logprobs=0 if asked.details else -1)


def build_continuation(
    field: str, prompts: tuple[str, ...], asked: OipSamplingOptions, inside: str
) -> GenerationRequest:
    limits = {asked.max_tokens, asked.max_new_tokens} - {0}
    if len(limits) > 1:
        raise option_error(inside, "max_tokens", "is another name of max_new_tokens; the two differ, give one")
    return replace(
        read_generation(field, prompts, asked, inside),
        max_tokens=max(limits, default=0),
        limit_field=f"{inside}{'max_tokens' if asked.max_tokens else 'max_new_tokens'}",
        keep_stop=asked.include_stop_str_in_output,
    )
