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
from ....text.inputs import Reading
from ....text.prompts import Continuation
from ...shared.dialect import Count, Neutral, Wire, Work, at_most, between
from ...shared.head_options import (
    Answering,
    Embedding,
    Filling,
    Labelling,
    Truncating,
    answering,
    embedding,
    filling,
    labelling,
)
from ...shared.sampling_options import Drawing, continuing, wrong
from .tensors import Given, parts, texts

MOST_TENSORS = 8
SHARED: Neutral = {
    "shared_memory_region": (),
    "shared_memory_byte_size": (),
    "shared_memory_offset": (),
}
Size = Annotated[int, between(0, (1 << 31) - 1)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


class InputParameters(Wire):
    unsupported: ClassVar[Neutral] = SHARED

    binary_data_size: Size = -1  # the data is in the JSON


class Input(Wire):
    name: Name
    datatype: Annotated[str, Field(max_length=20)]
    shape: Annotated[list[Size], Field(max_length=8)]
    parameters: InputParameters = InputParameters()
    data: Any = None


class OutputParameters(Wire):
    unsupported: ClassVar[Neutral] = {**SHARED, "classification": (0,)}

    binary_data: bool = False


class Output(Wire):
    name: Name
    parameters: OutputParameters = OutputParameters()


class Parameters(Wire):
    """Those of any request; `timeout` in microseconds."""

    unsupported: ClassVar[Neutral] = {
        "sequence_id": (0, ""),
        "sequence_start": (False,),
        "sequence_end": (False,),
        "priority": (0,),
    }

    timeout: Annotated[int, between(1000, 10**15)] = 0

    @property
    def work(self) -> Work:
        return Work(timeout=self.timeout / 1e6) if self.timeout else Work()


class TensorParameters(Parameters):
    """Those of any head."""

    binary_data_output: bool = False


class ScoreOptions(TensorParameters, Truncating):
    """`raw`: what the head says, without its closing function."""

    raw: bool = False


class EmbedOptions(TensorParameters, Embedding):
    unsupported: ClassVar[Neutral] = {**Parameters.unsupported, **Embedding.unsupported}


class LabelOptions(TensorParameters, Labelling):
    pass


class AnswerOptions(TensorParameters, Answering):
    pass


class FillOptions(TensorParameters, Filling):
    pass


class DrawOptions(Parameters, Drawing):
    """`max_tokens` is this protocol's name of max_new_tokens."""

    unsupported: ClassVar[Neutral] = {**Parameters.unsupported, **Drawing.unsupported}

    max_tokens: Count = 0
    include_stop_str_in_output: bool = False


class GenerateOptions(DrawOptions, TensorParameters):
    pass


class TextOptions(DrawOptions):
    """`stream`: piece by piece, or all of it in one event; `details`: why it ended, and its tokens."""

    stream: bool = False
    details: bool = False


class TextRequest(TextOptions):
    """The generate extension: one text, its options beside it or as parameters."""

    id: Annotated[str, Field(max_length=1000)] = ""
    text_input: Annotated[str, Field(min_length=1)]
    parameters: TextOptions = TextOptions()

    @property
    def options(self) -> TextOptions:
        beside = self.model_fields_set & TextOptions.model_fields.keys()
        if beside and self.parameters.model_fields_set:
            name = sorted(beside)[0]
            raise BadRequest(f"{name}: give all options beside text_input, or all in parameters", param=name)
        return self if beside else self.parameters


class InferRequest(Wire):
    id: Annotated[str, Field(max_length=1000)] = ""
    parameters: TensorParameters = TensorParameters()
    inputs: Annotated[list[Input], Field(min_length=1), at_most(MOST_TENSORS)]
    outputs: Annotated[list[Output], at_most(MOST_TENSORS)] = Field(default_factory=list)


class ScoreRequest(InferRequest):
    parameters: ScoreOptions = ScoreOptions()


class EmbedRequest(InferRequest):
    parameters: EmbedOptions = EmbedOptions()


class LabelRequest(InferRequest):
    parameters: LabelOptions = LabelOptions()


class AnswerRequest(InferRequest):
    parameters: AnswerOptions = AnswerOptions()


class FillRequest(InferRequest):
    parameters: FillOptions = FillOptions()


class GenerateRequest(InferRequest):
    parameters: GenerateOptions = GenerateOptions()


@dataclass(frozen=True)
class Takes:
    """The wire object of a head, and its tensors of text: one it `needs`, and a second one, which may be needed too."""

    wire: type[InferRequest]
    needs: tuple[str, ...] = ("text",)
    second: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needs, *self.second)


