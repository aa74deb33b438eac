"""Wire objects of Hugging Face's inference tasks, and the requests they are read into.

Each task has inputs of one format and parameters of one kind; the other fields are the same for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from polyhead.models.core.label_prompt import MAX_LABELS as MAX_CLASSES

from ....core.errors import BadRequest
from ....core.model import GenerationDefaults
from ....explain.explain_request import ExplainParameters
from ....text import zero_shot
from ....text.encoder_inputs import EncoderInput, EncodingRequest
from ....text.generation_request import GenerationRequest
from ....text.label_spans import SpanSearch
from ...shared.dialect import MAX_TEXTS, EngineRequest, NeutralValues, Wire, between, max_items, must_be
from ...shared.explain_options import ExplainFields, read_explain_options
from ...shared.head_options import (
    MAX_LABEL_CHARS,
    ClassifyOptions,
    EmbeddingOptions,
    FillMaskOptions,
    HfTruncateOptions,
    LabelList,
    QuestionOptions,
    TokenClassifyOptions,
    read_classify_inputs,
    read_embed_inputs,
    read_fill_inputs,
    read_span_inputs,
    read_tag_inputs,
)
from ...shared.hf_generation import PARAMETERS_PREFIX, GenerateParameters, read_hf_parameters
from ...shared.sampling_options import HfSamplingOptions, apply_defaults, read_generation

MAX_CHOICES = 100  # of one text
MAX_TEMPLATE_CHARS = 1000  # characters

Texts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)], must_be("a string or a list of strings"), max_items(MAX_TEXTS)
]


class TextPair(Wire):
    text: str
    text_pair: str = ""


class QuestionContext(Wire):
    question: Annotated[str, Field(min_length=1)]
    context: Annotated[str, Field(min_length=1)]


class TextChoices(Wire):
    text: Annotated[str, Field(min_length=1)]
    choices: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True), max_items(MAX_CHOICES)
    ]


class SentenceComparison(Wire):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: Annotated[list[str], Field(min_length=1, fail_fast=True), max_items(MAX_TEXTS)]


TextsOrPairs = Annotated[
    str | TextPair | Annotated[list[str | TextPair], Field(fail_fast=True)],
    must_be('a string, {"text", "text_pair"} or a list of such'),
    max_items(MAX_TEXTS),
]
Questions = Annotated[
    QuestionContext | Annotated[list[QuestionContext], Field(fail_fast=True)],
    must_be('{"question", "context"} or a list of such, both not empty'),
    max_items(MAX_TEXTS),
]


TextsWithChoices = Annotated[
    TextChoices | Annotated[list[TextChoices], Field(fail_fast=True)],
    must_be('{"text", "choices"} or a list of such, none of them empty'),
    max_items(MAX_TEXTS),
]


class ServiceOptions(Wire):
    """Options of the hosted service; no effect here."""

    use_cache: bool = True
    wait_for_model: bool = False
    use_gpu: bool = False


class PipelineRequest(EngineRequest):
    """`partial`: if one of several inputs is not valid, the others are answered all the same."""

    unsupported: ClassVar[NeutralValues] = {"stream": (False,)}

    inputs: Any
    parameters: Any
    options: ServiceOptions = ServiceOptions()
    partial: bool = False

    @property
    def is_single(self) -> bool:
        """Whether there is one input, which is answered without a list around it."""
        return not isinstance(self.inputs, list)


class ExplainableRequest(PipelineRequest):
    """A task whose answer to a single input can be explained."""

    explain: ExplainFields | None = None

    def read_explain(self) -> ExplainParameters | None:
        if self.explain is not None and not self.is_single:
            raise BadRequest("explain: one input at a time, not a list", param="explain")
        return read_explain_options(self.explain) if self.explain is not None else None


class ClassifyRequest(ExplainableRequest):
    inputs: TextsOrPairs
    parameters: ClassifyOptions = ClassifyOptions()


class LabelParameters(HfTruncateOptions):
    """With `multi_label` the labels are independent; a text, or a span of it, may have several."""

    candidate_labels: LabelList
    multi_label: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels; a single string is split at commas."""
        given = self.candidate_labels
        every = given.split(",", MAX_CLASSES) if isinstance(given, str) else given
        return tuple(name for name in map(str.strip, every) if name)


class ZeroShotParameters(LabelParameters):
    hypothesis_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] = "This example is {}."


