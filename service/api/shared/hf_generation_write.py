"""What Hugging Face's servers answer who generate: texts, their details, the events of a stream, and errors.

Knows no engine and no routes.  The one idea: every character of an answer, a stop string's too, belongs to a token, so
that the texts of its tokens, put together, are the answer.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ...core.errors import BadRequest, Expired, Overloaded, PolyheadError, StepFailed, Stopped
from ...core.model import Model
from ...text.detokenizer import AnswerDelta, ScoredToken, TokenLogprobs, join_answer
from .generation_calls import mean_logprob
from .hf_generation import GenerateParameters


def write_hf_error(error: PolyheadError) -> dict[str, Any]:
    """Clients know three kinds of error by name; of the others the status says all."""
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
    asked: GenerateParameters, model: Model, prompt: str, pieces: Sequence[AnswerDelta]
) -> list[dict[str, Any]]:
    """What is said of one prompt: an object for each answer, or for the best of several tries."""
    if asked.best_of == 1:
        return [write_answer(asked, model, prompt, piece) for piece in pieces]
    best, *others = sorted(pieces, key=mean_logprob, reverse=True)
    written = write_answer(asked, model, prompt, best)
    if asked.wants_details:
        told = [
            {"generated_text": full_text(asked, prompt, one.text), **write_details(asked, model, one)} for one in others
        ]
        written["details"]["best_of_sequences"] = told
    return [written]


def write_answer(asked: GenerateParameters, model: Model, prompt: str, piece: AnswerDelta) -> dict[str, Any]:
    text = {"generated_text": full_text(asked, prompt, piece.text)}
    return text | {"details": write_details(asked, model, piece)} if asked.wants_details else text


def write_details(asked: GenerateParameters, model: Model, piece: AnswerDelta) -> dict[str, Any]:
    top = {"top_tokens": [write_top_tokens(model, drawn) for drawn in piece.logprobs]} if asked.top_n_tokens else {}
    prefill = [
        {"id": one.id, "text": decode_token(one.token), "logprob": one.token.logprob} for one in piece.prompt_logprobs
    ]
    return {**finish_fields(asked, piece), "prefill": prefill, "tokens": list_tokens(model, piece), **top}


def list_tokens(model: Model, piece: AnswerDelta) -> list[dict[str, Any]]:
    """Those of a whole answer."""
    return [write_token(model, *each) for each in split_text(piece.logprobs, 0, piece.text)]


def full_text(asked: GenerateParameters, prompt: str, text: str) -> str:
    return prompt + text if asked.return_full_text else text


def finish_fields(asked: GenerateParameters, piece: AnswerDelta) -> dict[str, Any]:
    seed = asked.seed if "seed" in asked.model_fields_set else None
    return {"finish_reason": finish_reason(piece), "generated_tokens": piece.usage.completion_tokens, "seed": seed}


def finish_reason(piece: AnswerDelta) -> str:
    return "length" if piece.finish == "length" else "eos_token" if piece.stop == "" else "stop_sequence"


def write_token(model: Model, drawn: TokenLogprobs, text: str) -> dict[str, Any]:
    return {
        "id": drawn.id,
        "text": text,
        "logprob": drawn.token.logprob,
        "special": model.tokenizer.is_special(drawn.id),
    }


def write_top_tokens(model: Model, drawn: TokenLogprobs) -> list[dict[str, Any]]:
    """What might have stood in a token's place."""
    special = model.tokenizer.is_special
    return [
        {"id": one.id, "text": decode_token(one), "logprob": one.logprob, "special": special(one.id)}
        for one in drawn.top
    ]


def decode_token(token: ScoredToken) -> str:
    """A token by itself; half a character is a replacement character."""
    return token.data.decode(errors="replace")


def split_text(drawn: Sequence[TokenLogprobs], start: int, text: str) -> list[tuple[TokenLogprobs, str]]:
    """Each token with its part of `text`, which begins at `start` in the answer; together they are all of it."""
    borders = [0, *(one.offset - start for one in drawn[1:]), len(text)]
    return [(one, text[borders[index] : borders[index + 1]]) for index, one in enumerate(drawn)]


async def stream_events(
    asked: GenerateParameters,
    model: Model,
    prompt: str,
    answers: AsyncGenerator[tuple[int, AnswerDelta], None],
    longest: int,
) -> AsyncGenerator[dict[str, Any], None]:
    """An event for each token, whose texts together are the answer; the last has all of it once more.

    What ends a text is said by a special token without one, unless a token came with the end: the last of the `longest`
    answer does.
    """
    said, told, index, held = "", 0, 0, list[AnswerDelta]()
    async with aclosing(answers):
        async for _, part in answers:
            held.append(part)
            if 0 < longest == part.token_count and not part.finish:
                continue  # the end follows at once
            piece, held = join_answer(held), []
            said += piece.text
            some = [write_event(asked, model, *each) for each in split_text(piece.logprobs, told, said[told:])]
            if piece.finish and not some:
                last = {"id": model.tokenizer.eos_id or 0, "text": said[told:], "logprob": 0.0, "special": True}
                some.append({"token": last})
            told = len(said) if some else told  # text that comes without a token waits for the next one
            for each in some:
                index += 1
                over = bool(piece.finish) and each is some[-1]
                end = final_fields(asked, prompt, piece, said) if over else {"generated_text": None, "details": None}
                yield {"index": index, **each, **end}


def write_event(asked: GenerateParameters, model: Model, drawn: TokenLogprobs, text: str) -> dict[str, Any]:
    top = {"top_tokens": write_top_tokens(model, drawn)} if asked.top_n_tokens else {}
    return {"token": write_token(model, drawn, text), **top}


def final_fields(asked: GenerateParameters, prompt: str, piece: AnswerDelta, said: str) -> dict[str, Any]:
    details = {**finish_fields(asked, piece), "input_length": piece.usage.prompt_tokens} if asked.details else None
    return {"generated_text": full_text(asked, prompt, said), "details": details}
