"""Prompts to be continued: from what a dialect read to the requests that the engine takes.

Knows no HTTP and no tensor.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from service.errors import BadRequest, EmptyInput, TooLong
from service.limits import check_characters, known_tokens, place
from service.model import Model
from service.request import Generate, Sampling, Terms


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the checkpoint's template."""

    messages: tuple[Mapping[str, Any], ...]


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Prompts to be continued, all in the same way.  `field` is the wire's name for them, `limit` for their limit."""

    field: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    seeded: bool = False  # the sampling's seed was asked for; otherwise every request draws its own
    max_tokens: int = 0  # 0: as many as the context leaves
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int = -1  # as in Generate
    limit: str = "max_tokens"


def read_prompts(model: Model, asked: Continuation, call: str, terms: Terms) -> list[Generate]:
    known_tokens(model, list(asked.stop_tokens), "stop_token_ids")
    requests = []
    for index, prompt in enumerate(asked.prompts):
        where = place(asked.field, index, len(asked.prompts))
        tokens = prompt_tokens(model, prompt, where)
        seed = asked.sampling.seed if asked.seeded else random.getrandbits(63)
        requests.append(
            Generate(
                id=f"{call}-{index}",
                tokens=tokens,
                max_tokens=room(model, len(tokens), asked, where),
                stop_tokens=asked.stop_tokens if asked.ignore_eos else asked.stop_tokens | model.stop_tokens,
                sampling=replace(asked.sampling, seed=seed),
                logprobs=asked.logprobs,
                terms=terms,
                adapter=model.adapter,
            )
        )
    return requests


def prompt_tokens(model: Model, prompt: Prompt, where: str) -> tuple[int, ...]:
    match prompt:
        case str():
            ids = encoded(model, prompt, where, special=True) if prompt else []
        case Chat():
            # the template writes the special tokens itself
            ids = encoded(model, rendered(model, prompt, where), where, special=False)
        case _:
            ids = list(prompt)
    if not ids:
        raise EmptyInput(f"{where}: is empty, there is nothing to continue", param=where)
    return tuple(known_tokens(model, ids, where))


def encoded(model: Model, text: str, where: str, *, special: bool) -> list[int]:
    """The text's tokens; TooLong before there is a list of them."""
    check_characters(model, text, where)
    [encoding] = model.tokenizer.encode_batch([text], special=special, offsets=False)
    check_length(model, len(encoding), where)
    return encoding.ids


def check_length(model: Model, length: int, where: str) -> None:
    if length > model.max_tokens:
        raise TooLong(f"{where}: the prompt has {length} tokens, the model takes {model.max_tokens}", param=where)


def rendered(model: Model, prompt: Chat, where: str) -> str:
    if model.chat is None:
        raise BadRequest(f"{where}: {model.name} has no chat template; ask for a completion instead", param=where)
    return model.chat.render(prompt.messages)


def room(model: Model, length: int, asked: Continuation, where: str) -> int:
    """How many tokens may follow a prompt of `length`: as many as are wanted, or as the context leaves."""
    check_length(model, length, where)
    limit, wanted = model.max_tokens, asked.max_tokens
    if length == limit:
        raise TooLong(
            f"{where}: the prompt has {length} tokens of the {limit} the model takes, none is left", param=where
        )
    if length + wanted > limit:
        raise TooLong(
            f"{asked.limit}: the prompt has {length} tokens and {wanted} more are asked for, the model takes {limit}",
            param=asked.limit,
        )
    return wanted or limit - length
