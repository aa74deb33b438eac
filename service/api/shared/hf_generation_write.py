"""Writes generated texts as Hugging Face's servers do: texts, details, stream events, and errors.

Every character of an answer, including a stop string, belongs to a token, so the texts of the tokens add up to the
answer.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ...concurrency.time_slices import map_lazily
from ...core.errors import BadRequest, Expired, Overloaded, PolyheadError, StepFailed, Stopped
from ...core.model import Model
from ...text.answer_delta import AnswerDelta, ScoredToken, TokenLogprobs, join_deltas
from ...text.answer_stream import AnswerStream
from .generation_calls import mean_logprob
from .hf_generation import GenerateParameters


def write_hf_error(error: PolyheadError) -> dict[str, Any]:
    """The clients know three error types by name; for other errors the status is enough."""
    match error:
        case BadRequest():
            kind = {"error_type": "validation"}
        case Overloaded():
            kind = {"error_type": "overloaded"}
        case StepFailed() | Stopped() | Expired():
            kind = {"error_type": "generation"}
        case _:
            kind = {}
    return {"error": error.message, **kind}


def write_answers(
    parameters: GenerateParameters, model: Model, prompt: str, pieces: Sequence[AnswerDelta]
) -> list[dict[str, Any]]:
    """The answers to one prompt: one object each, or one object for the best of several tries."""
    if parameters.best_of == 1:
        return [write_answer(parameters, model, prompt, piece) for piece in pieces]
    best, *others = sorted(pieces, key=mean_logprob, reverse=True)
    response = write_answer(parameters, model, prompt, best)
    if parameters.wants_details:
        sequences = [
            {"generated_text": full_text(parameters, prompt, one.text), **write_details(parameters, model, one)}
            for one in others
        ]
        response["details"]["best_of_sequences"] = sequences
    return [response]


def write_answer(parameters: GenerateParameters, model: Model, prompt: str, piece: AnswerDelta) -> dict[str, Any]:
    text = {"generated_text": full_text(parameters, prompt, piece.text)}
    return text | {"details": write_details(parameters, model, piece)} if parameters.wants_details else text


def write_details(parameters: GenerateParameters, model: Model, piece: AnswerDelta) -> dict[str, Any]:
    top = (
        {"top_tokens": [write_top_tokens(model, token) for token in piece.logprobs]} if parameters.top_n_tokens else {}
    )
    prefill = map_lazily(write_prefill_token, piece.prompt_logprobs)
    return {**finish_fields(parameters, piece), "prefill": prefill, "tokens": list_tokens(model, piece), **top}


def write_prefill_token(one: TokenLogprobs) -> dict[str, Any]:
    return {"id": one.id, "text": decode_token(one.token), "logprob": one.token.logprob}


def list_tokens(model: Model, piece: AnswerDelta) -> list[dict[str, Any]]:
    """The tokens of a whole answer."""
    return [write_token(model, *each) for each in split_text(piece.logprobs, 0, piece.text)]


def full_text(parameters: GenerateParameters, prompt: str, text: str) -> str:
    return prompt + text if parameters.return_full_text else text


def finish_fields(parameters: GenerateParameters, piece: AnswerDelta) -> dict[str, Any]:
    seed = parameters.seed if "seed" in parameters.model_fields_set else None
    return {"finish_reason": finish_reason(piece), "generated_tokens": piece.usage.completion_tokens, "seed": seed}


def finish_reason(piece: AnswerDelta) -> str:
    return "length" if piece.finish == "length" else "eos_token" if piece.stop == "" else "stop_sequence"


def write_token(model: Model, token: TokenLogprobs, text: str) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": text,
        "logprob": token.token.logprob,
        "special": model.tokenizer.is_special(token.id),
    }


def write_top_tokens(model: Model, token: TokenLogprobs) -> list[dict[str, Any]]:
    """The alternatives to a token."""
    special = model.tokenizer.is_special
    return [
        {"id": one.id, "text": decode_token(one), "logprob": one.logprob, "special": special(one.id)}
        for one in token.top
    ]


def decode_token(token: ScoredToken) -> str:
    """A token on its own; an incomplete character becomes a replacement character."""
    return token.data.decode(errors="replace")


def split_text(tokens: Sequence[TokenLogprobs], start: int, text: str) -> list[tuple[TokenLogprobs, str]]:
    """Each token with its part of `text`, which begins at `start` in the answer; the parts add up to `text`."""
    borders = [0, *(one.offset - start for one in tokens[1:]), len(text)]
    return [(one, text[borders[index] : borders[index + 1]]) for index, one in enumerate(tokens)]


async def stream_events(
    parameters: GenerateParameters,
    model: Model,
    prompt: str,
    answers: AnswerStream,
    longest: int,
) -> AsyncGenerator[dict[str, Any], None]:
    """One event for each token; the texts add up to the answer.  The last event also has the whole text.

    If a text ends without a token, a special token without text is sent, so that the last event has one.  `longest` is
    the length limit of the answer in tokens: its last token is held back until the end is known.
    """
    text, sent, index, pending = "", 0, 0, list[AnswerDelta]()
    async with aclosing(answers):
        async for _, part in answers:
            pending.append(part)
            if 0 < longest == part.token_count and not part.finish:
                continue  # the end follows immediately
            piece, pending = join_deltas(pending), []
            text += piece.text
            token_events = [
                write_event(parameters, model, *each) for each in split_text(piece.logprobs, sent, text[sent:])
            ]
            if piece.finish and not token_events:
                last = {"id": model.tokenizer.eos_id or 0, "text": text[sent:], "logprob": 0.0, "special": True}
                token_events.append({"token": last})
            sent = len(text) if token_events else sent  # text without a token waits for the next token
            for each in token_events:
                index += 1
                is_last = bool(piece.finish) and each is token_events[-1]
                end = (
                    final_fields(parameters, prompt, piece, text)
                    if is_last
                    else {"generated_text": None, "details": None}
                )
                yield {"index": index, **each, **end}


def write_event(parameters: GenerateParameters, model: Model, token: TokenLogprobs, text: str) -> dict[str, Any]:
    top = {"top_tokens": write_top_tokens(model, token)} if parameters.top_n_tokens else {}
    return {"token": write_token(model, token, text), **top}


def final_fields(parameters: GenerateParameters, prompt: str, piece: AnswerDelta, text: str) -> dict[str, Any]:
    details = (
        {**finish_fields(parameters, piece), "input_length": piece.usage.prompt_tokens} if parameters.details else None
    )
    return {"generated_text": full_text(parameters, prompt, text), "details": details}
