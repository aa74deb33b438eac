"""Writers of Hugging Face's inference tasks.

Each text's answer has the format of a transformers pipeline.  Text classification returns a list of lists, even for a
single text, because the hosted service's clients expect it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ....core.model import Model, json_sizes
from ....text.answer_delta import AnswerDelta
from ....text.encoder_outputs import FillOutput, ScoreOutput, SpanOutput, TagOutput
from ...shared import pipeline_outputs
from ...shared.encoding_calls import LABEL_BYTES, ReplyWriter, max_label_bytes, max_vector_bytes
from ...shared.hf_generation_write import write_answers, write_hf_error
from ...shared.streaming import as_float32
from .wire import (
    ClassifyRequest,
    FeatureRequest,
    FillMaskRequest,
    HfGenerateRequest,
    LabelSpanRequest,
    LabelTextRequest,
    MultipleChoiceRequest,
    PipelineRequest,
    QuestionRequest,
    SentenceSimilarityRequest,
    Text2TextRequest,
    TokenClassifyRequest,
    ZeroShotRequest,
    list_texts,
)


def make_writer(wire: PipelineRequest, write_one: Callable[[Any], Any], max_bytes: int = 0) -> ReplyWriter:
    """A writer; a single input is answered without a list around it."""
    return ReplyWriter(write_one=write_one, write_error=write_hf_error, is_single=wire.is_single, max_bytes=max_bytes)


def classify_writer(wire: ClassifyRequest, model: Model) -> ReplyWriter:
    options = wire.parameters

    def write_one(reply: ScoreOutput) -> Any:
        scores = pipeline_outputs.apply_function(options.function_to_apply, reply.values)
        return pipeline_outputs.rank_labels(model.labels, scores, options.top_k, options.threshold)

    return ReplyWriter(
        write_one=write_one,
        write_error=write_hf_error,
        max_bytes=max_label_bytes(model.label_bytes, options.top_k or 0),
    )


def zero_shot_writer(wire: ZeroShotRequest | LabelTextRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    classes = wire.parameters.classes

    def write_one(reply: ScoreOutput) -> Any:
        return pipeline_outputs.rank_labels(classes, reply.values)

    return make_writer(wire, write_one, max_label_bytes(json_sizes(classes)))


def choice_writer(wire: MultipleChoiceRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    """The choices of each text by their index, the most probable first."""

    def write_one(reply: ScoreOutput) -> Any:
        return pipeline_outputs.rank_choices(reply.values)

    return make_writer(wire, write_one, LABEL_BYTES * max((len(each.choices) for each in wire.questions), default=0))


def token_classify_writer(wire: TokenClassifyRequest | LabelSpanRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    def write_one(reply: TagOutput) -> Any:
        return map(pipeline_outputs.write_entity, reply.entities)

    return make_writer(wire, write_one)


def question_writer(wire: QuestionRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    """One answer is an object; no answer is an object with an empty text."""

    def write_one(reply: SpanOutput) -> Any:
        spans = [pipeline_outputs.write_span(found) for found in reply.answers]
        if wire.parameters.top_k > 1:
            return spans
        return spans[0] if spans else {"score": 0.0, "start": 0, "end": 0, "answer": ""}

    return make_writer(wire, write_one)


def fill_mask_writer(wire: FillMaskRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    def write_one(reply: FillOutput) -> Any:
        return pipeline_outputs.write_masks(reply.masks)

    return make_writer(wire, write_one)


def feature_writer(wire: FeatureRequest | SentenceSimilarityRequest, model: Model) -> ReplyWriter:
    def write_one(reply: ScoreOutput) -> Any:
        return as_float32(reply.values)

    return make_writer(
        wire,
        write_one,
        max_vector_bytes(model.width if isinstance(wire, FeatureRequest) else len(wire.inputs.sentences)),
    )


# Generated text


def write_text2text(wire: Text2TextRequest, field: str, answers: Sequence[AnswerDelta]) -> list[Any]:
    """One object for each text, or a list of them if several answers are requested."""
    objects = [{field: piece.text} for piece in answers]
    per_text = len(answers) // len(list_texts(wire.inputs))
    if wire.is_single or per_text == 1:
        return objects
    return [objects[first : first + per_text] for first in range(0, len(objects), per_text)]


def write_hf_generate(wire: HfGenerateRequest, model: Model, answers: Sequence[AnswerDelta]) -> list[Any]:
    """A list for each text, since there may be several answers."""
    prompts = list_texts(wire.inputs)
    per_text = len(answers) // len(prompts)
    answers_by_text = [
        write_answers(wire.parameters, model, prompt, answers[index * per_text : (index + 1) * per_text])
        for index, prompt in enumerate(prompts)
    ]
    return answers_by_text[0] if wire.is_single else answers_by_text
