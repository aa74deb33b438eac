"""Prompts as the model gets them, in vLLM's words: as tokens, and back; a conversation as its template writes it.

Its POST /tokenize has the address of text-embeddings-inference's (`tei`), and errors in its form there, in OpenAI's
elsewhere.  The one idea: a conversation is read as if it were to be answered, so what is shown is what would be.
"""

from typing import Annotated, Any, get_args

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....concurrency.outcome import on_thread
from ....core.model import Model
from ....core.request import Task
from ....resources.request_memory import Claim
from ....text.chat_prompt import fitted
from ....text.prompts import Chat
from ....text.tokenization import Decoding, spell_tokens
from ...shared.dialect import MOST_IDS, TokenId, Wire, about, at_most, body, permitted, server, takes, visit
from ...shared.streaming import Parts, answer, dumps_sliced
from ..openai.wire import ChatRequest, read_chat

ALL = get_args(Task)
router = APIRouter(tags=["tokens"])


class PromptRequest(Wire):
    """A text, with the special tokens that the model wants round it."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ConversationRequest(ChatRequest):
    """A chat's whole body."""

    model: str = ""
    return_token_strs: bool = False


class DetokenizeRequest(Wire):
    model: str = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(MOST_IDS)]


Prompted = PromptRequest | ConversationRequest
KINDS = (PromptRequest, ConversationRequest)


def read(value: Any) -> Prompted | None:
    """None if what came is of neither kind."""
    if isinstance(value, dict) and "messages" in value:
        return ConversationRequest.read(value)
    return PromptRequest.read(value) if isinstance(value, dict) and "prompt" in value else None


async def tokenized(request: Request, wire: Prompted) -> Response:
    """What POST /tokenize answers."""
    model = named(request, wire.model)
    with visit(request).tokenising():
        _, ids = await prompted(request, model, wire)
    # a long text has as many entries as tokens: not on the event loop
    claim = visit(request).claim
    return await on_thread(lambda: Parts([dumps_sliced(write_tokens(model, wire, ids, claim))]))


async def prompted(request: Request, model: Model, wire: Prompted) -> tuple[str, list[int]]:
    """Its text and its tokens.  A template has written the special ones itself."""
    text, terms = server(request).text, visit(request).terms
    if isinstance(wire, PromptRequest):
        return await text.prompted(model, wire.prompt, "prompt", special=wire.add_special_tokens, terms=terms)
    [chat] = fitted(read_chat(wire), model).prompts
    assert isinstance(chat, Chat), "a conversation"
    return await text.prompted(model, chat, "messages", special=False, terms=terms)


def named(request: Request, name: str) -> Model:
    """The model in the path, or in the body."""
    return about(request, permitted(request).resolve(request.path_params.get("name", "") or name, ALL))


def write_tokens(model: Model, wire: Prompted, ids: list[int], claim: Claim) -> dict[str, Any]:
    field = "prompt" if isinstance(wire, PromptRequest) else "messages"
    pieces = spell_tokens(model, ids, claim, field) if wire.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_tokens, "tokens": ids, "token_strs": pieces}


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest), summary="Tokens as a text, special ones too.")
async def detokenize(request: Request) -> Response:
    wire = await body(request, DetokenizeRequest)
    return await answer(request, detokenized(request, wire))


async def detokenized(request: Request, wire: DetokenizeRequest) -> Response:
    model, terms = named(request, wire.model), visit(request).terms
    asked = Decoding([wire.tokens], "tokens")
    [text] = await server(request).text.decoded(model, asked, visit(request).claim, terms)
    return await on_thread(lambda: Parts([dumps_sliced({"prompt": text})]))


@router.post(
    "/v1/chat/template", openapi_extra=takes(ConversationRequest), summary="The prompt that a conversation becomes."
)
async def template(request: Request) -> Response:
    wire = await body(request, ConversationRequest)
    return await answer(request, templated(request, wire))


async def templated(request: Request, wire: ConversationRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, ["generate"]))
    with visit(request).tokenising():
        text, ids = await prompted(request, model, wire)
    claim = visit(request).claim
    return await on_thread(lambda: Parts([dumps_sliced({"prompt": text, **write_tokens(model, wire, ids, claim)})]))
