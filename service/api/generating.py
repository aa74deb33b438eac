"""How prompts are continued, for every dialect that does so.

Knows no dialect's words.
"""

import math
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import Request

from service.api.dialect import Work, server, submitter, terms
from service.model import Model
from service.prompts import Continuation
from service.transcript import Piece, Stops, Usage, continued, whole

Answers = AsyncGenerator[tuple[int, Piece], None]


async def begun(request: Request, wire: Work, model: Model, asked: Continuation, call: str) -> tuple[int, Answers]:
    """How many answers there will be, and the answers, not yet submitted; `call` is in the ids of their requests.

    Of several to one prompt the first comes first, then those to the next prompt.
    """
    on = terms(request, wire)
    if server(request).settings.prefix_sharing == "key":
        asked = replace(asked, salt=f"{on.owner}\n{asked.salt}")
    requests = await server(request).text.prompts(model, asked, call, on)
    stops = Stops(asked.stops, asked.stop_tokens, asked.keep_stop)
    answers = continued(model.tokenizer, stops, requests, submitter(request, model))
    if asked.tries > asked.count:
        answers = best(answers, asked)
    return len(asked.prompts) * asked.count, answers


async def best(answers: Answers, asked: Continuation) -> Answers:
    """Of each prompt's tries the best, once all are there; all of them are paid for."""
    tries = await whole(len(asked.prompts) * asked.tries, answers)
    for prompt in range(len(asked.prompts)):
        theirs = tries[prompt * asked.tries : (prompt + 1) * asked.tries]
        ranked = sorted(theirs, key=likelihood, reverse=True)[: asked.count]
        cost = sum((piece.usage for piece in theirs), Usage())
        for place, piece in enumerate(ranked):
            drawn = piece.drawn if asked.logprobs >= 0 else ()
            usage = cost if not place else Usage()
            yield prompt * asked.count + place, replace(piece, drawn=drawn, usage=usage, prompt=theirs[0].prompt)


def likelihood(piece: Piece) -> float:
    """The mean log-probability of an answer's tokens."""
    scores = [drawn.token.logprob for drawn in piece.drawn if drawn.token.logprob is not None]
    return sum(scores) / len(scores) if scores else -math.inf
