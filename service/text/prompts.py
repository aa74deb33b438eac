"""Prompts of generators: renders and tokenises the prompts of a call and makes the engine's requests."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

from polyhead.models.tokenizer import Encoding

from ..core.errors import BadRequest, EmptyInput, TooLong, TooMany
from ..core.grammar import Thinking
from ..core.model import Model
from ..core.request import BeamSearchOptions, Generate, Sampling, Terms
from ..core.text_limits import check_characters, check_token_ids, context_words, input_label
from .encoder_inputs import checked_batches
from .generation_request import ChatMessages, FillInMiddle, GenerationRequest, Prompt

SEED_LIMIT = 1 << 63
MAX_OPTION_TOKENS = 1 << 22  # tokens in the options of a call, counted for each of its answers
MAX_BANNED_TOKENS = 1 << 16  # tokens of the banned sequences of a call, which are looked at as they occur
TAG_SEARCH_TOKENS = 16  # the last tokens of a prompt, in which a reasoning tag is searched
SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of one prompt's answers, so that answers to near seeds share none


def read_prompts(
    model: Model, request: GenerationRequest, call: str, terms: Terms, check: Callable[[], None]
) -> list[Generate]:
    """Return the requests of each prompt: one for each attempt, all in one group.

    `check` is called before each prompt, and stops the work by raising.
    """
    sampling = build_sampling(model, request, check)
    stop_tokens = request.stop_tokens if request.ignore_eos else request.stop_tokens | end_tokens(model, request)
    requests = []
    for index, prompt in enumerate(request.prompts):
        check()
        where = input_label(request.field, index, len(request.prompts))
        tokens = prompt_tokens(model, prompt, where, request.truncate)
        before = tokens if model.generation_defaults is None else model.generation_defaults.decoder_prompt
        most = max_new_tokens(model, len(before), request, where)
        for number in range(request.attempts):
            seed = request.sampling.seed + number * SEED_STRIDE if request.has_seed else random.getrandbits(63)
            requests.append(
                Generate(
                    id=f"{call}-{index}" if request.attempts == 1 else f"{call}-{index}-{number}",
                    tokens=before,
                    max_tokens=most,
                    stop_tokens=stop_tokens,
                    sampling=replace(sampling, seed=seed % SEED_LIMIT),
                    logprobs=request.logprobs if request.attempts == request.count else max(request.logprobs, 0),
                    terms=terms,
                    adapter=model.adapter,
                    group="" if request.attempts == 1 else f"{call}-{index}",
                    beams=apply_beam_defaults(model, request.beams),
                    prompt_logprobs=-1 if number else request.prompt_logprobs,
                    salt=request.salt,
                    source=() if model.generation_defaults is None else tokens,
                )
            )
    return requests


def apply_beam_defaults(model: Model, beams: BeamSearchOptions | None) -> BeamSearchOptions | None:
    """Add the checkpoint's own beam search rules to those of the request."""
    if beams is None or model.generation_defaults is None:
        return beams
    usual = model.generation_defaults.beams
    return replace(
        usual,
        width=beams.width,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        never_stop_early=usual.never_stop_early and not beams.early_stopping,
    )


def apply_suggestions(model: Model, sampling: Sampling, open_options: Collection[str]) -> Sampling:
    """Replace the options that are open by those that the model's checkpoint suggests."""
    suggested: dict[str, Any] = {name: value for name, value in model.sampling.items() if name in open_options}
    return replace(sampling, **suggested)


def build_sampling(model: Model, request: GenerationRequest, check: Callable[[], None]) -> Sampling:
    """Add the tokens of the banned words, with a `check` between slices of them. Raises BadRequest for tokens that the
    network does not have, and TooMany.
    """
    sampling = apply_suggestions(model, request.sampling, request.open_options)
    if model.generation_defaults and request.prompt_logprobs >= 0:
        message = f"{model.name} reads a prompt and writes another text; it does not say how likely a prompt is"
        raise BadRequest(f"prompt_logprobs: {message}", param="prompt_logprobs")
    check_token_ids(model, list(request.stop_tokens), "stop_token_ids")
    check_token_ids(model, [token for token, _ in sampling.bias], "logit_bias")
    check_token_ids(model, sampling.allowed, "allowed_token_ids")
    for row in sampling.banned:
        check_token_ids(model, row, "bad_words_ids or suppress_tokens")
    words = list[tuple[int, ...]]()
    check_banned_count(sampling.banned, words)
    for some in checked_batches(request.bad_words, check):
        words += (row for word in some for row in encode_word(model, word))
        check_banned_count(sampling.banned, words)
    check_option_count(request, sum(map(len, words)))
    words += model.generation_defaults.sampling.banned if model.generation_defaults else ()
    return replace(sampling, banned=(*sampling.banned, *words)) if words else sampling


