"""What is explained of the answer to a question: the score of the chosen option, over the characters of the text."""

from collections.abc import Sequence
from dataclasses import replace

from ..core.errors import BadRequest
from ..core.model import Model
from ..explain.explain_request import (
    DescribedGoal,
    ExplainSubject,
    build_generated_subject,
    build_subject,
    check_target,
)
from ..text.encoder_inputs import EncodedInput, EncodingRequest
from ..text.generation_request import ChatMessages
from .encoder_reads import HeadRead
from .generator_reads import LabelRead
from .question import OptionScores, Question


def check_explained(model: Model, question: Question) -> None:
    """Raise BadRequest if the answers of this model are not explained."""
    if question.explain is None:
        return
    if model.task in ("label_texts", "decide"):
        message = f"{model.name} reads the options beside the text; such models are not explained"
        raise BadRequest(f"{question.field}.explain: {message}", param=f"{question.field}.explain")
    check_target(model, question.explain)


def build_label_subject(model: Model, state: str, read: LabelRead, scores: OptionScores) -> ExplainSubject:
    """The prompt of a generator with the label of the chosen option after it, whose logits are explained.

    Tokenises nothing, but looks for the text in the prompt, so it is called on a thread for texts.
    """
    path = read.tree.labels[read.order.index(scores.chosen)][0]
    conversation = ChatMessages(({"role": "user", "content": state},))
    subject = build_generated_subject(model, conversation, read.requests[0], path)
    cells = tuple(cell for described in subject.goals for cell in described.goal)
    return replace(subject, goals=(describe_option(read.question, scores, cells),))


def build_head_encoding(read: HeadRead, scores: OptionScores) -> EncodingRequest:
    """The input of a head that the score of the chosen option comes from."""
    return replace(
        read.encoding, inputs=(read.encoding.inputs[read.cells[scores.chosen][0]],), names=(), needs_offsets=True
    )


def build_head_subject(
    question: Question, read: HeadRead, scores: OptionScores, encoded: Sequence[EncodedInput], start: int
) -> ExplainSubject:
    """That input, with positions in the text that begins `start` characters into it."""
    subject = build_subject(encoded)
    goal = ((0, read.cells[scores.chosen][1]),)
    return replace(locate_text(subject, read.text_index, start), goals=(describe_option(question, scores, goal),))


def locate_text(subject: ExplainSubject, text: int, start: int) -> ExplainSubject:
    """The subject with positions only in one of its texts, from a character of it on."""
    shown = [
        replace(token, text=0, start=max(token.start - start, 0), end=token.end - start)
        if token.text == text and token.start is not None and token.end is not None and token.end > start
        else replace(token, text=None, start=None, end=None)
        for token in subject.shown_tokens
    ]
    return replace(subject, shown_tokens=tuple(shown))


def describe_option(question: Question, scores: OptionScores, cells: tuple[tuple[int, int], ...]) -> DescribedGoal:
    chosen = scores.chosen
    description = {
        "kind": "option",
        "question": question.name,
        "option": question.options[chosen].name,
        "index": chosen,
    }
    return DescribedGoal(cells, description, scores.probabilities[chosen])
