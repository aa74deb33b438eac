"""Inputs of encoders: tokenises the texts of a call and makes the engine's requests.

Each input is one request, or several if it is read in windows. So an invalid input need not fail the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Literal, TypeGuard, TypeVar

from polyhead.models.chat.pair_prompt import PairTemplate
from polyhead.models.core.errors import EncodingError
from polyhead.models.core.late_interaction import LateInteraction, TextRole
from polyhead.models.tokenizer import Encoding, Text, check_well_formed

from ..concurrency.time_slices import LazySequence, split_in_slices
from ..core.errors import AnswerTooLarge, BadRequest, EmptyInput, TooLong, TooMany
from ..core.model import Model
from ..core.request import Encode, OutputForm, Task, Terms
from ..core.text_limits import check_characters, check_token_ids, context_words, input_label, truncate_rows
from .answer_spans import SpanOptions
from .entities import Aggregation
from .label_spans import SpanSearch

MAX_WINDOWS = 1000  # of one input
MAX_WINDOW_TOKENS = 1 << 18  # tokens of all windows of one call, unless the caller passes another bound
MAX_MASK_CANDIDATES = 10_000  # for the masks of one input
MAX_FILLED_CHARACTERS = 1 << 24  # of the candidates for all masks of one call, each with its whole text
MAX_SPANS = 1 << 16  # spans that are compared for one answer, of all windows of a context
CANDIDATE_CHARACTERS = 100  # characters of the answer for each candidate, beside its text
MAX_VECTOR_NUMBERS = 1 << 24  # of the vectors of all tokens of one call
TEXTS_PER_CHECK = 32  # texts that are tokenised or decoded between two checks of the deadline
MAX_NAMED_TOKENS = 5  # tokens named in a message
MAX_QUOTE = 60  # characters of a word that a message quotes
FORM_NAMES: dict[OutputForm, str] = {
    "": "vector for a text",
    "tokens": "vectors of tokens",
    "words": "weights of words",
}
ROLES = ("query", "document")  # of texts, for a model that distinguishes them
TOKEN_TASKS: tuple[Task, ...] = ("tag", "span", "fill")
WINDOW_TASKS: tuple[Task, ...] = ("tag", "span")  # the answer for a part is valid for the whole

EncoderInput = str | tuple[str, str] | tuple[int, ...]
T = TypeVar("T")
DEFAULT_SPAN_OPTIONS, DEFAULT_SEARCH, OUTSIDE_LABELS = SpanOptions(), SpanSearch(), frozenset(("O",))


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """A long text is read in windows of `size` tokens, with the special tokens and the other text of a pair (0: as many
    as the model takes). Neighbours share `overlap` tokens.
    """

    overlap: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRequest:
    """Texts for an encoder, all processed in the same way. `field` is their name in the request; `names` are the names
    of each, if they are not a list there.

    Each head uses the fields below that concern it.
    """

    field: str
    inputs: tuple[EncoderInput, ...]
    names: tuple[str, ...] = ()
    partial: bool = False  # an invalid input does not fail the others
    prompt: str = ""  # the name of a text that is put before each input
    truncate: Literal["", "left", "right"] = ""  # the side that is cut off; empty: a longer text is an error
    windows: WindowOptions | None = None  # read longer texts in windows
    max_window_tokens: int = MAX_WINDOW_TOKENS  # tokens of the windows of all inputs
    truncation_hint: str = ""  # how truncation is requested, for error messages
    form: OutputForm = ""  # as in Encode, and the next four
    more_forms: tuple[OutputForm, ...] = ()
    raw: bool = False
    unit: bool = False
    dimensions: int = 0
    aggregation: Aggregation = "none"  # as in entities.TaggingSettings, and the next one
    ignored_labels: frozenset[str] = OUTSIDE_LABELS
    span_options: SpanOptions = DEFAULT_SPAN_OPTIONS
    top_k: int = 5  # candidates for each mask
    targets: tuple[str, ...] = ()  # the only candidates; empty: all tokens
    needs_offsets: bool = False  # the offsets of tokens are needed, whatever the head
    queries: int = 0  # inputs, the first ones, that a model reads as queries if it distinguishes them
    labels: tuple[str, ...] = ()  # that a model reads beside each text
    span_search: SpanSearch = DEFAULT_SEARCH  # which spans of words have one of the labels

    @property
    def forms(self) -> tuple[OutputForm, ...]:
        """All outputs that are asked for."""
        return (self.form, *self.more_forms)

    def input_name(self, index: int) -> str:
        """Return the name of one of the inputs in messages."""
        return self.names[index] if self.names else input_label(self.field, index, len(self.inputs))


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An input as requests, one for each of its windows, or for each order of a pair.

    `parts` are the tokens of the windows, if the answer refers to tokens. With several windows, requests and parts are
    computed at each access: overlapping windows take far more memory than the text. `words` are the ranges of the words
    of which the answer has a row each, if it does. `text_start`: characters that `parts` have before the input.
    """

    source: EncoderInput
    requests: Sequence[Encode]
    parts: Sequence[Encoding] = ()
    words: Sequence[tuple[int, int]] = ()
    text_start: int = 0


