"""Objects that OpenAI's dialects have in common: errors, and tokens with their log-probabilities."""

from collections.abc import Sequence
from typing import Any

from ...concurrency.time_slices import map_lazily
from ...core.errors import NotFound, PolyheadError
from ...text.answer_delta import ScoredToken, TokenLogprobs


def write_scored_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def write_logprobs(tokens: Sequence[TokenLogprobs]) -> Sequence[dict[str, Any]]:
    """The tokens of an answer with their alternatives; each object is made when it is written."""
    return map_lazily(write_token_logprobs, tokens)


def write_token_logprobs(token: TokenLogprobs) -> dict[str, Any]:
    return write_scored_token(token.token) | {"top_logprobs": [write_scored_token(one) for one in token.top]}


def write_openai_error(error: PolyheadError) -> dict[str, Any]:
    of_model = isinstance(error, NotFound) and error.param == "model"
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param or None,
            "code": "model_not_found" if of_model else error.code,
        }
    }


def error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"
