"""Explanation requests: from the client's options and the model's answer to the engine's request.

The answer is computed first. Its label, span or tokens are then located as cells (row, column) of the head's scores,
which are the goals that the explanation attributes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, cast

from polyhead.models.core.decision_prompt import PromptKind
from polyhead.models.tokenizer import Encoding

from ..core.errors import BadRequest, TooLong
from ..core.model import Model
from ..core.request import Encode, ExplainMethod, ExplainTextRequest, Generate, Goal, Task, Terms
from ..text.encoder_inputs import OUTSIDE_LABELS, EncodedInput, EncodingRequest
from ..text.encoder_outputs import EncoderOutput, FillOutput, ScoreOutput, SpanOutput, TagOutput
from ..text.entities import Entity
from ..text.generation_request import ChatMessages, Prompt

Baseline = Literal["auto", "pad", "mask", "unk", "eos", "zero"]
AttentionLayout = Mapping[str, tuple[int, int]]  # layers and heads of each kind of attention
ATTENTION_METHODS: tuple[ExplainMethod, ...] = ("attention", "attention_rollout", "attention_flow")
PATH_METHODS: tuple[ExplainMethod, ...] = ("attention_rollout", "attention_flow")
MAX_FLOW_TOKENS = 64  # tokens: the flow of each is computed, and the time grows with the third power
MAX_ATTENTION_WEIGHTS = 1 << 23  # computed for one explanation, however few of them the response has
MAX_LABEL_QUOTE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """The part of an answer to be explained. TARGET_FIELDS lists the fields that each task uses."""

    label: str | int | None = None
    start: int | None = None
    end: int | None = None
    token: int | None = None
    mask: int | None = None
    word: str | None = None
    text: str | None = None

    @property
    def given_fields(self) -> list[str]:
        return [name for name in self.__slots__ if getattr(self, name) is not None]


NO_TARGET = TargetSpec()
TARGET_FIELDS: Mapping[Task, tuple[str, ...]] = {
    "classify": ("label",),
    "rank": (),
    "choose": (),
    "tag": ("label", "start", "end", "token"),
    "span": ("start", "end"),
    "fill": ("mask", "word"),
    "embed": ("text",),
    "generate": ("text",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainParameters:
    """How an answer is to be explained. `top_k`: only the largest weights of each row are in the response; 0: all.
    `as_base64`: weights are encoded in base64, with `half_precision` as float16. `suits_model`: the method is not
    `method`, but the one that suits the model (see choose_method). `reports_progress`: the share of the work
    that is done is sent to the client.
    """

    method: ExplainMethod = "attention"
    target: TargetSpec = NO_TARGET
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    top_k: int = 0
    as_base64: bool = False
    half_precision: bool = False
    steps: int = 50
    baseline: Baseline = "auto"
    window: int = 1
    max_tokens: int = 16
    suits_model: bool = False
    reports_progress: bool = False

    @property
    def is_attribution(self) -> bool:
        """Whether the method attributes a score to tokens; the others return attention weights."""
        return self.method not in ATTENTION_METHODS

    @property
    def needs_target(self) -> bool:
        return self.is_attribution or self.method in PATH_METHODS


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token in the response: the index of the caller's text that it is in, and its code points [start, end); None if
    it is in none.
    """

    id: int
    piece: str
    special: bool
    output: bool = False
    text: int | None = None
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class DescribedGoal:
    """A goal with its description for the response. `probability`: as the answer has it; None if it does not."""

    goal: Goal
    description: Mapping[str, Any]
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class ExplainSubject:
    """What is explained: the tokens of the response, the tokens for the network, and the goals. `label_rows`,
    `text_rows` and `question` are as in core.request.Encode.

    Of the answer to a question only the text is explained. With `fixes_others` tokens that are not from the text
    (questions, options, hypotheses) are the same in the baseline.
    """

    shown_tokens: tuple[ShownToken, ...]
    tokens: tuple[int, ...]
    segments: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    compared_tokens: tuple[int, ...] = ()
    goals: tuple[DescribedGoal, ...] = ()
    output: str = ""
    label_rows: tuple[int, ...] = ()
    text_rows: tuple[int, ...] = ()
    question: PromptKind = "choice"
    fixes_others: bool = False

    @property
    def kept_rows(self) -> frozenset[int]:
        """The rows that the baseline keeps: those of special tokens, which are not from the caller's text, and perhaps
        of all others that are not.
        """
        return frozenset(
            index
            for index, token in enumerate(self.shown_tokens)
            if token.special or (self.fixes_others and token.text is None)
        )