class TokenIds:
    """An input as token ids, as the client sent them."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    @classmethod
    def from_input(cls, source: EncoderInput) -> "TokenIds":
        return cls([id for id in source if isinstance(id, int)])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def segments(self) -> Sequence[int]:
        return (0,) * len(self.ids)

    @property
    def special(self) -> Sequence[bool]:
        return (False,) * len(self.ids)

    @property
    def texts(self) -> Sequence[int]:
        return (0,) * len(self.ids)

    def select_rows(self, rows: Sequence[int]) -> "TokenIds":
        return TokenIds([self.ids[row] for row in rows])


class RoleTokens(TokenIds):
    """The tokens of a text of a late-interaction model, with the prefix token of its role after the first one."""

    def __init__(self, encoding: Encoding, prefix: int) -> None:
        before = encoding.ids[:1] if prefix >= 0 else []
        added = [prefix] if prefix >= 0 else []
        super().__init__([*before, *added, *encoding.ids[len(before) :]])
        marks = encoding.special
        self._special = [*marks[: len(before)], *[True] * len(added), *marks[len(before) :]]

    @property
    def special(self) -> Sequence[bool]:
        return self._special


class RenderedPair(TokenIds):
    """The tokens of a query and a document in the prompt of `model`. Its last tokens, which follow every
    document, count as special: a truncated pair keeps them.
    """

    def __init__(self, model: Model, ids: list[int]) -> None:
        super().__init__(ids)
        self._model = model

    @property
    def special(self) -> Sequence[bool]:
        kept = min(count_closing_tokens(self._model), len(self.ids))
        return [False] * (len(self.ids) - kept) + [True] * kept


InputRow = Encoding | TokenIds


def no_check() -> None:
    """The check of work without a time limit."""


def read_inputs(
    model: Model,
    request: EncodingRequest,
    call: str,
    terms: Terms,
    check: Callable[[], None] = no_check,
) -> list[EncodedInput | BadRequest]:
    """Return for each input its requests, or the error. With `request.partial` false the first error is raised.

    Token ids are taken as they are, special tokens included. `check` is called between slices of the texts, and stops
    the work by raising. Raises TooMany if the windows of all inputs have more than `request.max_window_tokens` tokens,
    or if the candidates for their masks would make too long an answer, and AnswerTooLarge if the vectors of their
    tokens would.
    """
    common, attempt = common_request(model, request, terms), call_or_return_error if request.partial else call_or_raise
    wrong = [attempt(partial(check_input, model, request, index)) for index in range(len(request.inputs))]
    prompt = prompt_prefix(model, request)
    texts = [
        each
        for index, (source, error) in enumerate(zip(request.inputs, wrong, strict=True))
        if error is None and is_text(source) and model.pair_prompt is None
        for each in pair_orders(model, role_prompt(model, request, index, prompt), source)
    ]
    encoded = encode_texts(model, texts, check, offsets=is_token_level(model, request))
    found: list[EncodedInput | BadRequest] = []
    for index, (source, error) in enumerate(zip(request.inputs, wrong, strict=True)):
        if error is None:
            if not is_text(source):
                rows: list[InputRow] = [TokenIds.from_input(source)]
            elif model.pair_prompt is not None:
                check()
                rows = [RenderedPair(model, encode_pair(model, *source))]
            elif model.late is not None:
                rows = [RoleTokens(next(encoded), text_role(model.late, request, index).prefix)]
            else:
                rows = [next(encoded) for _ in pair_orders(model, prompt, source)]
            own = replace(common, id=f"{call}-{index}", is_query=model.has_queries and index < request.queries)
            found.append(attempt(partial(read_input, model, request, index, rows, own)))
        else:
            found.append(error)
    check_call_size(model, request, [read for read in found if isinstance(read, EncodedInput)])
    return found


def check_call_size(model: Model, request: EncodingRequest, reads: Sequence[EncodedInput]) -> None:
    """Raise TooMany or AnswerTooLarge if all inputs of a call together exceed a limit that each of them may use."""
    if request.windows is not None:
        check_windows(request, reads)
    if model.task == "span":
        check_spans(request, reads)
    if "tokens" in request.forms:
        check_vectors(model, request, reads)
    if request.form == "" and model.task == "fill":
        check_mask_candidates(model, request, reads)


def check_windows(request: EncodingRequest, reads: Sequence[EncodedInput]) -> None:
    several = [read.requests for read in reads if len(read.requests) > 1]
    count = sum(map(len, several))
    tokens = sum(len(requests) * len(requests[0].tokens) for requests in several)
    if tokens > request.max_window_tokens:
        message = (
            f"{request.field}: would be read in {count} windows of {tokens} tokens together, at most "
            f"{request.max_window_tokens} tokens a call are read in windows (max_tokens_in_flight); "
            "let windows share less, or send fewer inputs"
        )
        raise TooMany(message, param=request.field)


def check_spans(request: EncodingRequest, reads: Sequence[EncodedInput]) -> None:
    """Raise TooMany if the best spans of all windows of a context would be too many to compare."""
    windows, most = max((len(read.requests) for read in reads), default=0), request.span_options.spans_per_window
    if windows * most > MAX_SPANS:
        message = (
            f"parameters.top_k: {request.span_options.top_k} answers are chosen from {most} spans of each of {windows} "
            f"windows, at most {MAX_SPANS} spans are compared; ask for fewer answers, or let windows share less"
        )
        raise TooMany(message, param="parameters.top_k")


def check_vectors(model: Model, request: EncodingRequest, reads: Sequence[EncodedInput]) -> None:
    tokens = sum(len(text_request.tokens) for read in reads for text_request in read.requests)
    if tokens * model.width > MAX_VECTOR_NUMBERS:
        message = (
            f"{request.field}: vectors of {model.width} numbers for {tokens} tokens, at most {MAX_VECTOR_NUMBERS} "
            "numbers a call are answered; send fewer or shorter inputs"
        )
        raise AnswerTooLarge(message, param=request.field)


def check_mask_candidates(model: Model, request: EncodingRequest, reads: Sequence[EncodedInput]) -> None:
    candidates = min(request.top_k, len(request.targets) or model.vocab_size)
    characters = sum(
        candidates * len(text_request.rows) * (CANDIDATE_CHARACTERS + len(read.source))
        for read in reads
        for text_request in read.requests
    )
    if characters > MAX_FILLED_CHARACTERS:
        message = (
            f"parameters.top_k: {candidates} words for each mask, each with its whole text, are about {characters} "
            f"characters, at most {MAX_FILLED_CHARACTERS} a call are answered; ask for fewer words, "
            "or send fewer or shorter texts"
        )
        raise TooMany(message, param="parameters.top_k")


def checked_batches(items: Sequence[T], check: Callable[[], None]) -> Iterator[Sequence[T]]:
    """Yield `items` in slices, with a `check` before each."""
    for some in split_in_slices(items, TEXTS_PER_CHECK):
        check()
        yield some


def encode_texts(
    model: Model, texts: Sequence[Text], check: Callable[[], None], *, special: bool = True, offsets: bool = True
) -> Iterator[Encoding]:
    """Yield the tokens of the texts, tokenised in slices, with a `check` before each slice."""
    for some in checked_batches(texts, check):
        try:
            yield from model.tokenizer.encode_batch(some, special=special, offsets=offsets)
        except EncodingError:
            check_well_formed(texts)  # whose error has the index of the text among all
            raise


def prompt_prefix(model: Model, request: EncodingRequest) -> str:
    """Return the text that is put before each input. Raises BadRequest if the model has no prompt of that name."""
    if request.prompt and request.prompt not in model.prompts and not (model.has_queries and request.prompt in ROLES):
        known = ", ".join(filter(None, model.prompts)) or "it has none"
        message = f"prompt_name: {model.name} has no prompt {request.prompt[:MAX_QUOTE]!r}; its prompts: {known}"
        raise BadRequest(message, param="prompt_name")
    return model.prompts.get(request.prompt, model.prompts.get("", ""))


def text_role(late: LateInteraction, request: EncodingRequest, index: int) -> TextRole:
    """Return how a late-interaction model reads one of the inputs."""
    return late.query if index < request.queries else late.document


def role_prompt(model: Model, request: EncodingRequest, index: int, prompt: str) -> str:
    """Return the text that is put before one of the inputs: `prompt`, or that of its role."""
    return prompt if model.late is None else text_role(model.late, request, index).prompt


def prompt_length(model: Model, request: EncodingRequest, source: EncoderInput) -> int:
    """Return the characters that are put before an input; 0 for a pair and for token ids."""
    return len(model.prompts.get(request.prompt, "")) if isinstance(source, str) else 0


def pair_orders(model: Model, prompt: str, source: str | tuple[str, str]) -> list[str | tuple[str, str]]:
    """Return the text, or the pair in every order in which the model reads it."""
    if isinstance(source, str):
        return [prompt + source]
    return [source, (source[1], source[0])] if model.both_orders else [source]


def encode_pair(model: Model, query: str, document: str) -> list[int]:
    """Return the tokens of a pair in the model's prompt. Texts cannot spell its control tokens."""
    assert model.pair_prompt is not None
    if isinstance(model.pair_prompt, PairTemplate):
        texts = model.pair_prompt.build_texts(query, document)
        pieces = model.tokenizer.encode_batch(texts, special=False, untrusted=True, offsets=False)
        return [*model.pair_prompt.before, *(id for piece in pieces for id in piece.ids), *model.pair_prompt.after]
    if model.chat is None:
        raise BadRequest(f"{model.name} has no chat template for pairs of texts")
    variables = dict(model.pair_prompt.variables)
    opens = bool(variables.pop("add_generation_prompt", False))
    rendered = model.chat.render(
        model.pair_prompt.build_messages(query, document),
        add_generation_prompt=opens,
        variables=variables,
        quote=model.tokenizer.quote,
    )
    return [id for part in model.tokenizer.encode_quoted(rendered) for id in part.ids]


