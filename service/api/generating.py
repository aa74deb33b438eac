"""How prompts are continued, for every dialect that does so.

Knows no dialect's words.
"""

from collections.abc import AsyncGenerator

from fastapi import Request

from service.api.dialect import Work, server, submitter, terms
from service.model import Model
from service.prompts import Continuation
from service.transcript import Piece, continued

Answers = AsyncGenerator[tuple[int, Piece], None]


async def begun(request: Request, wire: Work, model: Model, asked: Continuation, call: str) -> tuple[int, Answers]:
    """How many answers there will be, and the answers, not yet submitted; `call` is in the ids of their requests."""
    requests = await server(request).text.prompts(model, asked, call, terms(request, wire))
    return len(requests), continued(model.tokenizer, asked.stops, requests, submitter(request, model))