def choose_method(model: Model, parameters: ExplainParameters) -> ExplainParameters:
    """Return the parameters with the method that suits the model and the request, where none is given.

    It is integrated gradients. For a generator it is gradients times input, because its scores jump along the path from
    a baseline, so that integrated gradients seldom add up. It is attention weights if an option of these is given
    (layers, heads, top_k), and for a vector that is not compared with another.
    """
    if not parameters.suits_model:
        return parameters
    method: ExplainMethod = "gradient_x_input" if model.task == "generate" else "integrated_gradients"
    selects_weights = parameters.layers or parameters.heads or parameters.top_k
    if selects_weights or (model.task == "embed" and parameters.target.text is None):
        method = "attention"
    return replace(parameters, method=method, suits_model=False)


def check_target(model: Model, parameters: ExplainParameters) -> None:
    """Raise BadRequest if the target does not fit the model's task, or if the model is not explained."""
    unknown = {
        "has embeddings of tokens and no layers": model.is_static,
        "has a vector for each token": model.late is not None,
        "reads pairs in a prompt of its own": model.pair_prompt is not None,
        "does not pool the tokens of a prompt": model.excludes_prompt,
    }
    for what, applies in unknown.items():
        if applies:
            raise BadRequest(f"{model.name} {what}; such models are not explained", param="explain")
    fields = TARGET_FIELDS.get(model.task, ())
    for name in parameters.target.given_fields:
        if name not in fields:
            has = f"there it has {', '.join(fields)}" if fields else "there is nothing to choose"
            message = f"target.{name}: a model of the task {model.task} is not asked so; {has}"
            raise BadRequest(message, param=f"target.{name}")
    if model.task == "embed" and parameters.is_attribution and parameters.target.text is None:
        message = "target.text: a vector is explained by what it is compared with: give the other text"
        raise BadRequest(message, param="target.text")
    for first, second in (("start", "end"), ("end", "start")):
        if first in parameters.target.given_fields and second not in parameters.target.given_fields:
            raise BadRequest(f"target.{second}: must stand beside target.{first}", param=f"target.{second}")


def check_context(model: Model, before: int, answer: int) -> None:
    """Raise TooLong if so long an answer after so long a prompt exceeds the model's context."""
    if before + answer > model.max_tokens:
        message = f"target.text: {answer} tokens after {before}, the model takes {model.max_tokens}"
        raise TooLong(message, param="target.text")


# Goals of encoders


def build_encoding_call(model: Model, given: str | tuple[str, str], parameters: ExplainParameters) -> EncodingRequest:
    """Return the call that computes the answer, with the second text of a similarity."""
    compared = [parameters.target.text] if model.task == "embed" and parameters.target.text is not None else []
    inputs, names = (given, *compared), ("input", *("target.text" for _ in compared))
    words = (parameters.target.word,) if parameters.target.word is not None else ()
    return EncodingRequest(
        field="input",
        inputs=inputs,
        names=names,
        ignored_labels=frozenset(),
        targets=words,
        needs_offsets=True,
        top_k=1,
    )


def build_subject(reads: Sequence[EncodedInput]) -> ExplainSubject:
    first = reads[0]
    [request, *_] = first.requests
    subject = build_encoded_subject(show_tokens(first.parts[0]), request)
    return replace(subject, compared_tokens=reads[1].requests[0].tokens) if len(reads) > 1 else subject


def build_encoded_subject(shown: Sequence[ShownToken], request: Encode) -> ExplainSubject:
    return ExplainSubject(
        tuple(shown),
        request.tokens,
        request.segments,
        label_rows=request.label_rows,
        text_rows=request.text_rows,
        question=request.question,
    )


def show_tokens(part: Encoding) -> list[ShownToken]:
    rows = zip(part.ids, part.pieces, part.special, part.texts, part.offsets, strict=True)
    return [
        ShownToken(id, piece, True) if special else ShownToken(id, piece, False, False, text or 0, *span)
        for id, piece, special, text, span in rows
    ]


