"""Requests of one message have their options in common, which are sent once: the first request is sent whole, and of
the others only what is their own.

Otherwise a grammar of 60 KB would be sent once for each of the 16,000 prompts of a call.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import ValidationError

from ..core.request import Encode, Generate, Request
from .frames import FrameError, SimilarRequest, describe_error, row_validator

# Fields that differ between the requests of a call.  So does the seed of a Generate.
OWN_FIELDS: Mapping[type, tuple[str, ...]] = {
    Generate: ("id", "tokens", "source", "max_tokens", "group", "prompt_logprobs"),
    Encode: ("id", "tokens", "segments", "rows", "hidden", "label_rows", "text_rows"),
}


def own_validator(kind: type) -> Callable[[Any], Any]:
    """Return a function that validates the values of the own fields; None: as in the other request."""
    types: Mapping[str, Any] = {field.name: field.type for field in fields(kind)}
    return row_validator(*(types[name] | None for name in OWN_FIELDS[kind]))


VALIDATORS = {kind: own_validator(kind) for kind in OWN_FIELDS}


def shorten_request(number: int, other: Request, request: Request) -> Request | SimilarRequest:
    """Return what is sent of `request` in a message that has `other`, the request with `number`, before it."""
    kind = type(request)
    if type(other) is not kind or kind not in OWN_FIELDS:
        return request
    own = {name: getattr(request, name) for name in OWN_FIELDS[kind]}
    seed = request.sampling.seed if isinstance(request, Generate) else 0
    if change_request(other, own, seed) != request:
        return request
    return SimilarRequest(number, seed, tuple(None if is_same(other, *pair) else pair[1] for pair in own.items()))


def is_same(other: Request, name: str, value: object) -> bool:
    theirs = getattr(other, name)
    return theirs is value or theirs == value


def complete_request(similar: SimilarRequest, others: Mapping[int, Request]) -> Request:
    """Return the request that is similar to one of `others`, by their numbers.  Raises FrameError."""
    other = others.get(similar.number)
    kind = type(other)
    if other is None or kind not in OWN_FIELDS:
        raise FrameError(f"a request is similar to {similar.number}, which is none of the same message")
    try:
        values = VALIDATORS[kind](similar.own)
    except ValidationError as error:
        raise FrameError(f"a similar request: {describe_error(error)}") from None
    pairs = zip(OWN_FIELDS[kind], values, strict=True)
    return change_request(other, {name: value for name, value in pairs if value is not None}, similar.seed)


def change_request(other: Request, own: Mapping[str, Any], seed: int) -> Request:
    """Return `other` with the values `own` and another seed."""
    if not isinstance(other, Generate):
        return replace(other, **own)
    return replace(other, sampling=replace(other.sampling, seed=seed), **own)
