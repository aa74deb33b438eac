"""What the dialect of Hugging Face's inference tasks answers: the pure writing of each task, and its errors.

Knows no engine.  The one idea: each text's answer is what a pipeline of transformers says of it; labels of texts have a
list for each text, even for a single one, because that is what the service's own clients take apart.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from service.answers import Found, Guessed, Scores, Tagged
from service.api import findings
from service.api.hf_wire import (
    AnswerCall,
    Call,
    ClassifyCall,
    EmbedCall,
    FillCall,
    GenerateCall,
    LabelCall,
    LikenessCall,
    ZeroShotCall,
)
from service.api.reading import Writing
from service.api.stream import float32
from service.errors import BadRequest, Expired, Overloaded, PolyheadError, StepFailed, Stopped
from service.model import Model
from service.transcript import Drawn, Piece


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


def first(items: list[Any]) -> Any:
    return items[0]


def every(items: list[Any]) -> Any:
    return items


def around(wire: Call) -> Any:
    """One input is answered without a list around it."""
    return first if wire.is_one else every


def write_classify(wire: ClassifyCall, model: Model) -> Writing:
    options = wire.parameters

    def one(reply: Scores) -> Any:
        scores = findings.applied(options.function_to_apply, reply.values)
        likeliest = findings.ranked(model.labels, scores)[: options.top_k or None]
        return [each for each in likeliest if each["score"] >= options.threshold]

    return Writing(one=one, error=write_error)


def write_zero_shot(wire: ZeroShotCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Scores) -> Any:
        return findings.ranked(wire.parameters.classes, reply.values)

    return Writing(one=one, error=write_error, whole=around(wire))


def write_label(wire: LabelCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Tagged) -> Any:
        return [findings.entity(found) for found in reply.entities]

    return Writing(one=one, error=write_error, whole=around(wire))


def write_answer(wire: AnswerCall, model: Model) -> Writing:  # noqa: ARG001
    """One answer is no list; that there is none is an empty one."""

    def one(reply: Found) -> Any:
        spans = [findings.span(found) for found in reply.answers]
        if wire.parameters.top_k > 1:
            return spans
        return spans[0] if spans else {"score": 0.0, "start": 0, "end": 0, "answer": ""}

    return Writing(one=one, error=write_error, whole=around(wire))


def write_fill(wire: FillCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Guessed) -> Any:
        return findings.words(reply.masks)

    return Writing(one=one, error=write_error, whole=around(wire))


def write_vector(wire: EmbedCall | LikenessCall, model: Model) -> Writing:  # noqa: ARG001
    def one(reply: Scores) -> Any:
        return float32(reply.values)

    return Writing(one=one, error=write_error, whole=around(wire))


# Generated text


def write_generate(wire: GenerateCall, model: Model, answers: Sequence[Piece]) -> list[Any]:
    """A list for a text, as if there could be several answers to it."""
    prompts = [wire.inputs] if isinstance(wire.inputs, str) else wire.inputs
    written = [[answered(wire, model, *each)] for each in zip(prompts, answers, strict=True)]
    return written[0] if wire.is_one else written


def answered(wire: GenerateCall, model: Model, prompt: str, piece: Piece) -> dict[str, Any]:
    text = {"generated_text": full(wire, prompt, piece.text)}
    if not wire.parameters.details:
        return text
    tokens = [token(model, *each) for each in spelled(piece.drawn, 0, piece.text)]
    return text | {"details": {**ending(wire, piece), "prefill": [], "tokens": tokens}}


def full(wire: GenerateCall, prompt: str, text: str) -> str:
    return prompt + text if wire.parameters.return_full_text else text


def ending(wire: GenerateCall, piece: Piece) -> dict[str, Any]:
    reason = "length" if piece.finish == "length" else "stop_sequence" if piece.stop else "eos_token"
    seed = wire.parameters.seed if "seed" in wire.parameters.model_fields_set else None
    return {"finish_reason": reason, "generated_tokens": piece.usage.completion_tokens, "seed": seed}


def token(model: Model, drawn: Drawn, text: str) -> dict[str, Any]:
    special = model.tokenizer.is_special(drawn.id)
    return {"id": drawn.id, "text": text, "logprob": drawn.token.logprob, "special": special}


def spelled(drawn: Sequence[Drawn], start: int, text: str) -> list[tuple[Drawn, str]]:
    """Each token with its part of `text`, which begins at `start` in the answer; together they are all of it."""
    borders = [0, *(one.offset - start for one in drawn[1:]), len(text)]
    return [(one, text[borders[index] : borders[index + 1]]) for index, one in enumerate(drawn)]


async def chunks(
    wire: GenerateCall, model: Model, answers: AsyncGenerator[tuple[int, Piece], None]
) -> AsyncGenerator[dict[str, Any], None]:
    """An event for each token, whose texts together are the answer; the last has all of it once more.

    What ends a text is said by a special token without one, unless a token came with the end.
    """
    said, told, index = "", 0, 0
    async with aclosing(answers):
        async for _, piece in answers:
            said += piece.text
            tokens = [token(model, *each) for each in spelled(piece.drawn, told, said[told:])]
            if piece.finish and not tokens:
                last = {"id": model.tokenizer.eos_id or 0, "text": said[told:], "logprob": 0.0, "special": True}
                tokens.append(last)
            told = len(said) if tokens else told  # text that comes without a token waits for the next one
            for each in tokens:
                index += 1
                over = bool(piece.finish) and each is tokens[-1]
                yield chunk(index, each) | (closing(wire, piece, said) if over else {})


def chunk(index: int, token: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "token": token, "generated_text": None, "details": None}


def closing(wire: GenerateCall, piece: Piece, said: str) -> dict[str, Any]:
    assert isinstance(wire.inputs, str), "only one text is streamed"
    details = {**ending(wire, piece), "input_length": piece.usage.prompt_tokens} if wire.parameters.details else None
    return {"generated_text": full(wire, wire.inputs, said), "details": details}