def check_banned_count(rows: Sequence[tuple[int, ...]], words: Sequence[tuple[int, ...]]) -> None:
    """Raise TooMany where banned sequences of more than one token, `words` among them, have too many tokens."""
    count = sum(len(row) for row in chain(rows, words) if len(row) > 1)
    if count > MAX_BANNED_TOKENS:
        message = (
            f"bad_words: the words that are banned, each at the beginning of a text and after a space, have at most "
            f"{MAX_BANNED_TOKENS} tokens together, got {count} tokens or more; ban fewer or shorter words"
        )
        raise TooMany(message, param="bad_words")


def check_option_count(request: GenerationRequest, word_tokens: int) -> None:
    """Raise TooMany where the options, `word_tokens` of them in banned words, have too many tokens for so many
    answers.
    """
    sampling, answers = request.sampling, len(request.prompts) * request.attempts
    counts = {
        "allowed_token_ids": len(sampling.allowed),
        "logit_bias": len(sampling.bias),
        "bad_words": sum(map(len, sampling.banned)) + word_tokens,
    }
    count, field = sum(counts.values()), max(counts, key=counts.__getitem__)
    if count * answers > MAX_OPTION_TOKENS:
        raise TooMany(
            f"{field}: the options of a call have at most {MAX_OPTION_TOKENS} tokens, counted for each answer, "
            f"got {count} tokens x {answers} answers",
            param=field,
        )


def encode_word(model: Model, word: str) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the beginning of a text and, if they differ, after a space."""
    check_characters(model, len(word), "bad_words")
    encodings = model.tokenizer.encode_batch([word.lstrip(), " " + word.lstrip()], special=False, offsets=False)
    alone, after = (tuple(encoding.ids) for encoding in encodings)
    return [row for row in dict.fromkeys((alone, after)) if row]


def prompt_tokens(model: Model, prompt: Prompt, where: str, last: int = 0) -> tuple[int, ...]:
    match prompt:
        case str():
            ids = encode_prompt(model, prompt, where, special=True, last=last) if prompt else []
        case ChatMessages():
            parts = encode_chat(model, render_chat(model, prompt, where), where)
            check_length(model, sum(map(len, parts)), where)
            ids = [id for part in parts for id in part.ids]
        case FillInMiddle():
            ids = encode_fill(model, prompt, where)
        case _:
            ids = list(prompt)
    if not ids:
        raise EmptyInput(f"{where}: is empty, there is nothing to continue", param=where)
    return tuple(check_token_ids(model, ids, where))


def encode_prompt(model: Model, text: str, where: str, *, special: bool, last: int = 0) -> list[int]:
    """Return the text's tokens, or the last `last` of them. Raises TooLong before the list is built."""
    check_characters(model, len(text), where)
    [encoding] = model.tokenizer.encode_batch([text], special=special, offsets=False)
    check_length(model, min(len(encoding), last or len(encoding)), where)
    return encoding.ids[-last:]


def encode_chat(model: Model, text: str, where: str) -> list[Encoding]:
    """Tokenise the output of a chat template, with its special tokens, and return its parts."""
    check_characters(model, len(text), where)
    return model.tokenizer.encode_quoted(text)