class LabelSpanParameters(LabelParameters):
    """A span needs a probability above `threshold`. Without `flat_ner` a span may lie in another one."""

    threshold: Annotated[float, between(0, 1)] = 0.5
    flat_ner: bool = True


class ZeroShotRequest(PipelineRequest):
    inputs: Texts
    parameters: ZeroShotParameters


class LabelTextRequest(PipelineRequest):
    """Texts for a model that reads the labels themselves."""

    inputs: Texts
    parameters: LabelParameters


class LabelSpanRequest(PipelineRequest):
    """Texts in which spans of labels are to be found."""

    inputs: Texts
    parameters: LabelSpanParameters


LabelledRequest = ZeroShotRequest | LabelTextRequest | LabelSpanRequest


class MultipleChoiceRequest(PipelineRequest):
    inputs: TextsWithChoices
    parameters: HfTruncateOptions = HfTruncateOptions()

    @property
    def questions(self) -> Sequence[TextChoices]:
        """Each text with its choices."""
        return [self.inputs] if isinstance(self.inputs, TextChoices) else self.inputs


class TokenClassifyRequest(ExplainableRequest):
    inputs: Texts
    parameters: TokenClassifyOptions = TokenClassifyOptions()


class QuestionRequest(ExplainableRequest):
    inputs: Questions
    parameters: QuestionOptions = QuestionOptions()


class FillMaskRequest(ExplainableRequest):
    inputs: Texts
    parameters: FillMaskOptions = FillMaskOptions()


class FeatureRequest(PipelineRequest, EmbeddingOptions):
    """Clients send the options of this task beside the inputs, or as parameters."""

    unsupported: ClassVar[NeutralValues] = {**PipelineRequest.unsupported, **EmbeddingOptions.unsupported}

    inputs: Texts
    parameters: EmbeddingOptions = EmbeddingOptions()


class SentenceSimilarityRequest(PipelineRequest):
    inputs: SentenceComparison
    parameters: HfTruncateOptions = HfTruncateOptions()


class Text2TextParameters(HfSamplingOptions):
    """Parameters of text2text tasks; generation options stand here or in `generate_parameters`."""

    unsupported: ClassVar[NeutralValues] = {
        **HfSamplingOptions.unsupported,
        "src_lang": (),
        "tgt_lang": (),
        "clean_up_tokenization_spaces": (False,),
        "truncation": ("do_not_truncate",),
    }

    generate_parameters: HfSamplingOptions | None = None


class Text2TextRequest(PipelineRequest):
    """A task that reads one text and generates another."""

    unsupported: ClassVar[NeutralValues] = {**PipelineRequest.unsupported, "partial": (False,)}

    inputs: Texts
    parameters: Text2TextParameters = Text2TextParameters()


class HfGenerateRequest(PipelineRequest):
    unsupported: ClassVar[NeutralValues] = {"partial": (False,)}

    inputs: Texts
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = False


# Reading


