"""Questions about a text as the engine's requests, tokenised as the packages laya and gliner2 do, and the places of
their options' scores among the answers.

Nothing is cut off: a question or a text that the model would not read whole is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from polyhead.models.core.decision_prompt import (
    DESCRIPTION_MARK,
    LABEL_MARK,
    MARKED_OPTION_TOKENS,
    PROMPT_KINDS,
    SCHEMA_BORDER,
    SCHEMA_TOKENS,
    TASK_MARK,
    TEXT_BORDER,
    LabelSchemaPrompt,
    OptionMarkPrompt,
    PromptKind,
)

from ..core.errors import BadRequest, EmptyInput, TooLong
from ..core.model import Model
from ..core.request import Encode, Terms
from ..core.text_limits import check_characters, check_token_ids, context_words
from .encoder_inputs import checked_batches, no_check
from .schema_words import split_schema_words

MIN_INSTRUCTION_TOKENS = 8  # which instructions may have however long the options are, as in the package laya
SPARE_TOKENS = 16  # with fewer beside the options, the package laya cuts these
MIN_MARKED_TOKENS = 4  # of an option with its mark, to which it is cut at most
SENTENCE_ENDS = (".", "!", "?")
NO, YES = ("false", "no, the statement does not hold"), ("true", "yes, the statement holds")

Option = tuple[str, str]  # its name and description; the description may be empty
Span = tuple[int, int]  # code points [start, end) of a text


@dataclass(frozen=True, slots=True)
class QuestionText:
    """A question about a text; `field` is its name in the request. The levels of a "score" are in ascending order.

    The options of a "noul" are false and true, in this order, with names of their own or none of them; a description
    that is empty is the default one. With `order` the model reads the options in this order of their indices.
    """

    field: str
    kind: PromptKind
    instructions: str
    options: tuple[Option, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuestionedText:
    """Questions about one text, which is `field` in the request. With `is_joint` a model with a LabelSchemaPrompt reads
    them in one sequence, so the answer to one depends on the others; other models never do.
    """

    field: str
    text: str
    questions: tuple[QuestionText, ...]
    is_joint: bool = True


@dataclass(frozen=True, slots=True)
class ScorePlace:
    """Where the raw scores of a question's options are: among the values of the output of a request, from `first` on.
    `order` has the index of the option of each. A raw score divided by the `temperature` is a logit.
    """

    request: int
    first: int
    order: tuple[int, ...]
    temperature: float

    def read_logits(self, outputs: Sequence[Sequence[float]]) -> list[float]:
        """The logits of the options, in their own order."""
        values = outputs[self.request][self.first : self.first + len(self.order)]
        found = sorted(zip(self.order, values, strict=True))
        return [value / self.temperature for _, value in found]


@dataclass(frozen=True, slots=True)
class EncodedDecision:
    """The requests for a decision, and the places of the scores of each question."""

    requests: tuple[Encode, ...]
    scores: tuple[ScorePlace, ...]

    def read_logits(self, outputs: Sequence[Sequence[float]]) -> list[list[float]]:
        """The logits of the options of each question, from the values of the output of each request. A softmax over
        the options of a question makes them probabilities."""
        return [each.read_logits(outputs) for each in self.scores]


def read_decision(
    model: Model,
    request: QuestionedText,
    call: str,
    terms: Terms,
    check: Callable[[], None] = no_check,
) -> EncodedDecision:
    """Return the engine's requests for the questions, with `call` in their ids. `check` is called between slices of
    the texts, and stops the work by raising. Raises BadRequest, EmptyInput or TooLong, which name the field.
    """
    check_decision(model, request)
    common = Encode("", (), raw=True, terms=terms, adapter=model.adapter)
    return choose_reader(model, request, check).encode(call, common)


def locate_rows(model: Model, request: QuestionedText) -> list[Span | None]:
    """Return the places of the last rows of each request for the questions in their text: all rows of the text, and
    those after it. None: a row is not from the text.
    """
    return choose_reader(model, request, no_check).locate_rows()


def choose_reader(
    model: Model, request: QuestionedText, check: Callable[[], None]
) -> "OptionMarkReader | LabelSchemaReader":
    prompt = model.decision_prompt
    assert prompt is not None, "the model answers questions"
    if isinstance(prompt, OptionMarkPrompt):
        return OptionMarkReader(model, prompt, request, check)
    return LabelSchemaReader(model, prompt, request, check)


def check_decision(model: Model, request: QuestionedText) -> None:
    """Raise BadRequest for what can be rejected before anything is tokenised."""
    if not request.text or request.text.isspace():
        raise EmptyInput(f"{request.field}: is empty, there is nothing to read", param=request.field)
    if not request.questions:
        raise BadRequest("there are no questions", param=request.field)
    for question in request.questions:
        check_question(question)
    check_characters(model, len(request.text), request.field, sum(map(count_characters, request.questions)))


def check_question(question: QuestionText) -> None:
    where, options = question.field, question.options
    if question.kind not in PROMPT_KINDS:
        raise BadRequest(f"{where}: its kind should be one of {', '.join(PROMPT_KINDS)}", param=where)
    if not question.instructions or question.instructions.isspace():
        raise EmptyInput(f"{where}: has no instructions", param=where)
    if question.kind == "noul":
        if len(options) not in (0, 2):
            raise BadRequest(f"{where}: a noul has two options, or none to have the default ones", param=where)
    elif not options:
        raise BadRequest(f"{where}: has no options", param=where)
    for name, _ in options:
        if not name or name.isspace():
            raise BadRequest(f"{where}: an option has no name", param=where)
    if question.order and sorted(question.order) != list(range(len(list_options(question)))):
        raise BadRequest(f"{where}: its order should have the index of each option once", param=where)
    if question.kind != "score" and len({name.strip() for name, _ in options}) < len(options):
        raise BadRequest(f"{where}: two options have the same name", param=where)


def count_characters(question: QuestionText) -> int:
    return len(question.instructions) + sum(len(name) + len(description) for name, description in question.options)


def choose_order(question: QuestionText) -> tuple[int, ...]:
    return question.order or tuple(range(len(list_options(question))))


def list_options(question: QuestionText) -> list[Option]:
    """The options, with the default ones of a noul and its default descriptions."""
    if question.kind != "noul":
        return list(question.options)
    given = question.options or (NO, YES)
    return [(name.strip(), text or default) for (name, text), (_, default) in zip(given, (NO, YES), strict=True)]


class PieceEncoder:
    """Pieces of text to tokens, without special tokens around them."""

    def __init__(self, model: Model, check: Callable[[], None]) -> None:
        self._model, self._check = model, check

    def encode(self, pieces: Sequence[str], where: str) -> Iterator[list[int]]:
        """The tokens of each piece. Equal pieces are tokenised once. Raises BadRequest for tokens that the network does
        not have; `where` is the name of the text."""
        known = dict[str, list[int]]()
        for some in checked_batches(list(dict.fromkeys(pieces)), self._check):
            encodings = self._model.tokenizer.encode_batch(list(some), special=False, offsets=False)
            for piece, encoding in zip(some, encodings, strict=True):
                known[piece] = check_token_ids(self._model, encoding.ids, where)
        return (known[piece] for piece in pieces)

    def locate(self, pieces: Sequence[str]) -> list[list[Span]]:
        """The places of the tokens of each piece in it."""
        known = dict[str, list[Span]]()
        for some in checked_batches(list(dict.fromkeys(pieces)), self._check):
            encodings = self._model.tokenizer.encode_batch(list(some), special=False)
            known |= {piece: encoding.offsets for piece, encoding in zip(some, encodings, strict=True)}
        return [known[piece] for piece in pieces]


class OptionMarkReader:
    """One request for each question, with the text after it: see OptionMarkPrompt."""

    def __init__(
        self, model: Model, prompt: OptionMarkPrompt, request: QuestionedText, check: Callable[[], None]
    ) -> None:
        self._model, self._prompt, self._request = model, prompt, request
        self._pieces, self._mark = PieceEncoder(model, check), model.tokenizer.piece(prompt.mark)

    def encode(self, call: str, common: Encode) -> EncodedDecision:
        [text] = self._encode([self._request.text], self._request.field)
        requests, scores = list[Encode](), list[ScorePlace]()
        for index, question in enumerate(self._request.questions):
            request = self._build_request(question, text, common, f"{call}-{index}")
            order, temperature = choose_order(question), self._prompt.find_temperature
            requests.append(request)
            scores.append(ScorePlace(index, 0, order, temperature(question.kind, len(order))))
        return EncodedDecision(tuple(requests), tuple(scores))

    def locate_rows(self) -> list[Span | None]:
        """See the function of this name."""
        between = self._request.text.split(self._mark)
        # Of each character of the text without marks, where it begins in the text with them.
        sizes = chain.from_iterable(([1] * len(part), [len(self._mark)]) for part in between)
        starts = list(accumulate(chain.from_iterable(sizes), initial=0))
        [places] = self._pieces.locate([" ".join(between)])
        return [*((starts[start], starts[end]) for start, end in places), None]

    def _build_request(self, question: QuestionText, text: list[int], common: Encode, id: str) -> Encode:
        instructions = f"{question.kind} question: {question.instructions}"
        options = [
            f" {self._render_option(question, index, option)}" for index, option in enumerate(list_options(question))
        ]
        head, *answers = self._encode([instructions, *options], question.field)
        self._check_lengths(question, head, answers)
        tokens = [self._prompt.opening, *head, self._prompt.separator]
        answers = [answers[index] for index in choose_order(question)]
        sizes = [len(answer) + 1 for answer in answers]
        rows = tuple(accumulate(sizes[:-1], initial=len(tokens)))
        for answer in answers:
            tokens += (self._prompt.mark, *answer)
        tokens += (self._prompt.separator, *text, self._prompt.separator)
        if len(tokens) > self._model.max_tokens:
            beside = len(tokens) - len(text)
            message = f"{self._request.field}: has {len(text)} tokens, beside {beside} of {question.field}"
            raise TooLong(f"{message}. {context_words(self._model.max_tokens)}", param=self._request.field)
        return replace_tokens(common, id, tokens, rows, question.kind)

    def _render_option(self, question: QuestionText, index: int, option: Option) -> str:
        name, description = option
        if question.kind != "score":
            return f"{name}: {description}" if description else name
        level = description if not description or name == str(index) else f"{name}: {description}"
        return f"level {index}: {level or name}"

    def _encode(self, texts: Sequence[str], where: str) -> Iterator[list[int]]:
        """The tokens of each text; none is a mark."""
        return self._pieces.encode([text.replace(self._mark, " ") for text in texts], where)

    def _check_lengths(self, question: QuestionText, head: list[int], answers: Sequence[list[int]]) -> None:
        """Raise TooLong for a question of which the package would cut off something."""
        where, most = question.field, self._prompt.question_tokens
        for (name, _), answer in zip(list_options(question), answers, strict=True):
            if len(answer) > MARKED_OPTION_TOKENS:
                message = f"{where}: option {name[:60]!r} has {len(answer)} tokens, at most {MARKED_OPTION_TOKENS}"
                raise TooLong(f"{message} are read", param=where)
        sizes = [len(answer) + 1 for answer in answers]
        spare = most - sum(sizes)
        share = max(MIN_MARKED_TOKENS, (most - SPARE_TOKENS) // len(sizes))
        if spare < SPARE_TOKENS and max(sizes) > share:
            message = f"{where}: its {len(sizes)} options have {sum(sizes)} tokens; {most - SPARE_TOKENS} are read, or"
            raise TooLong(f"{message} {share} of each", param=where)
        if len(head) > max(MIN_INSTRUCTION_TOKENS, spare):
            room = max(MIN_INSTRUCTION_TOKENS, spare)
            message = f"{where}: its instructions have {len(head)} tokens, beside its options {room} are read"
            raise TooLong(message, param=where)


class LabelSchemaReader:
    """One request for each question, or for all of them, with the text's words after it: see LabelSchemaPrompt."""

    def __init__(
        self, model: Model, prompt: LabelSchemaPrompt, request: QuestionedText, check: Callable[[], None]
    ) -> None:
        self._model, self._prompt, self._request = model, prompt, request
        self._pieces = PieceEncoder(model, check)

    def encode(self, call: str, common: Encode) -> EncodedDecision:
        questions = self._request.questions
        [border, *pieces] = self._pieces.encode([TEXT_BORDER, *self._list_words()], self._request.field)
        words = [id for piece in pieces for id in piece]
        requests, scores = list[Encode](), list[ScorePlace]()
        for together in [questions] if self._request.is_joint else [(question,) for question in questions]:
            tokens, rows = list[int](), list[int]()
            for question in together:
                scores.append(ScorePlace(len(requests), len(rows), choose_order(question), self._prompt.temperature))
                self._add_question(question, tokens, rows)
            tokens += border
            self._check_length(len(tokens), len(words), together)
            requests.append(replace_tokens(common, f"{call}-{len(requests)}", tokens + words, rows, "choice"))
        return EncodedDecision(tuple(requests), tuple(scores))

    def _add_question(self, question: QuestionText, tokens: list[int], rows: list[int]) -> None:
        """Add a question's tokens, and the rows of its labels' marks."""
        pieces = [*([SCHEMA_BORDER] if tokens else ()), *self._list_pieces(question)]
        for piece, ids in zip(pieces, self._pieces.encode(pieces, question.field), strict=True):
            if piece == LABEL_MARK:
                rows.append(len(tokens))
            tokens += ids

    def _check_length(self, asked: int, words: int, questions: Sequence[QuestionText]) -> None:
        if asked + words > self._model.max_tokens:
            where, names = self._request.field, "the questions" if len(questions) > 1 else questions[0].field
            message = f"{where}: has {words} tokens, beside {asked} of {names}. {context_words(self._model.max_tokens)}"
            raise TooLong(message, param=where)

    def _list_pieces(self, question: QuestionText) -> Iterator[str]:
        known = list_options(question)
        options = [known[index] for index in choose_order(question)]
        for text in (question.instructions, *(part for option in options for part in option)):
            for token in SCHEMA_TOKENS:
                if token in text:
                    raise BadRequest(f"{question.field}: no text of it may have {token} in it", param=question.field)
        described = "".join(f" {DESCRIPTION_MARK} {name}: {text}" for name, text in options if text)
        yield from ("(", TASK_MARK, f"{question.instructions}{described}", "(")
        for name, _ in options:
            yield from (LABEL_MARK, name)
        yield from (")", ")")

    def locate_rows(self) -> list[Span | None]:
        """See the function of this name. A word whose length changes in lower case is not divided."""
        limit, found = len(self._request.text), list[Span | None]()
        spans, words = list(self._list_spans()), list(self._list_words())
        for (first, last), word, places in zip(spans, words, self._pieces.locate(words), strict=True):
            for start, end in places:
                whole = len(word) != last - first
                span = (first, last) if whole else (first + start, first + end)
                found.append((span[0], min(span[1], limit)) if span[0] < limit else None)
        return found

    def _list_words(self) -> Iterator[str]:
        whole = self._end_sentence()
        return (whole[start:end].lower() for start, end in self._list_spans())

    def _list_spans(self) -> Iterator[Span]:
        return split_schema_words(self._end_sentence())

    def _end_sentence(self) -> str:
        text = self._request.text
        return text if text.endswith(SENTENCE_ENDS) else f"{text}."


def replace_tokens(common: Encode, id: str, tokens: Sequence[int], rows: Sequence[int], kind: PromptKind) -> Encode:
    return replace(common, id=id, tokens=tuple(tokens), label_rows=tuple(rows), question=kind)
