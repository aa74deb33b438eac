"""What the dialect of Hugging Face's inference tasks answers: the pure writing of each task.

Knows no engine.  The one idea: each text's answer is what a pipeline of transformers says of it; labels of texts have a
list for each text, even for a single one, because that is what the service's own clients take apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ....core.model import Model
from ....text.detokenizer import AnswerDelta
from ....text.encoder_outputs import FillOutput, ScoreOutput, SpanOutput, TagOutput
from ...shared import pipeline_outputs as findings
from ...shared.encoding_calls import ReplyWriter, max_label_bytes, max_vector_bytes
from ...shared.hf_generation_write import write_answers, write_hf_error
from ...shared.streaming import as_float32
from .wire import (
    ClassifyRequest,
    FeatureRequest,
    FillMaskRequest,
    HfGenerateRequest,
    PipelineRequest,
    QuestionRequest,
    SentenceSimilarityRequest,
    Text2TextRequest,
    TokenClassifyRequest,
    ZeroShotRequest,
    list_texts,
)


def make_writer(wire: PipelineRequest, one: Callable[[Any], Any], most: int = 0) -> ReplyWriter:
    """One input is answered without a list around it."""
    return ReplyWriter(write_one=one, write_error=write_hf_error, is_single=wire.is_single, max_bytes=most)


def classify_writer(wire: ClassifyRequest, model: Model) -> ReplyWriter:
    options = wire.parameters

    def one(reply: ScoreOutput) -> Any:
        scores = findings.apply_function(options.function_to_apply, reply.values)
        return findings.rank_labels(model.labels, scores, options.top_k, options.threshold)

    return ReplyWriter(
        write_one=one, write_error=write_hf_error, max_bytes=max_label_bytes(model.labels, options.top_k)
    )


def zero_shot_writer(wire: ZeroShotRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    classes = wire.parameters.classes

    def one(reply: ScoreOutput) -> Any:
        return findings.rank_labels(classes, reply.values)

    return make_writer(wire, one, max_label_bytes(classes))


def token_classify_writer(wire: TokenClassifyRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    def one(reply: TagOutput) -> Any:
        return map(findings.write_entity, reply.entities)

    return make_writer(wire, one)


def question_writer(wire: QuestionRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    """One answer is no list; that there is none is an empty one."""

    def one(reply: SpanOutput) -> Any:
        spans = [findings.write_span(found) for found in reply.answers]
        if wire.parameters.top_k > 1:
            return spans
        return spans[0] if spans else {"score": 0.0, "start": 0, "end": 0, "answer": ""}

    return make_writer(wire, one)


def fill_mask_writer(wire: FillMaskRequest, model: Model) -> ReplyWriter:  # noqa: ARG001
    def one(reply: FillOutput) -> Any:
        return findings.write_masks(reply.masks)

    return make_writer(wire, one)


def feature_writer(wire: FeatureRequest | SentenceSimilarityRequest, model: Model) -> ReplyWriter:
    def one(reply: ScoreOutput) -> Any:
        return as_float32(reply.values)

    return make_writer(
        wire, one, max_vector_bytes(model.width if isinstance(wire, FeatureRequest) else len(wire.inputs.sentences))
    )


# Generated text


def write_text2text(wire: Text2TextRequest, field: str, answers: Sequence[AnswerDelta]) -> list[Any]:
    """An object for each text, or a list of them where several answers are asked for."""
    written = [{field: piece.text} for piece in answers]
    tries = len(answers) // len(list_texts(wire.inputs))
    if wire.is_single or tries == 1:
        return written
    return [written[first : first + tries] for first in range(0, len(written), tries)]


def write_hf_generate(wire: HfGenerateRequest, model: Model, answers: Sequence[AnswerDelta]) -> list[Any]:
    """A list for a text, since there may be several answers to it."""
    prompts = list_texts(wire.inputs)
    tries = len(answers) // len(prompts)
    written = [
        write_answers(wire.parameters, model, prompt, answers[index * tries : (index + 1) * tries])
        for index, prompt in enumerate(prompts)
    ]
    return written[0] if wire.is_single else written