def count_closing_tokens(model: Model) -> int:
    """Return how many tokens follow every document in the model's prompt."""
    if isinstance(model.pair_prompt, PairTemplate):
        return len(model.pair_prompt.after)
    first, second = (encode_pair(model, filler, filler) for filler in ("0", "1 2 3 4"))
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False)))
    return len(same)


def is_token_level(model: Model, request: EncodingRequest) -> bool:
    """Whether the answer refers to tokens."""
    return request.needs_offsets or (request.form == "" and model.task in TOKEN_TASKS)


def call_or_raise(function: Callable[[], T]) -> T | BadRequest:
    return function()


def call_or_return_error(function: Callable[[], T]) -> T | BadRequest:
    try:
        return function()
    except BadRequest as error:
        return error


def common_request(model: Model, request: EncodingRequest, terms: Terms) -> Encode:
    """Return the fields that all requests of a call share. Raises BadRequest if they do not suit the model."""
    if request.dimensions > model.width:
        message = f"dimensions: {model.name} has {model.width}, got {request.dimensions}"
        raise BadRequest(message, param="dimensions")
    if model.late is not None and "" in request.forms:
        message = f"{model.name} has a vector for each token and none for a text; /embed_all returns them"
        raise BadRequest(f"{request.field}: {message}", param=request.field)
    if missing := [form for form in request.forms if form not in model.forms]:
        message = f"{request.field}: {model.name} has no {FORM_NAMES[missing[0]]}"
        hint = model.missing_forms.get(missing[0], "")
        raise BadRequest(f"{message}; {hint}" if hint else message, param=request.field)
    if request.windows is not None and model.task not in WINDOW_TASKS:
        message = f"{request.field}: {model.name} reads no windows, what it would say of each is nothing of the whole"
        raise BadRequest(message, param=request.field)
    return Encode(
        id="",
        tokens=(),
        form=request.form,
        more_forms=request.more_forms,
        # spans are compared over the whole context, and the scores of a pair's two orders are added
        raw=request.raw or model.task == "span" or model.both_orders,
        unit=request.unit,
        dimensions=request.dimensions,
        top_k=request.top_k,
        targets=tuple(
            find_target_token(model, word, f"targets[{index}]") for index, word in enumerate(request.targets)
        ),
        terms=terms,
        adapter=model.adapter,
    )