def encode_fill(model: Model, prompt: FillInMiddle, where: str) -> list[int]:
    """Return the tokens of a prompt for the text between two others. Both are quoted: they have no control tokens.

    Raises BadRequest if the model was not trained for that, and TooLong.
    """
    marks, quote = model.tokenizer.fill_marks, model.tokenizer.quote
    if marks is None:
        message = f"{model.name} has no tokens for a text between two others; leave it out"
        raise BadRequest(f"suffix: {message}", param="suffix")
    parts = encode_chat(model, marks.join(quote(prompt.before), quote(prompt.after)), where)
    begin, _ = model.tokenizer.boundary_tokens
    check_length(model, len(begin) + sum(map(len, parts)), where)
    return [*begin, *(id for part in parts for id in part.ids)]


def end_tokens(model: Model, request: GenerationRequest) -> frozenset[int]:
    """Return the tokens that end an answer, beside those of the request."""
    marks = model.tokenizer.fill_marks
    if marks is None or not isinstance(request.prompts[0], FillInMiddle):
        return model.stop_tokens
    ends = (model.tokenizer.token_id(piece) for piece in (*marks.ends, *marks.tokens))
    return model.stop_tokens.union(id for id in ends if id is not None)


def check_length(model: Model, length: int, where: str) -> None:
    if length > model.max_tokens:
        raise TooLong(f"{where}: the prompt has {length} tokens. {context_words(model.max_tokens)}", param=where)


def render_chat(model: Model, prompt: ChatMessages, where: str) -> str:
    """Render the chat template. All values that it gets are quoted, so only the template itself can write control
    tokens.

    Raises TooLong if the messages have more characters than a prompt may have.
    """
    if model.chat is None:
        raise BadRequest(f"{where}: {model.name} has no chat template; ask for a completion instead", param=where)
    check_characters(model, count_characters((prompt.messages, prompt.tools, prompt.variables)), where)
    return model.chat.render(
        prompt.messages,
        add_generation_prompt=prompt.opens_answer and not prompt.continues_last,
        continued=prompt.continues_last,
        variables={"tools": prompt.tools or None, **prompt.variables},
        quote=model.tokenizer.quote,
    )


def count_characters(given: Any) -> int:
    """Return how many characters all texts in a JSON value have together."""
    count, rest = 0, [given]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, Mapping):
            rest += (*each.keys(), *each.values())
        elif isinstance(each, Sequence):
            rest += each
    return count


def remaining_thinking(model: Model, request: GenerationRequest, tokens: Sequence[int]) -> Thinking | None:
    """Return what applies to the reasoning in the answer: the prompt `tokens` may have begun or ended it already."""
    if request.thinking is None:
        return None
    match reasoning_state(model, request.prompts[0], tokens):
        case "does":
            return replace(request.thinking, begin="")
        case "may":
            return request.thinking
        case "":
            return None


def reasoning_state(model: Model, prompt: Prompt, tokens: Sequence[int]) -> Literal["", "may", "does"]:
    """Whether the answer to the prompt `tokens` begins inside the reasoning ("does"), may begin with it ("may"), or has
    none ("").
    """
    begin, end = model.chat_format.begin, model.chat_format.end
    if not end or not isinstance(prompt, ChatMessages):
        return ""
    last = model.tokenizer.decode(tokens[-TAG_SEARCH_TOKENS:], skip_special=False).rstrip()
    if prompt.continues_last:
        text = str(prompt.messages[-1]["content"])
        return "does" if text.rfind(begin) > text.rfind(end) or last.endswith(begin) else ""
    return "does" if last.endswith(begin) else "" if last.endswith(end) else "may"


def max_new_tokens(model: Model, length: int, request: GenerationRequest, where: str) -> int:
    """Return how many tokens may follow a prompt of `length`: the requested number, else the default, else the rest of
    the context. Raises TooLong.
    """
    check_length(model, length, where)
    limit, wanted = model.max_tokens, request.max_tokens
    if request.only_scores:
        return 0
    if length == limit:
        raise TooLong(
            f"{where}: the prompt has {length} tokens, none is left for an answer. {context_words(limit)}", param=where
        )
    if length + wanted > limit and not request.fits_context:
        raise TooLong(
            f"{request.limit_field}: the prompt has {length} tokens and {wanted} more are asked for. "
            f"{context_words(limit)}",
            param=request.limit_field,
        )
    return min(request.token_limit or limit, limit - length)
