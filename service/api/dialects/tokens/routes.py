"""Tokenizes prompts and conversations as the model gets them, and detokenizes, in vLLM's format.

POST /tokenize shares its address with text-embeddings-inference (`tei`) and has its error format there; the other
routes have OpenAI's.  A conversation is read as if it were to be answered, so the result is exactly the prompt.
"""

from collections.abc import Callable
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.model import Model
from ....core.request import Task
from ....resources.request_memory import BYTES_PER_LISTED_TOKEN, MemoryClaim
from ....text.generation_request import ChatMessages
from ....text.tokenization import Decoding, spell_tokens
from ...shared.dialect import (
    MAX_IDS,
    TokenId,
    Wire,
    answer_threads,
    authorized_models,
    check_path_model,
    describe_body,
    max_items,
    read_body,
    record_model,
    request_context,
    text_processor,
)
from ...shared.generation_calls import fit_conversation
from ...shared.streaming import PartsResponse, dump_chunks, run_while_connected
from ..openai.wire import ChatRequest, read_chat

ALL_TASKS = get_args(Task)
router = APIRouter(tags=["tokens"])


class PromptRequest(Wire):
    """A text; the model's special tokens are added around it."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ConversationRequest(ChatRequest):
    """The body of a chat request."""

    model: str = ""
    return_token_strs: bool = False


class DetokenizeRequest(Wire):
    model: str = ""
    tokens: Annotated[list[TokenId], Field(fail_fast=True), max_items(MAX_IDS)]


TokenizeInput = PromptRequest | ConversationRequest
TOKENIZE_KINDS = (PromptRequest, ConversationRequest)


def read_tokenize(value: Any) -> TokenizeInput | None:
    """The wire object; None if the body is of neither kind."""
    if isinstance(value, dict) and "messages" in value:
        return ConversationRequest.read(value)
    return PromptRequest.read(value) if isinstance(value, dict) and "prompt" in value else None


async def answer_tokens(request: Request, wire: TokenizeInput) -> Response:
    """The response of POST /tokenize."""
    model = find_model(request, wire.model)
    with request_context(request).time_tokenising():
        _, ids = await encode_prompt(request, model, wire)
    # a long text has very many tokens: write them on a thread
    claim = request_context(request).claim
    return await write_response(request, len(ids), lambda: write_tokens(model, wire, ids, claim))


async def encode_prompt(request: Request, model: Model, wire: TokenizeInput) -> tuple[str, list[int]]:
    """The prompt's text and token ids.  A chat template writes the special tokens itself."""
    text, terms = text_processor(request), request_context(request).terms
    if isinstance(wire, PromptRequest):
        return await text.render_prompt(model, wire.prompt, "prompt", special=wire.add_special_tokens, terms=terms)
    [chat] = (await fit_conversation(request, read_chat(wire), model)).prompts
    assert isinstance(chat, ChatMessages), "a conversation"
    return await text.render_prompt(model, chat, "messages", special=False, terms=terms)


def find_model(request: Request, name: str) -> Model:
    """The model in the path, or in the body."""
    in_path = request.path_params.get("name", "")
    check_path_model(name, in_path, "model")
    return record_model(request, authorized_models(request).resolve(in_path or name, ALL_TASKS))


async def write_response(request: Request, count: int, content: Callable[[], dict[str, Any]]) -> Response:
    """A response with `content`, which lists `count` tokens or their text, written on a thread."""
    size = BYTES_PER_LISTED_TOKEN * count
    return PartsResponse(await answer_threads(request).run(size, lambda: dump_chunks(content())))


def write_tokens(model: Model, wire: TokenizeInput, ids: list[int], claim: MemoryClaim) -> dict[str, Any]:
    field = "prompt" if isinstance(wire, PromptRequest) else "messages"
    claim.grow(BYTES_PER_LISTED_TOKEN * len(ids), "the list of tokens")
    pieces = spell_tokens(model, ids, claim, field) if wire.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_tokens, "tokens": ids, "token_strs": pieces}


@router.post(
    "/detokenize", openapi_extra=describe_body(DetokenizeRequest), summary="Tokens as a text, special ones too."
)
async def detokenize(request: Request) -> Response:
    wire = await read_body(request, DetokenizeRequest)
    return await run_while_connected(request, answer_detokenize(request, wire))


async def answer_detokenize(request: Request, wire: DetokenizeRequest) -> Response:
    model, terms = find_model(request, wire.model), request_context(request).terms
    decoding = Decoding([wire.tokens], "tokens")
    [text] = await text_processor(request).decode(model, decoding, terms)
    return await write_response(request, len(wire.tokens), lambda: {"prompt": text})


@router.post(
    "/v1/chat/template",
    openapi_extra=describe_body(ConversationRequest),
    summary="The prompt that a conversation becomes.",
)
async def template(request: Request) -> Response:
    wire = await read_body(request, ConversationRequest)
    return await run_while_connected(request, answer_template(request, wire))


async def answer_template(request: Request, wire: ConversationRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    with request_context(request).time_tokenising():
        text, ids = await encode_prompt(request, model, wire)
    claim = request_context(request).claim
    return await write_response(request, len(ids), lambda: {"prompt": text, **write_tokens(model, wire, ids, claim)})