def find_target_token(model: Model, word: str, where: str) -> int:
    """Return the token that is exactly this word. Raises BadRequest if there is none."""
    found = model.tokenizer.token_id(word)
    ids = [found] if found is not None else model.tokenizer.encode(word, special=False).ids
    if len(ids) != 1:
        pieces = ", ".join(map(model.tokenizer.piece, ids[:MAX_NAMED_TOKENS]))
        message = f"{where}: {word[:MAX_QUOTE]!r} is no token of {model.name}, but {len(ids)}: {pieces}"
        raise BadRequest(message, param=where)
    return check_token_ids(model, ids, where)[0]


def check_input(model: Model, request: EncodingRequest, index: int) -> None:
    """Raise BadRequest for what can be rejected before the text is tokenised."""
    source, where = request.inputs[index], request.input_name(index)
    if not source or (is_text(source) and not any(source)):
        raise EmptyInput(f"{where}: is empty, there is nothing to read", param=where)
    if is_token_level(model, request) and not is_text(source):
        raise BadRequest(f"{where}: must be text, {model.name} tells where in it something is", param=where)
    if model.both_orders and not (is_text(source) and isinstance(source, tuple)):
        raise BadRequest(f"{where}: must be a pair of texts, {model.name} compares them in both orders", param=where)
    if model.pair_prompt is not None and is_text(source) and not isinstance(source, tuple):
        raise BadRequest(
            f"{where}: must be a pair of texts, {model.name} compares a query with a document", param=where
        )
    if not is_text(source):
        check_token_ids(model, [id for id in source if isinstance(id, int)], where)
    for text in (source,) if isinstance(source, str) else source:
        if isinstance(text, str):
            check_characters(model, len(text), where, prompt_length(model, request, source))