def list_texts(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def list_texts_or_pairs(given: str | TextPair | Sequence[str | TextPair]) -> tuple[EncoderInput, ...]:
    every = [given] if isinstance(given, str | TextPair) else given
    return tuple(one if isinstance(one, str) else read_pair(one) for one in every)


def read_pair(pair: TextPair) -> EncoderInput:
    return (pair.text, pair.text_pair) if pair.text_pair else pair.text


def read_classify(wire: ClassifyRequest) -> EncodingRequest:
    return read_classify_inputs("inputs", list_texts_or_pairs(wire.inputs), wire.parameters)


def read_token_classify(wire: TokenClassifyRequest) -> EncodingRequest:
    return read_tag_inputs("inputs", list_texts(wire.inputs), wire.parameters)


def read_question(wire: QuestionRequest) -> EncodingRequest:
    questions = [wire.inputs] if isinstance(wire.inputs, QuestionContext) else wire.inputs
    return read_span_inputs("inputs", tuple((one.question, one.context) for one in questions), wire.parameters)


def read_fill_mask(wire: FillMaskRequest) -> EncodingRequest:
    return read_fill_inputs("inputs", list_texts(wire.inputs), wire.parameters)


def read_feature(wire: FeatureRequest) -> EncodingRequest:
    top_level = wire.model_fields_set & EmbeddingOptions.model_fields.keys()
    if top_level and wire.parameters.model_fields_set:
        name = sorted(top_level)[0]
        raise BadRequest(f"{name}: give all options beside inputs, or all in parameters", param=name)
    return read_embed_inputs("inputs", list_texts(wire.inputs), wire if top_level else wire.parameters)


def read_sentence_similarity(wire: SentenceSimilarityRequest) -> EncodingRequest:
    """The source sentence comes first; the others are compared with it."""
    others = [f"inputs.sentences[{index}]" for index in range(len(wire.inputs.sentences))]
    return EncodingRequest(
        field="inputs.sentences",
        inputs=(wire.inputs.source_sentence, *wire.inputs.sentences),
        names=("inputs.source_sentence", *others),
        unit=True,
        truncate=wire.parameters.side,
    )


def read_classes(wire: LabelledRequest) -> tuple[str, ...]:
    """The labels.  Raises BadRequest if there are none, too many, or too long ones."""
    classes = wire.parameters.classes
    where, got = "parameters.candidate_labels", len(classes) if len(classes) <= MAX_CLASSES else "more"
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise BadRequest(f"{where}: must be 1 to {MAX_CLASSES} labels, got {got}", param=where)
    if any(len(name) > MAX_LABEL_CHARS for name in classes):
        raise BadRequest(f"{where}: each must have at most {MAX_LABEL_CHARS} characters", param=where)
    return classes


def read_zero_shot(wire: ZeroShotRequest) -> EncodingRequest:
    """Each text with one hypothesis for each class."""
    texts, classes, template = list_texts(wire.inputs), read_classes(wire), wire.parameters.hypothesis_template
    if zero_shot.PLACEHOLDER not in template:
        where = "parameters.hypothesis_template"
        raise BadRequest(f'{where}: must have a {{}} for the label, as in "This example is {{}}."', param=where)
    hypotheses = [zero_shot.fill_hypothesis(template, name) for name in classes]
    names = ["inputs" if wire.is_single else f"inputs[{index}]" for index in range(len(texts))]
    return EncodingRequest(
        field="inputs",
        # an empty text stays alone, so that it is rejected as empty
        inputs=tuple((text, hypothesis) if text else "" for text in texts for hypothesis in hypotheses),
        names=tuple(name for name in names for _ in hypotheses),
        raw=True,
        truncate=wire.parameters.side,
    )


def read_label_texts(wire: LabelTextRequest) -> EncodingRequest:
    return EncodingRequest(
        field="inputs",
        inputs=list_texts(wire.inputs),
        truncate=wire.parameters.side,
        labels=read_classes(wire),
    )


def read_label_spans(wire: LabelSpanRequest) -> EncodingRequest:
    """Labels that are named several times are read once."""
    options = wire.parameters
    return EncodingRequest(
        field="inputs",
        inputs=list_texts(wire.inputs),
        truncate=options.side,
        labels=tuple(dict.fromkeys(read_classes(wire))),
        span_search=SpanSearch(
            threshold=options.threshold, is_nested=not options.flat_ner, is_multiple=options.multi_label
        ),
    )


def read_multiple_choice(wire: MultipleChoiceRequest) -> EncodingRequest:
    """Each text with each of its choices."""
    names = ["inputs" if wire.is_single else f"inputs[{index}]" for index in range(len(wire.questions))]
    return EncodingRequest(
        field="inputs",
        inputs=tuple((each.text, choice) for each in wire.questions for choice in each.choices),
        names=tuple(
            f"{name}.choices[{index}]"
            for name, each in zip(names, wire.questions, strict=True)
            for index in range(len(each.choices))
        ),
        raw=True,
        truncate=wire.parameters.side,
    )


def read_text2text(wire: Text2TextRequest, defaults: GenerationDefaults) -> GenerationRequest:
    """The generation request; options that are not given are the checkpoint's."""
    options: HfSamplingOptions = wire.parameters
    prefix, nested = PARAMETERS_PREFIX, wire.parameters.generate_parameters
    if nested is not None:
        if extra := sorted(options.model_fields_set - {"generate_parameters"}):
            where = f"{prefix}{extra[0]}"
            raise BadRequest(f"{where}: give all options beside generate_parameters, or all in it", param=where)
        options, prefix = nested, f"{prefix}generate_parameters."
    generation = read_generation("inputs", list_texts(wire.inputs), apply_defaults(options, defaults), prefix)
    return replace(generation, default_max_tokens=defaults.max_tokens)


def read_hf_generate(wire: HfGenerateRequest) -> GenerationRequest:
    if wire.stream and not isinstance(wire.inputs, str):
        raise BadRequest("stream: only for one text, not for a list", param="stream")
    return read_hf_parameters(list_texts(wire.inputs), wire.parameters, stream=wire.stream)
