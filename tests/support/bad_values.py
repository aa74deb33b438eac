"""Requests with invalid values for every numeric field of every route that generates."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyhead.service.api.dialects.anthropic import wire as anthropic_wire
from polyhead.service.api.dialects.hf import wire as hf_wire
from polyhead.service.api.dialects.oip import wire as oip_wire
from polyhead.service.api.dialects.openai import wire as openai_wire
from polyhead.service.api.dialects.responses import wire as responses_wire
from polyhead.service.api.dialects.tgi import routes as tgi
from polyhead.service.api.shared.dialect import Wire

VALUES = (-(1 << 63), -1, 0, 1, 1 << 31, 1 << 63, 1e308, math.nan, "1", None, True)
NOBODY = 10**8  # a token id of no vocabulary
NOT_ONE = ("length_penalty", "top_logprobs", "timeout")
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}


@dataclass(frozen=True)
class Route:
    """A wire object, a body that costs little, and the fields that are token ids or contain them."""

    wire: type[Wire]
    body: Mapping[str, Any]
    tokens: Mapping[str, Any]


SPOKEN = {"stop_token_ids": [NOBODY], "logit_bias": {str(NOBODY): 1}, "allowed_token_ids": [NOBODY]}
DRAWN = {**SPOKEN, "bad_words_ids": [[5, NOBODY]], "suppress_tokens": [NOBODY]}
INSIDE = {f"parameters.{name}": value for name, value in DRAWN.items()}
ROUTES = {
    "/v1/completions": Route(
        openai_wire.CompletionRequest,
        {"model": "chat", "prompt": "a", "max_tokens": 1},
        {**SPOKEN, "prompt": [5, NOBODY]},
    ),
    "/v1/chat/completions": Route(
        openai_wire.ChatRequest,
        {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        SPOKEN,
    ),
    "/v1/responses": Route(responses_wire.ResponseRequest, {"model": "chat", "input": "a", "max_output_tokens": 1}, {}),
    "/v1/messages": Route(
        anthropic_wire.MessagesRequest,
        {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        {},
    ),
    "/generate": Route(tgi.TgiGenerateRequest, {"inputs": "a", "parameters": {"max_new_tokens": 1}}, INSIDE),
    "/models/chat": Route(hf_wire.HfGenerateRequest, {"inputs": "a", "parameters": {"max_new_tokens": 1}}, INSIDE),
    "/v2/models/chat/generate": Route(oip_wire.TextRequest, {"text_input": "a", "max_tokens": 1}, DRAWN),
    "/v2/models/chat/infer": Route(
        oip_wire.OipGenerateRequest, {"inputs": [TENSOR], "parameters": {"max_tokens": 1}}, INSIDE
    ),
}


def numbers(kind: type[Wire]) -> Iterator[str]:
    """The numeric fields; those of `parameters` too."""
    for name, field in kind.model_fields.items():
        if field.annotation in (int, float):
            yield name
        if name == "parameters" and kind is not oip_wire.TextRequest:  # whose options may stand beside the text
            yield from (f"{name}.{inner}" for inner in numbers(field.annotation))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Call:
    path: str
    field: str
    value: Any
    body: bytes

    @property
    def is_valid(self) -> bool:
        """Whether the value is valid: null where the field is optional, and 1 for all fields except those of
        NOT_ONE."""
        if self.value is None:
            field = ROUTES[self.path].wire.model_fields.get(self.field)
            return field is None or not field.is_required()
        return self.value == 1 and self.value is not True and self.name not in NOT_ONE

    @property
    def name(self) -> str:
        return self.field.rpartition(".")[2]


def asked() -> Iterator[Call]:
    for path, route in ROUTES.items():
        for field in numbers(route.wire):
            for value in VALUES:
                yield Call(path, field, value, spelled(route, field, value))
        for field, value in route.tokens.items():
            yield Call(path, field, value, spelled(route, field, value))


def spelled(route: Route, field: str, value: Any) -> bytes:
    body = json.loads(json.dumps(route.body))
    *parents, name = field.split(".")
    place = body
    for parent in parents:
        place = place.setdefault(parent, {})
    place[name] = value
    return json.dumps(body).encode()