def is_text(source: EncoderInput) -> TypeGuard[str | tuple[str, str]]:
    return isinstance(source, str) or isinstance(source[0], str)


def read_input(
    model: Model, request: EncodingRequest, index: int, rows: Sequence[InputRow], common: Encode
) -> EncodedInput:
    """Return one input's requests. Raises TooLong, or BadRequest if it has no mask to fill in, or has tokens that the
    network does not have.
    """
    source, where = request.inputs[index], request.input_name(index)
    if request.windows is not None and isinstance(rows[0], Encoding):
        return read_windows(model, request, index, rows[0].cache_lists(), common)
    chosen = [(row, some) for row in rows for some in select_rows(model, request, row, index)]
    parts = [row.select_rows(some) for row, some in chosen]
    for part in parts:
        check_token_ids(model, part.ids, where)  # the tokenizer may have more tokens than the network
    requests = [build_encoding_request(model, part, common) for part in parts]
    if model.excludes_prompt and isinstance(source, str):
        first = count_prompt_tokens(model, prompt_prefix(model, request))
        requests = [
            exclude_prompt(text_request, [row >= first for row in some], where)
            for text_request, (_, some) in zip(requests, chosen, strict=True)
        ]
    if model.skipped_tokens:
        requests = [skip_tokens(model, text_request, where) for text_request in requests]
    if model.late is not None:
        role = text_role(model.late, request, index)
        requests = [fill_query(model.late, role, text_request, where) for text_request in requests]
    if common.form == "" and model.task == "fill":
        check_masks(model, request, requests[0], where)
    token_parts = parts if is_token_level(model, request) else []
    return EncodedInput(source, tuple(requests), tuple(part for part in token_parts if isinstance(part, Encoding)))


def read_windows(model: Model, request: EncodingRequest, index: int, row: Encoding, common: Encode) -> EncodedInput:
    """Return one input's requests, each computed when it is accessed. Raises the same errors as `read_input`."""
    found = select_rows(model, request, row, index)
    check_token_ids(model, row.ids, request.input_name(index))  # every token is in some window
    parts = LazySequence(len(found), lambda number: row.select_rows(found[number]))
    requests = LazySequence(len(found), lambda number: build_encoding_request(model, parts[number], common))
    return EncodedInput(request.inputs[index], requests, parts)


def build_encoding_request(model: Model, part: InputRow, common: Encode) -> Encode:
    segments = tuple(part.segments) if any(part.segments) else ()
    rows = mask_rows(model, part) if common.form == "" and model.task == "fill" else ()
    return replace(common, tokens=tuple(part.ids), segments=segments, rows=rows)


def fill_query(late: LateInteraction, role: TextRole, text_request: Encode, where: str) -> Encode:
    """Return the request filled up to the tokens of its role, and with only the tokens that have a vector. Raises
    EmptyInput if none has one.
    """
    tokens = text_request.tokens
    missing = max(role.expanded - len(tokens), 0)
    rows = tuple(row for row, token in enumerate(tokens) if token not in role.skipped)
    if not rows and not missing:
        raise EmptyInput(f"{where}: has only words that the model skips", param=where)
    return replace(
        text_request,
        tokens=tokens + (late.expansion_token,) * missing,
        rows=() if len(rows) == len(tokens) else (*rows, *range(len(tokens), len(tokens) + missing)),
        hidden=missing if late.hides_expansion else 0,
    )