TAKES: Mapping[Task, Takes] = {
    "classify": Takes(ScoreRequest, second=("text_pair",)),
    "rank": Takes(ScoreRequest, second=("text_pair",)),
    "embed": Takes(EmbedRequest),
    "tag": Takes(LabelRequest),
    "span": Takes(AnswerRequest, needs=("question", "context")),
    "fill": Takes(FillRequest),
    "generate": Takes(GenerateRequest),
}


# What is asked


def columns(wire: InferRequest, takes: Takes, rest: bytes, most: int) -> list[list[str]]:
    """The texts of each tensor, in the order the head takes them; all have as many."""
    given = tensors(wire, rest)
    unknown = next((name for name in given if name not in takes.names), "")
    if unknown:
        message = f"inputs: {unknown!r} is no input of this model; it takes {', '.join(takes.names)}"
        raise BadRequest(message, param="inputs")
    missing = next((name for name in takes.needs if name not in given), "")
    if missing:
        raise BadRequest(f"inputs: the tensor {missing} is required", param="inputs")
    found = {name: texts(given[name], most) for name in takes.names if name in given}
    counts = {name: len(column) for name, column in found.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise BadRequest(f"inputs: must all have as many texts, {said}", param="inputs")
    return list(found.values())


def tensors(wire: InferRequest, rest: bytes) -> dict[str, Given]:
    sizes = [(each.name, each.parameters.binary_data_size) for each in wire.inputs]
    names = [name for name, _ in sizes]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise BadRequest(f"inputs: there are two tensors {twice!r}", param="inputs")
    for each in wire.inputs:
        if each.data is not None and each.parameters.binary_data_size >= 0:
            raise BadRequest(f"{each.name}: has data and a binary_data_size, give one", param=each.name)
    raws = parts(rest, [(name, size) for name, size in sizes if size >= 0])
    return {
        each.name: Given(each.name, each.datatype, tuple(each.shape), each.data, raws.get(each.name))
        for each in wire.inputs
    }


def read(wire: InferRequest, found: Sequence[Sequence[str]]) -> Reading:
    """Of one column of texts, or of two, which are pairs."""
    rows = tuple(found[0]) if len(found) == 1 else tuple(zip(found[0], found[1], strict=True))
    match wire:
        case EmbedRequest():
            return embedding("text", rows, wire.parameters)
        case LabelRequest():
            return labelling("text", rows, wire.parameters)
        case AnswerRequest():
            return answering("context", rows, wire.parameters)
        case FillRequest():
            return filling("text", rows, wire.parameters)
        case ScoreRequest():
            return Reading(field="text", inputs=rows, raw=wire.parameters.raw, truncate=wire.parameters.side)
    raise AssertionError("every head that reads has its request")


def read_generate(wire: GenerateRequest, prompts: Sequence[str]) -> Continuation:
    return drawn("text", tuple(prompts), wire.parameters, "parameters.")


def read_text(wire: TextRequest, *, stream: bool) -> Continuation:
    """`stream`: events are wanted, of which a client may still want one."""
    asked = wire.options
    inside = "parameters." if asked is wire.parameters else ""
    if not stream and asked.stream:
        raise wrong(inside, "stream", "one answer here; generate_stream gives it piece by piece")
    if stream and asked.num_return_sequences > 1:
        raise wrong(inside, "num_return_sequences", "one answer is streamed; generate gives several")
    if stream and asked.details:
        raise wrong(inside, "details", "only of a whole answer; generate gives them")
    continuation = drawn("text_input", (wire.text_input,), asked, inside)
    return replace(continuation, logprobs=0 if asked.details else -1)


def drawn(field: str, prompts: tuple[str, ...], asked: DrawOptions, inside: str) -> Continuation:
    limits = {asked.max_tokens, asked.max_new_tokens} - {0}
    if len(limits) > 1:
        raise wrong(inside, "max_tokens", "is another name of max_new_tokens; the two differ, give one")
    return replace(
        continuing(field, prompts, asked, inside),
        max_tokens=max(limits, default=0),
        limit=f"{inside}{'max_tokens' if asked.max_tokens else 'max_new_tokens'}",
        keep_stop=asked.include_stop_str_in_output,
    )
