"""What the dialect of Hugging Face's inference tasks is asked: the wire object of each task, and its pure `read`.

Knows no engine and no answer.  The one idea: a task is inputs of one shape with parameters of one kind; what a wire
object holds more is the same for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ....core.errors import BadRequest
from ....core.model import Customs
from ....explain.explain_request import Why
from ....text import zero_shot
from ....text.inputs import Input, Reading
from ....text.prompts import Continuation
from ...shared.dialect import MOST_TEXTS, Neutral, Wire, Work, at_most, described
from ...shared.explain_options import Explaining, why_of
from ...shared.head_options import (
    LONGEST_WORD,
    Answering,
    Classifying,
    Embedding,
    Filling,
    Labelling,
    Truncating,
    Words,
    answering,
    classifying,
    embedding,
    filling,
    labelling,
)
from ...shared.hf_generation import INSIDE, GenerateParameters, generating
from ...shared.sampling_options import Drawing, continuing, customary

MOST_CLASSES = 100
LONGEST_TEMPLATE = 1000  # characters

Texts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)], described("a string or a list of strings"), at_most(MOST_TEXTS)
]


class Pair(Wire):
    text: str
    text_pair: str = ""


class Question(Wire):
    question: Annotated[str, Field(min_length=1)]
    context: Annotated[str, Field(min_length=1)]


class Likeness(Wire):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: Annotated[list[str], Field(min_length=1, fail_fast=True), at_most(MOST_TEXTS)]


TextsOrPairs = Annotated[
    str | Pair | Annotated[list[str | Pair], Field(fail_fast=True)],
    described('a string, {"text", "text_pair"} or a list of such'),
    at_most(MOST_TEXTS),
]
Questions = Annotated[
    Question | Annotated[list[Question], Field(fail_fast=True)],
    described('{"question", "context"} or a list of such, both not empty'),
    at_most(MOST_TEXTS),
]


class Options(Wire):
    """How the hosted service goes about it; here all three are so anyway."""

    use_cache: bool = True
    wait_for_model: bool = False
    use_gpu: bool = False


class Call(Work):
    """`partial`: of several inputs, one that cannot be read costs the others nothing."""

    unsupported: ClassVar[Neutral] = {"stream": (False,)}

    inputs: Any
    parameters: Any
    options: Options = Options()
    partial: bool = False

    @property
    def is_one(self) -> bool:
        """Whether the inputs are one, which is answered without a list around it."""
        return not isinstance(self.inputs, list)


class Explainable(Call):
    """What is answered of one input can be explained beside it."""

    explain: Explaining | None = None

    def why(self) -> Why | None:
        if self.explain is not None and not self.is_one:
            raise BadRequest("explain: one input at a time, not a list", param="explain")
        return why_of(self.explain) if self.explain is not None else None


class ClassifyCall(Explainable):
    inputs: TextsOrPairs
    parameters: Classifying = Classifying()


class ZeroShotParameters(Truncating):
    candidate_labels: Words
    hypothesis_template: Annotated[str, Field(max_length=LONGEST_TEMPLATE)] = "This example is {}."
    multi_label: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """One string has commas between them."""
        given = self.candidate_labels
        every = given.split(",", MOST_CLASSES) if isinstance(given, str) else given
        return tuple(name for name in map(str.strip, every) if name)


class ZeroShotCall(Call):
    inputs: Texts
    parameters: ZeroShotParameters


class LabelCall(Explainable):
    inputs: Texts
    parameters: Labelling = Labelling()


class AnswerCall(Explainable):
    inputs: Questions
    parameters: Answering = Answering()


class FillCall(Explainable):
    inputs: Texts
    parameters: Filling = Filling()


class EmbedCall(Call, Embedding):
    """Clients send the options of this one task beside the inputs, or as parameters."""

    unsupported: ClassVar[Neutral] = {**Call.unsupported, **Embedding.unsupported}

    inputs: Texts
    parameters: Embedding = Embedding()


class LikenessCall(Call):
    inputs: Likeness
    parameters: Truncating = Truncating()


class WriteParameters(Drawing):
    """As clients of the tasks that write have them: how it is written, here or in `generate_parameters`."""

    unsupported: ClassVar[Neutral] = {
        **Drawing.unsupported,
        "src_lang": (),
        "tgt_lang": (),
        "clean_up_tokenization_spaces": (False,),
        "truncation": ("do_not_truncate",),
    }

    generate_parameters: Drawing | None = None


class WriteCall(Call):
    """Of a task that reads a text and writes another."""

    unsupported: ClassVar[Neutral] = {**Call.unsupported, "partial": (False,)}

    inputs: Texts
    parameters: WriteParameters = WriteParameters()


class GenerateCall(Call):
    unsupported: ClassVar[Neutral] = {"partial": (False,)}

    inputs: Texts
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = False


# What is asked


def texts_of(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def texts_or_pairs(given: str | Pair | Sequence[str | Pair]) -> tuple[Input, ...]:
    every = [given] if isinstance(given, str | Pair) else given
    return tuple(one if isinstance(one, str) else pair_of(one) for one in every)


def pair_of(pair: Pair) -> Input:
    return (pair.text, pair.text_pair) if pair.text_pair else pair.text


def read_classify(wire: ClassifyCall) -> Reading:
    return classifying("inputs", texts_or_pairs(wire.inputs), wire.parameters)


def read_label(wire: LabelCall) -> Reading:
    return labelling("inputs", texts_of(wire.inputs), wire.parameters)


def read_answer(wire: AnswerCall) -> Reading:
    asked = [wire.inputs] if isinstance(wire.inputs, Question) else wire.inputs
    return answering("inputs", tuple((one.question, one.context) for one in asked), wire.parameters)


def read_fill(wire: FillCall) -> Reading:
    return filling("inputs", texts_of(wire.inputs), wire.parameters)


def read_embed(wire: EmbedCall) -> Reading:
    beside = wire.model_fields_set & Embedding.model_fields.keys()
    if beside and wire.parameters.model_fields_set:
        name = sorted(beside)[0]
        raise BadRequest(f"{name}: give all options beside inputs, or all in parameters", param=name)
    return embedding("inputs", texts_of(wire.inputs), wire if beside else wire.parameters)


def read_likeness(wire: LikenessCall) -> Reading:
    """The sentence first that the others are compared with."""
    others = [f"inputs.sentences[{index}]" for index in range(len(wire.inputs.sentences))]
    return Reading(
        field="inputs.sentences",
        inputs=(wire.inputs.source_sentence, *wire.inputs.sentences),
        names=("inputs.source_sentence", *others),
        unit=True,
        truncate=wire.parameters.side,
    )


def classes_of(wire: ZeroShotCall) -> tuple[str, ...]:
    """Raises BadRequest where there are none, too many or too long ones."""
    classes = wire.parameters.classes
    where, got = "parameters.candidate_labels", len(classes) if len(classes) <= MOST_CLASSES else "more"
    if not 1 <= len(classes) <= MOST_CLASSES:
        raise BadRequest(f"{where}: must be 1 to {MOST_CLASSES} labels, got {got}", param=where)
    if any(len(name) > LONGEST_WORD for name in classes):
        raise BadRequest(f"{where}: each must have at most {LONGEST_WORD} characters", param=where)
    return classes


def read_zero_shot(wire: ZeroShotCall) -> Reading:
    """Each text with one hypothesis for each class."""
    texts, classes, template = texts_of(wire.inputs), classes_of(wire), wire.parameters.hypothesis_template
    if zero_shot.HOLE not in template:
        where = "parameters.hypothesis_template"
        raise BadRequest(f'{where}: must have a {{}} for the label, as in "This example is {{}}."', param=where)
    hypotheses = [zero_shot.hypothesis(template, name) for name in classes]
    names = ["inputs" if wire.is_one else f"inputs[{index}]" for index in range(len(texts))]
    return Reading(
        field="inputs",
        # nothing follows from an empty text, and it is no pair
        inputs=tuple((text, hypothesis) if text else "" for text in texts for hypothesis in hypotheses),
        names=tuple(name for name in names for _ in hypotheses),
        raw=True,
        truncate=wire.parameters.side,
    )


def read_write(wire: WriteCall, customs: Customs) -> Continuation:
    """What is not said is as the checkpoint has it."""
    options: Drawing = wire.parameters
    inside, within = INSIDE, wire.parameters.generate_parameters
    if within is not None:
        if beside := sorted(options.model_fields_set - {"generate_parameters"}):
            where = f"{inside}{beside[0]}"
            raise BadRequest(f"{where}: give all options beside generate_parameters, or all in it", param=where)
        options, inside = within, f"{inside}generate_parameters."
    asked = continuing("inputs", texts_of(wire.inputs), customary(options, customs), inside)
    return replace(asked, usual=customs.most)


def read_generate(wire: GenerateCall) -> Continuation:
    if wire.stream and not isinstance(wire.inputs, str):
        raise BadRequest("stream: only for one text, not for a list", param="stream")
    return generating(texts_of(wire.inputs), wire.parameters, stream=wire.stream)
