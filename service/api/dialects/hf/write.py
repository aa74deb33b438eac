"""What the dialect of Hugging Face's inference tasks answers: the pure writing of each task.

Knows no engine.  The one idea: each text's answer is what a pipeline of transformers says of it; labels of texts have a
list for each text, even for a single one, because that is what the service's own clients take apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ....core.model import Model
from ....text.detokenizer import Piece
from ....text.pipelines import Found, Guessed, Scores, Tagged
from ...shared import pipeline_outputs as findings
from ...shared.encoding_calls import Writing, most_labels, most_numbers
from ...shared.hf_generation_write import answered, write_error
from ...shared.streaming import float32
from .wire import (
    AnswerCall,
    Call,
    ClassifyCall,
    EmbedCall,
    FillCall,
    GenerateCall,
    LabelCall,
    LikenessCall,
    WriteCall,
    ZeroShotCall,
    texts_of,
)


def writing(wire: Call, one: Callable[[Any], Any], most: int = 0) -> Writing:
    """One input is answered without a list around it."""
    return Writing(one=one, error=write_error, alone=wire.is_one, most=most)


def write_classify(wire: ClassifyCall, model: Model) -> Writing:
    options = wire.parameters

    def one(reply: Scores) -> Any:
        scores = findings.applied(options.function_to_apply, reply.values)
        return findings.ranked(model.labels, scores, options.top_k, options.threshold)

    return Writing(one=one, error=write_error, most=most_labels(model.labels, options.top_k))


def write_zero_shot(wire: ZeroShotCall, model: Model) -> Writing:  # noqa: ARG001
    classes = wire.parameters.classes

    def one(reply: Scores) -> Any:
        return findings.ranked(classes, reply.values)

    return writing(wire, one, most_labels(classes))


def write_label(wire: LabelCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Tagged) -> Any:
        return map(findings.entity, reply.entities)

    return writing(wire, one)


def write_answer(wire: AnswerCall, model: Model) -> Writing:  # noqa: ARG001
    """One answer is no list; that there is none is an empty one."""

    def one(reply: Found) -> Any:
        spans = [findings.span(found) for found in reply.answers]
        if wire.parameters.top_k > 1:
            return spans
        return spans[0] if spans else {"score": 0.0, "start": 0, "end": 0, "answer": ""}

    return writing(wire, one)


def write_fill(wire: FillCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Guessed) -> Any:
        return findings.words(reply.masks)

    return writing(wire, one)


def write_vector(wire: EmbedCall | LikenessCall, model: Model) -> Writing:
    def one(reply: Scores) -> Any:
        return float32(reply.values)

    return writing(wire, one, most_numbers(model.width if isinstance(wire, EmbedCall) else len(wire.inputs.sentences)))


# Generated text


def write_text(wire: WriteCall, field: str, answers: Sequence[Piece]) -> list[Any]:
    """An object for each text, or a list of them where several answers are asked for."""
    written = [{field: piece.text} for piece in answers]
    tries = len(answers) // len(texts_of(wire.inputs))
    if wire.is_one or tries == 1:
        return written
    return [written[first : first + tries] for first in range(0, len(written), tries)]


def write_generate(wire: GenerateCall, model: Model, answers: Sequence[Piece]) -> list[Any]:
    """A list for a text, since there may be several answers to it."""
    prompts = texts_of(wire.inputs)
    tries = len(answers) // len(prompts)
    written = [
        answered(wire.parameters, model, prompt, answers[index * tries : (index + 1) * tries])
        for index, prompt in enumerate(prompts)
    ]
    return written[0] if wire.is_one else written
