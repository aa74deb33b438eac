"""What Hugging Face's servers answer who generate: texts, their details, the events of a stream, and errors.

Knows no engine and no routes.  The one idea: every character of an answer, a stop string's too, belongs to a token, so
that the texts of its tokens, put together, are the answer.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ...core.errors import BadRequest, Expired, Overloaded, PolyheadError, StepFailed, Stopped
from ...core.model import Model
from ...text.detokenizer import Drawn, Piece, Scored, joined
from .generation_calls import likelihood
from .hf_generation import GenerateParameters


def write_error(error: PolyheadError) -> dict[str, Any]:
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


def answered(asked: GenerateParameters, model: Model, prompt: str, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """What is said of one prompt: an object for each answer, or for the best of several tries."""
    if asked.best_of == 1:
        return [answer(asked, model, prompt, piece) for piece in pieces]
    best, *others = sorted(pieces, key=likelihood, reverse=True)
    written = answer(asked, model, prompt, best)
    if asked.detailed:
        told = [{"generated_text": full(asked, prompt, one.text), **details(asked, model, one)} for one in others]
        written["details"]["best_of_sequences"] = told
    return [written]


def answer(asked: GenerateParameters, model: Model, prompt: str, piece: Piece) -> dict[str, Any]:
    text = {"generated_text": full(asked, prompt, piece.text)}
    return text | {"details": details(asked, model, piece)} if asked.detailed else text


def details(asked: GenerateParameters, model: Model, piece: Piece) -> dict[str, Any]:
    top = {"top_tokens": [likeliest(model, drawn) for drawn in piece.drawn]} if asked.top_n_tokens else {}
    prefill = [{"id": one.id, "text": shown(one.token), "logprob": one.token.logprob} for one in piece.prompt]
    return {**ending(asked, piece), "prefill": prefill, "tokens": tokens(model, piece), **top}


def tokens(model: Model, piece: Piece) -> list[dict[str, Any]]:
    """Those of a whole answer."""
    return [token(model, *each) for each in spelled(piece.drawn, 0, piece.text)]


def full(asked: GenerateParameters, prompt: str, text: str) -> str:
    return prompt + text if asked.return_full_text else text


def ending(asked: GenerateParameters, piece: Piece) -> dict[str, Any]:
    seed = asked.seed if "seed" in asked.model_fields_set else None
    return {"finish_reason": reason(piece), "generated_tokens": piece.usage.completion_tokens, "seed": seed}


def reason(piece: Piece) -> str:
    return "length" if piece.finish == "length" else "eos_token" if piece.stop == "" else "stop_sequence"


def token(model: Model, drawn: Drawn, text: str) -> dict[str, Any]:
    return {
        "id": drawn.id,
        "text": text,
        "logprob": drawn.token.logprob,
        "special": model.tokenizer.is_special(drawn.id),
    }


def likeliest(model: Model, drawn: Drawn) -> list[dict[str, Any]]:
    """What might have stood in a token's place."""
    special = model.tokenizer.is_special
    return [{"id": one.id, "text": shown(one), "logprob": one.logprob, "special": special(one.id)} for one in drawn.top]


def shown(token: Scored) -> str:
    """A token by itself; half a character is a replacement character."""
    return token.data.decode(errors="replace")


def spelled(drawn: Sequence[Drawn], start: int, text: str) -> list[tuple[Drawn, str]]:
    """Each token with its part of `text`, which begins at `start` in the answer; together they are all of it."""
    borders = [0, *(one.offset - start for one in drawn[1:]), len(text)]
    return [(one, text[borders[index] : borders[index + 1]]) for index, one in enumerate(drawn)]


async def chunks(
    asked: GenerateParameters,
    model: Model,
    prompt: str,
    answers: AsyncGenerator[tuple[int, Piece], None],
    longest: int,
) -> AsyncGenerator[dict[str, Any], None]:
    """An event for each token, whose texts together are the answer; the last has all of it once more.

    What ends a text is said by a special token without one, unless a token came with the end: the last of the `longest`
    answer does.
    """
    said, told, index, held = "", 0, 0, list[Piece]()
    async with aclosing(answers):
        async for _, part in answers:
            held.append(part)
            if 0 < longest == part.tokens and not part.finish:
                continue  # the end follows at once
            piece, held = joined(held), []
            said += piece.text
            some = [event(asked, model, *each) for each in spelled(piece.drawn, told, said[told:])]
            if piece.finish and not some:
                last = {"id": model.tokenizer.eos_id or 0, "text": said[told:], "logprob": 0.0, "special": True}
                some.append({"token": last})
            told = len(said) if some else told  # text that comes without a token waits for the next one
            for each in some:
                index += 1
                over = bool(piece.finish) and each is some[-1]
                end = closing(asked, prompt, piece, said) if over else {"generated_text": None, "details": None}
                yield {"index": index, **each, **end}


def event(asked: GenerateParameters, model: Model, drawn: Drawn, text: str) -> dict[str, Any]:
    top = {"top_tokens": likeliest(model, drawn)} if asked.top_n_tokens else {}
    return {"token": token(model, drawn, text), **top}


def closing(asked: GenerateParameters, prompt: str, piece: Piece, said: str) -> dict[str, Any]:
    details = {**ending(asked, piece), "input_length": piece.usage.prompt_tokens} if asked.details else None
    return {"generated_text": full(asked, prompt, said), "details": details}
