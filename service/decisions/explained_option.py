"""What is explained of the answer to a question: the score of the chosen option, over the characters of the text."""

from dataclasses import replace

from ..core.model import Model
from ..explain.explain_request import (
    DescribedGoal,
    ExplainSubject,
    ShownToken,
    build_encoded_subject,
    build_generated_subject,
    build_subject,
    check_target,
    choose_method,
)
from ..text.decision_prompts import locate_rows
from ..text.encoder_inputs import EncodedInput, EncodingRequest
from ..text.generation_request import ChatMessages
from .decider_reads import DeciderRead
from .encoder_reads import HeadRead
from .generator_reads import LabelRead
from .question import DecisionRequest, OptionScores, Question


def check_explained(model: Model, question: Question) -> None:
    """Raise BadRequest if the answers of this model are not explained."""
    if question.explain is None:
        return
    check_target(model, choose_method(model, question.explain))


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
    decision: DecisionRequest, question: Question, read: HeadRead, scores: OptionScores, encoded: EncodedInput
) -> ExplainSubject:
    """That input, with positions in the text of the request."""
    subject = build_subject([encoded])
    goal = ((0, read.cells[scores.chosen][1]),)
    located = locate_state(decision, subject, encoded.text_start + read.text_start, read.text_index)
    return replace(located, goals=(describe_option(question, scores, goal),))


def build_decider_subject(
    model: Model, decision: DecisionRequest, index: int, read: DeciderRead, scores: OptionScores
) -> ExplainSubject:
    """What a model made for questions reads for one of them, with positions in the text of the request.

    Tokenises the text again, so it is called on a thread for texts.
    """
    question = decision.questions[index]
    request, column = read.find_cell(index, question, scores.chosen)
    places = locate_rows(model, read.asked)
    before = len(request.tokens) - len(places)
    shown = [
        ShownToken(
            id, model.tokenizer.piece(id), model.tokenizer.is_special(id), False, *([0, *place] if place else ())
        )
        for id, place in zip(request.tokens, [*[None] * before, *places], strict=True)
    ]
    located = locate_state(decision, build_encoded_subject(shown, request))
    return replace(located, goals=(describe_option(question, scores, ((0, column),)),))


def locate_state(
    decision: DecisionRequest, subject: ExplainSubject, text_start: int = 0, text: int = 0
) -> ExplainSubject:
    """The subject with positions in the state, which is the end of what is read of the request. This begins
    `text_start` characters into the `text`-th text of the subject. All other tokens are no part of what is explained.
    """
    first = text_start + (len(decision.instructions) + 2 if decision.instructions else 0)
    last = first + len(decision.state)

    def locate(token: ShownToken) -> ShownToken:
        if token.text == text and token.start is not None and token.end is not None:
            start, end = max(token.start, first), min(token.end, last)
            if start < end:
                return replace(token, text=0, start=start - first, end=end - first)
        return replace(token, text=None, start=None, end=None)

    return replace(subject, shown_tokens=tuple(map(locate, subject.shown_tokens)), fixes_others=True)


def describe_option(question: Question, scores: OptionScores, cells: tuple[tuple[int, int], ...]) -> DescribedGoal:
    chosen = scores.chosen
    description = {
        "kind": "option",
        "question": question.name,
        "option": question.options[chosen].name,
        "index": chosen,
    }
    return DescribedGoal(cells, description, scores.probabilities[chosen])