def choose_goal(model: Model, parameters: ExplainParameters, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:
    """Return the goal of an answer. Raises BadRequest if the answer does not contain the target."""
    return GOAL_CHOICES[model.task](model, parameters.target, read, reply)


def similarity_goals(parameters: ExplainParameters) -> tuple[DescribedGoal, ...]:
    """Return the goal of an embedding: its similarity to another."""
    return (DescribedGoal(((0, 0),), {"kind": "similarity", "text": parameters.target.text}),)


def label_goal(model: Model, target: TargetSpec, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:  # noqa: ARG001
    values = cast(ScoreOutput, reply).values
    column = (
        max(range(len(values)), key=values.__getitem__) if target.label is None else label_column(model, target.label)
    )
    name = model.labels[column] if column < len(model.labels) else str(column)
    return DescribedGoal(((0, column),), {"kind": "label", "label": name, "index": column}, values[column])


def label_column(model: Model, label: str | int) -> int:
    names = list(model.labels)
    column = label if isinstance(label, int) else names.index(label) if label in names else -1
    if not 0 <= column < len(names):
        quoted = repr(label)[:MAX_LABEL_QUOTE]
        message = f"target.label: {model.name} has no label {quoted}; there are: {', '.join(names[:20])}"
        raise BadRequest(message, param="target.label")
    return column


def relevance_goal(model: Model, target: TargetSpec, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:  # noqa: ARG001
    name = model.labels[0] if model.labels else "relevance"
    return DescribedGoal(((0, 0),), {"kind": "label", "label": name, "index": 0}, cast(ScoreOutput, reply).values[0])


def tag_goal(model: Model, target: TargetSpec, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:  # noqa: ARG001
    """Return the goal for the label of a token, or for the sum of the labels of the tokens in a part of the text."""
    chosen = choose_entities(target, cast(TagOutput, reply).entities)
    columns = [label_column(model, each.label if target.label is None else target.label) for each in chosen]
    goal = tuple((each.index, column) for each, column in zip(chosen, columns, strict=True))
    name = model.labels[columns[0]]
    description = {
        "kind": "tag",
        "token": chosen[0].index,
        "label": name,
        "start": chosen[0].start,
        "end": chosen[-1].end,
    }
    return DescribedGoal(goal, description, chosen[0].score if target.label is None else None)


def choose_entities(target: TargetSpec, entities: Sequence[Entity]) -> list[Entity]:
    """Return the target's tokens; without a target, the labelled token with the highest score."""
    if target.token is not None:
        chosen = [each for each in entities if each.index == target.token]
        wrong = f"target.token: {target.token} is no token of the text, these are: {describe_indexes(entities)}"
    elif target.start is not None and target.end is not None:
        chosen = [each for each in entities if each.start < target.end and each.end > target.start]
        wrong = f"target.start: no token of the text stands between {target.start} and {target.end}"
    else:
        sure = [each for each in entities if each.label not in OUTSIDE_LABELS]
        chosen = [max(sure, key=lambda each: each.score)] if sure else []
        wrong = "target: nothing in the text is labelled; say which token by target.start and target.end"
    if not chosen:
        raise BadRequest(wrong, param=wrong.partition(":")[0])
    return chosen


def describe_indexes(entities: Sequence[Entity]) -> str:
    return f"{entities[0].index} to {entities[-1].index}" if entities else "none"


def span_goal(model: Model, target: TargetSpec, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:  # noqa: ARG001
    """Return the goal for the first and last token of the answer."""
    context, part = str(read.source[1]), read.parts[0]
    best = cast(SpanOutput, reply).answers[0]
    start, end = (best.start, best.end) if target.start is None or target.end is None else (target.start, target.end)
    rows = [
        row
        for row, (text, (first, last)) in enumerate(zip(part.texts, part.offsets, strict=True))
        if text == 1 and first < end and last > start
    ]
    if not rows:
        message = f"target.start: no token of the context stands between {start} and {end}"
        raise BadRequest(message, param="target.start")
    description = {"kind": "span", "start": start, "end": end, "text": context[start:end]}
    same = (start, end) == (best.start, best.end)
    return DescribedGoal(((rows[0], 0), (rows[-1], 1)), description, best.score if same else None)


def mask_goal(model: Model, target: TargetSpec, read: EncodedInput, reply: EncoderOutput) -> DescribedGoal:  # noqa: ARG001
    masks, number = cast(FillOutput, reply).masks, target.mask or 0
    if not 0 <= number < len(masks):
        message = f"target.mask: the text has {len(masks)} masks, counted from 0, got {number}"
        raise BadRequest(message, param="target.mask")
    best = masks[number][0]
    description = {"kind": "word", "mask": number, "word": best.text, "id": best.token}
    return DescribedGoal(((read.requests[0].rows[number], best.token),), description, best.score)


GOAL_CHOICES: Mapping[Task, Callable[[Model, TargetSpec, EncodedInput, EncoderOutput], DescribedGoal]] = {
    "classify": label_goal,
    "rank": relevance_goal,
    "choose": relevance_goal,
    "tag": tag_goal,
    "span": span_goal,
    "fill": mask_goal,
}


# Goals of generators


def build_generated_subject(model: Model, prompt: Prompt, request: Generate, tokens: Sequence[int]) -> ExplainSubject:
    """Return a prompt and its answer, each token of which is a goal.

    Tokenises the prompt, so it is called on a thread for texts.
    """
    shown = show_prompt(model, prompt, request.source or request.tokens)
    opening = request.tokens if request.source else ()
    answer = [ShownToken(id, model.tokenizer.piece(id), True, output=True) for id in opening]
    answer += [ShownToken(id, model.tokenizer.piece(id), model.tokenizer.is_special(id), output=True) for id in tokens]
    first, before = len(shown) + len(opening), len(request.tokens)
    goals = tuple(
        DescribedGoal(((before - 1 + n, id),), {"kind": "token", "token": first + n, "id": id})
        for n, id in enumerate(tokens)
    )
    return ExplainSubject(
        shown_tokens=(*shown, *answer),
        tokens=(*request.tokens, *tokens),
        source=request.source,
        goals=goals,
        output=model.tokenizer.decode(tokens),
    )


def show_prompt(model: Model, prompt: Prompt, ids: Sequence[int]) -> list[ShownToken]:
    """Return the prompt's tokens, and the position of each in the caller's texts, as far as these occur unchanged in
    the prompt.
    """
    if isinstance(prompt, str):
        [part] = model.tokenizer.encode_batch([prompt])
        if part.ids == list(ids):
            return show_tokens(part)
    texts = [prompt] if isinstance(prompt, str) else []
    texts += [message_content(message) for message in prompt.messages] if isinstance(prompt, ChatMessages) else []
    places = locate_pieces([model.tokenizer.piece_bytes(id) for id in ids], texts)
    return [
        ShownToken(id, model.tokenizer.piece(id), model.tokenizer.is_special(id), False, *where)
        for id, where in zip(ids, places, strict=True)
    ]


def message_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


TextPosition = tuple[int | None, int | None, int | None]
NO_POSITION: TextPosition = (None, None, None)


def locate_pieces(pieces: Sequence[bytes], texts: Sequence[str]) -> list[TextPosition]:
    """Return the position of each piece of a prompt in the texts that a template wrote into it, one after the other."""
    whole, starts = b"".join(pieces), list[int]()
    at = 0
    for piece in pieces:
        starts.append(at)
        at += len(piece)
    places, cursor = [NO_POSITION] * len(pieces), 0
    for index, text in enumerate(texts):
        sought = text.strip().encode()
        begin = whole.find(sought, cursor) if sought else -1
        if begin < 0:
            continue
        cursor, lead = begin + len(sought), len(text) - len(text.lstrip())
        begun = list(accumulate(byte & 0xC0 != 0x80 for byte in sought))  # code points, up to each byte
        for row in range(max(bisect_right(starts, begin) - 1, 0), bisect_left(starts, cursor)):
            start = starts[row]
            first, last = max(start, begin), min(start + len(pieces[row]), cursor)
            if first < last:
                places[row] = index, lead + begun[first - begin] - 1, lead + begun[last - begin - 1]
    return places


# The engine's request


def build_explain_request(
    model: Model, parameters: ExplainParameters, subject: ExplainSubject, id: str, terms: Terms
) -> ExplainTextRequest:
    return ExplainTextRequest(
        id=id,
        tokens=subject.tokens,
        method=parameters.method,
        segments=subject.segments,
        source=subject.source,
        goals=tuple(described.goal for described in subject.goals) if parameters.is_attribution else (),
        layers=parameters.layers,
        heads=parameters.heads,
        steps=parameters.steps,
        baseline=choose_baseline(model, parameters),
        kept_rows=subject.kept_rows,
        window=parameters.window,
        compared_tokens=subject.compared_tokens,
        label_rows=subject.label_rows,
        text_rows=subject.text_rows,
        question=subject.question,
        reports_progress=parameters.reports_progress,
        terms=terms,
    )


def choose_baseline(model: Model, parameters: ExplainParameters) -> int:
    """Return the token of the baseline input; -1: the zero vector."""
    words = model.tokenizer
    known = {"pad": words.pad_id, "mask": words.mask_id, "unk": words.unk_id, "eos": words.eos_id}
    there = {name: id for name, id in known.items() if id is not None}
    if parameters.baseline == "zero" or (
        parameters.baseline == "auto" and parameters.method != "occlusion" and "pad" not in there
    ):
        if parameters.method == "occlusion":
            message = f"baseline: what is hidden must be a token; {model.name} has {', '.join(there) or 'none'}"
            raise BadRequest(message, param="baseline")
        return -1
    name = next(iter(there), "") if parameters.baseline == "auto" else parameters.baseline
    if name not in there:
        has = f"{model.name} has no token for {name or 'nothing'}; there are: {', '.join((*there, 'zero'))}"
        raise BadRequest(f"baseline: {has}", param="baseline")
    return there[name]