def count_prompt_tokens(model: Model, prompt: str) -> int:
    """Return how many of the first tokens of a text with this prompt are the prompt's, as sentence-transformers counts:
    those of the prompt alone, without a control token at the end.
    """
    ids = model.tokenizer.encode(prompt).ids if prompt else []
    return len(ids) - bool(ids and model.tokenizer.is_special(ids[-1]))


def exclude_prompt(text_request: Encode, is_text_row: Sequence[bool], where: str) -> Encode:
    """Return the request with only the rows after the prompt pooled. Raises TooLong if there are none."""
    if all(is_text_row) or text_request.forms != ("",):
        return text_request
    rows = tuple(row for row, kept in enumerate(is_text_row) if kept)
    if not rows:
        raise TooLong(f"{where}: the prompt alone has as many tokens as the model takes", param=where)
    return replace(text_request, rows=rows)


def skip_tokens(model: Model, text_request: Encode, where: str) -> Encode:
    """Return the request without the tokens that the model skips. Raises EmptyInput if there are no others."""
    tokens = tuple(token for token in text_request.tokens if token not in model.skipped_tokens)
    if not tokens:
        raise EmptyInput(f"{where}: has only words that the model skips", param=where)
    return (
        text_request if len(tokens) == len(text_request.tokens) else replace(text_request, tokens=tokens, segments=())
    )


def mask_rows(model: Model, part: InputRow) -> tuple[int, ...]:
    """Return the rows of the mask tokens."""
    return tuple(row for row, id in enumerate(part.ids) if id == model.tokenizer.mask_id)


def check_masks(model: Model, request: EncodingRequest, text_request: Encode, where: str) -> None:
    if not text_request.rows:
        mask = model.tokenizer.piece(model.tokenizer.mask_id) if model.tokenizer.mask_id is not None else ""
        raise BadRequest(f"{where}: has no {mask or 'mask'} to be filled in", param=where)
    if len(text_request.rows) * request.top_k > MAX_MASK_CANDIDATES:
        count = f"{request.top_k} words for each of {len(text_request.rows)} masks"
        message = f"{where}: {count}, at most {MAX_MASK_CANDIDATES} are returned"
        raise BadRequest(message, param=where)


def select_rows(model: Model, request: EncodingRequest, row: InputRow, index: int) -> Sequence[Sequence[int]]:
    """Return the rows that the model reads: all of them, or fewer if the text is truncated, or those of each window."""
    limit = model.max_tokens
    if model.late is not None:
        limit = min(limit, text_role(model.late, request, index).max_tokens)
    if model.query_tokens and index < request.queries:
        limit = model.query_tokens
    if request.windows is not None:
        limit = min(request.windows.size or limit, limit)
    if len(row) <= limit:
        return [range(len(row))]
    where, pair = request.input_name(index), isinstance(request.inputs[index], tuple)
    if request.windows is not None:
        return window_rows(row.texts, limit, request.windows.overlap, last=int(pair), where=where)
    if not request.truncate:
        message = f"{where}: the input has {len(row)} tokens. {context_words(limit)}"
        raise TooLong(f"{message}; {request.truncation_hint}" if request.truncation_hint else message, param=where)
    return [truncate_rows(row.special, limit, side=request.truncate, pair=pair)]


def window_rows(
    texts: Sequence[int | None], limit: int, overlap: int, *, last: int, where: str
) -> Sequence[Sequence[int]]:
    """Return windows of at most `limit` rows: every window has all rows of the other texts, and a stretch of the rows
    of text `last`.
    """
    long = [row for row, text in enumerate(texts) if text == last]
    beside = [row for row, text in enumerate(texts) if text != last]
    step = limit - len(beside) - overlap
    if step < 1:
        message = f"{where}: windows of {limit} tokens have no room beside {len(beside)} others and {overlap} shared"
        raise BadRequest(message, param=where)
    count = 1 + max(0, -(-(len(long) - step - overlap) // step))
    if count > MAX_WINDOWS:
        message = f"{where}: would be read in {count} windows, at most {MAX_WINDOWS} are read; let them share less"
        raise BadRequest(message, param=where)
    return LazySequence(count, lambda number: sorted((*beside, *long[number * step : (number + 1) * step + overlap])))
