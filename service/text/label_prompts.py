"""Inputs of models that read labels of the request beside a text: builds their prompts and the engine's requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from polyhead.models.core.errors import EncodingError
from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.models.tokenizer import Encoding, check_well_formed

from ..core.errors import BadRequest, EmptyInput, TooLong
from ..core.model import Model
from ..core.request import Encode, Terms
from ..core.text_limits import check_characters, check_token_ids
from .encoder_inputs import (
    EncodedInput,
    EncodingRequest,
    call_or_raise,
    call_or_return_error,
    checked_batches,
    encode_texts,
    no_check,
)
from .label_spans import split_words

LABELS_FIELD = "parameters.candidate_labels"


def read_labelled_inputs(
    model: Model,
    request: EncodingRequest,
    call: str,
    terms: Terms,
    check: Callable[[], None] = no_check,
) -> list[EncodedInput | BadRequest]:
    """Return for each input its request, or the error. With `request.partial` false the first error is raised. `check`
    is called between slices of the texts, and stops the work by raising.
    """
    prompt = model.label_prompt
    assert prompt is not None, "the model reads labels"
    check_labels(model, prompt, request)
    attempt = call_or_return_error if request.partial else call_or_raise
    wrong = [attempt(partial(check_text, model, request, index)) for index in range(len(request.inputs))]
    valid = [index for index, error in enumerate(wrong) if error is None]
    reader = WordReader(model, prompt, request) if prompt.max_words else TextReader(model, prompt, request)
    encoded = reader.encode(valid, check)
    found: list[EncodedInput | BadRequest] = []
    for index, error in enumerate(wrong):
        if error is None:
            common = Encode(f"{call}-{index}", (), terms=terms, adapter=model.adapter)
            found.append(attempt(partial(reader.build, index, next(encoded), common)))
        else:
            found.append(error)
    return found


def check_labels(model: Model, prompt: LabelPrompt, request: EncodingRequest) -> None:
    """Raise BadRequest if there are no labels, or if one of them spells a token of the prompt."""
    if not request.labels:
        message = f"{model.name} needs labels to look for; a request to its own task has {LABELS_FIELD}"
        raise BadRequest(message, param=request.field)
    if request.windows is not None:
        raise BadRequest(f"{request.field}: {model.name} reads no windows", param=request.field)
    for token in (prompt.label, prompt.separator):
        if any(token in label for label in request.labels):
            raise BadRequest(f"{LABELS_FIELD}: no label may have {token} in it", param=LABELS_FIELD)


def check_text(model: Model, request: EncodingRequest, index: int) -> None:
    """Raise BadRequest for what can be rejected before the text is tokenised."""
    source, where = request.inputs[index], request.input_name(index)
    if not isinstance(source, str):
        raise BadRequest(f"{where}: must be a text, {model.name} reads it beside labels", param=where)
    if not source or source.isspace():
        raise EmptyInput(f"{where}: is empty, there is nothing to read", param=where)
    check_characters(model, len(source), where, sum(map(len, request.labels)))


class LabelReader:
    """What both kinds of readers have in common."""

    def __init__(self, model: Model, prompt: LabelPrompt, request: EncodingRequest) -> None:
        self._model, self._prompt, self._request = model, prompt, request

    def _build_request(self, encoding: Encoding, common: Encode, where: str) -> Encode:
        """The request with its tokens and the rows of its labels. Raises BadRequest for a text that spells a label's
        token."""
        check_token_ids(self._model, encoding.ids, where)
        token = self._prompt.label
        label_rows = tuple(row for row, id in enumerate(encoding.ids) if id == self._prompt.label_id)
        if len(label_rows) != len(self._request.labels):
            raise BadRequest(f"{where}: must not have {token} in it, which is put before labels", param=where)
        segments = tuple(encoding.segments) if any(encoding.segments) else ()
        return replace(common, tokens=tuple(encoding.ids), segments=segments, label_rows=label_rows)


class WordReader(LabelReader):
    """Reads a text word by word, after the labels: `<<ENT>> label <<ENT>> label <<SEP>> word word`."""

    def __init__(self, model: Model, prompt: LabelPrompt, request: EncodingRequest) -> None:
        super().__init__(model, prompt, request)
        self._opening = [piece for label in request.labels for piece in (prompt.label, label)] + [prompt.separator]

    def encode(self, indices: Sequence[int], check: Callable[[], None]) -> Iterator[Encoding]:
        """The tokens of these inputs, tokenised in slices, with a `check` before each slice."""
        for some in checked_batches(indices, check):
            texts = [str(self._request.inputs[index]) for index in some]
            try:
                yield from self._model.tokenizer.encode_words([self._opening + cut_words(text) for text in texts])
            except EncodingError:
                check_well_formed(texts)
                raise

    def build(self, index: int, encoding: Encoding, common: Encode) -> EncodedInput:
        """The request of one input. Raises TooLong for too many words or tokens, unless they are to be cut off."""
        source, where = str(self._request.inputs[index]), self._request.input_name(index)
        opening, ranges = len(self._opening), split_words(source)
        rows_of_words: list[list[int]] = [[] for _ in ranges]
        others = 0  # rows of the labels and of tokens added around the text
        for row, word in enumerate(encoding.words):
            if word is not None and word >= opening:
                rows_of_words[word - opening].append(row)
            else:
                others += 1
        kept = self._choose_words(rows_of_words, others, where)
        dropped = {row for word in range(len(ranges)) if word not in kept for row in rows_of_words[word]}
        if dropped:
            rows = [row for row in range(len(encoding)) if row not in dropped]
            places = {row: place for place, row in enumerate(rows)}
            encoding = encoding.select_rows(rows)
            rows_of_words = [[places[row] for row in rows if row in places] for rows in rows_of_words]
        read = [word for word in kept if rows_of_words[word]]  # a word of control characters may have no token
        which = -1 if self._prompt.uses_last_piece else 0
        request = self._build_request(encoding, common, where)
        words = tuple(rows_of_words[word][which] for word in read)
        if not words:
            raise EmptyInput(f"{where}: has no words", param=where)
        return EncodedInput(source, (replace(request, text_rows=words),), words=tuple(ranges[word] for word in read))

    def _choose_words(self, rows_of_words: Sequence[Sequence[int]], others: int, where: str) -> range:
        """The words that are read: all, or those at one side if the request cuts texts."""
        count, limit = len(rows_of_words), self._model.max_tokens
        tokens = others + sum(map(len, rows_of_words))
        if count <= self._prompt.max_words and tokens <= limit:
            return range(count)
        side = self._request.truncate
        if not side:
            message = (
                f"{where}: the input has {count} words and, with the labels, {tokens} tokens; "
                f"the model takes {self._prompt.max_words} words and {limit} tokens"
            )
            raise TooLong(message, param=where)
        kept, room = 0, limit - others
        order = rows_of_words if side == "right" else rows_of_words[::-1]
        for rows in order[: self._prompt.max_words]:
            room -= len(rows)
            if room < 0:
                break
            kept += 1
        if not kept:
            raise TooLong(f"{LABELS_FIELD}: have {others} tokens, the model takes {limit}", param=LABELS_FIELD)
        return range(kept) if side == "right" else range(count - kept, count)


class TextReader(LabelReader):
    """Reads a text after the labels, `<<LABEL>>label<<LABEL>>label<<SEP>>text`, or before them."""

    def __init__(self, model: Model, prompt: LabelPrompt, request: EncodingRequest) -> None:
        super().__init__(model, prompt, request)
        self._labels = "".join(f"{prompt.label}{label}" for label in request.labels) + prompt.separator

    def encode(self, indices: Sequence[int], check: Callable[[], None]) -> Iterator[Encoding]:
        """The tokens of these inputs, tokenised in slices, with a `check` before each slice."""
        for some in checked_batches(indices, check):
            texts = [str(self._request.inputs[index]) for index in some]
            whole = [self._labels + text if self._prompt.is_first else text + self._labels for text in texts]
            yield from encode_texts(self._model, whole, no_check)

    def build(self, index: int, encoding: Encoding, common: Encode) -> EncodedInput:
        """The request of one input. Raises TooLong for too many tokens, unless they are to be cut off."""
        source, where = str(self._request.inputs[index]), self._request.input_name(index)
        if len(encoding) > self._model.max_tokens:
            encoding = encoding.select_rows(self._cut_rows(source, encoding, where))
        request = self._build_request(encoding, common, where)
        first = 0
        if self._prompt.starts_at_separator:
            separator = self._model.tokenizer.token_id(self._prompt.separator)
            first = next(row for row, id in enumerate(encoding.ids) if id == separator and row > request.label_rows[-1])
        request = replace(request, text_rows=tuple(range(first, len(encoding))))
        parts = (encoding,) if self._request.needs_offsets else ()
        return EncodedInput(source, (request,), parts, text_start=len(self._labels) if self._prompt.is_first else 0)

    def _cut_rows(self, source: str, encoding: Encoding, where: str) -> list[int]:
        """The rows without those of the text that do not fit."""
        limit, side, count = self._model.max_tokens, self._request.truncate, len(encoding)
        if not side:
            message = f"{where}: the input has {count} tokens with the labels, the model takes {limit}"
            raise TooLong(message, param=where)
        border = len(self._labels)
        text = [
            row
            for row, ((start, end), special) in enumerate(zip(encoding.offsets, encoding.special, strict=True))
            if not special and (start >= border if self._prompt.is_first else end <= len(source))
        ]
        room = limit - (count - len(text))
        if room < 1:
            raise TooLong(
                f"{LABELS_FIELD}: have {count - len(text)} tokens, the model takes {limit}", param=LABELS_FIELD
            )
        dropped = set(text[room:] if side == "right" else text[: len(text) - room])
        return [row for row in range(count) if row not in dropped]


def cut_words(text: str) -> list[str]:
    return [text[start:end] for start, end in split_words(text)]
