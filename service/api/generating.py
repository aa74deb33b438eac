"""How prompts are continued, for every dialect that does so.

Knows no dialect's words.
"""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from fastapi import Request

from service.api.dialect import Work, call_submitter, server, terms, visit
from service.api.served import Served
from service.conversation import Utterances, conversed
from service.errors import BadRequest, NotFound
from service.model import Model, concerning
from service.prompts import Continuation
from service.request import Generate
from service.tools import Talk, expected, fitted, parts
from service.transcript import Piece, Stops, Usage, continued, joined, parted

Answers = AsyncGenerator[tuple[int, Piece], None]


async def begun(request: Request, wire: Work, model: Model, asked: Continuation, call: str) -> tuple[int, Answers]:
    """How many answers there will be, and the answers, not yet submitted; `call` is in the ids of their requests.

    Of several to one prompt the first comes first, then those to the next prompt.
    """
    with visit(request).tokenising():
        settled = apart(request, lasting(request, asked))
        requests = await server(request).text.prompts(model, settled, call, terms(request, wire))
    return len(asked.prompts) * asked.count, answers(request, model, asked, requests)


async def spoken(request: Request, wire: Work, model: Model, talk: Talk, call: str) -> tuple[int, int, Utterances]:
    """As `begun`, with what the answers say told apart; before that, how many tokens the prompt has."""
    with concerning(model):
        asked = apart(request, lasting(request, fitted(talk, model)))
    text, conditions = server(request).text, terms(request, wire)
    try:
        with visit(request).tokenising():
            requests = await text.prompts(model, asked, call, conditions)
    except BadRequest as error:
        if error.param == talk.tools.field:  # with one of them, which its own schema tells
            await text.check(model, parts(talk.tools), conditions)
        raise
    heard = expected(asked, talk.tools, model, requests[0].tokens)
    return asked.count, requests[0].prompt_tokens, conversed(answers(request, model, asked, requests), heard)


def lasting(request: Request, asked: Continuation) -> Continuation:
    """As long as the setting says, where the request does not; no dialect looks at that setting itself."""
    usual = server(request).settings.max_tokens_default
    return replace(asked, usual=usual) if usual else asked


def apart(request: Request, asked: Continuation) -> Continuation:
    """Where each key keeps its prompts to itself, so that nobody finds those of another."""
    if server(request).settings.prefix_sharing == "all":
        return asked
    return replace(asked, salt=f"{visit(request).owner}\n{asked.salt}")


def answers(request: Request, model: Model, asked: Continuation, requests: Sequence[Generate]) -> Answers:
    stops = Stops(asked.stops, asked.stop_tokens, asked.keep_stop)
    every = continued(model.tokenizer, stops, requests, call_submitter(request, model))
    return best(every, asked) if asked.tries > asked.count else every


async def best(answers: Answers, asked: Continuation) -> Answers:
    """Of each prompt's tries the best, once all are there; all of them are paid for."""
    tries = await parted(len(asked.prompts) * asked.tries, answers)
    for prompt in range(len(asked.prompts)):
        theirs = tries[prompt * asked.tries : (prompt + 1) * asked.tries]
        whole = [joined(pieces) for pieces in theirs]
        ranked = sorted(range(asked.tries), key=lambda index: likelihood(whole[index]), reverse=True)[: asked.count]
        cost = sum((piece.usage for piece in whole), Usage())
        for place, index in enumerate(ranked):
            usage = cost if not place else Usage()
            for piece in theirs[index]:
                drawn = piece.drawn if asked.logprobs >= 0 else ()
                scored = whole[0].prompt if piece is theirs[index][0] else ()
                paid = usage if piece.finish else piece.usage
                yield prompt * asked.count + place, replace(piece, drawn=drawn, usage=paid, prompt=scored)


def likelihood(piece: Piece) -> float:
    """The mean log-probability of an answer's tokens."""
    scores = [drawn.token.logprob for drawn in piece.drawn if drawn.token.logprob is not None]
    return sum(scores) / len(scores) if scores else -math.inf


def adapted(registry: Served, base: str, adapter: str) -> Model:
    """The model called `adapter`, or `base`:`adapter`; where there is no `base`, the only one that is called so."""
    field = "parameters.adapter_id"
    name = adapter if ":" in adapter else f"{base.partition(':')[0]}:{adapter}"
    if name.startswith(":"):
        named = [model.name for model in registry.models() if model.name.endswith(name)]
        if len(named) != 1:
            said = f"is an adapter of {', '.join(named)}; say which" if named else "is no adapter that is served here"
            raise BadRequest(f"{field}: {adapter!r} {said}", param=field)
        [name] = named
    try:
        return registry.resolve(name, ["generate"])
    except NotFound as error:
        raise NotFound(f"{field}: {error.message}", param=field) from None
