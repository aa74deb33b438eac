"""Writes the responses of the OpenAI dialect, whole or as stream chunks."""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....concurrency.time_slices import LazySequence, map_lazily
from ....core.model import Model
from ....core.version import VERSION
from ....text.answer_delta import AnswerDelta, TokenLogprobs, Usage
from ....text.encoder_outputs import ScoreOutput, SparseVector, TokenVectors
from ...shared.streaming import as_float32
from ...shared.task_names import describe_model, model_tasks
from ...shared.timestamps import format_time


@dataclass(frozen=True)
class CompletionInfo:
    """What all objects of one response have in common."""

    id: str
    model: str
    created: int  # seconds since 1970
    fingerprint: str = ""
    include_usage: bool = False  # streams: the last chunk has the usage
    answers_per_prompt: int = 1  # answers to each prompt
    echoes: tuple[str, ...] = ()  # the prompts, if they are repeated in the answers
    include_logprobs: bool = False  # those of the tokens, and of an echoed prompt
    include_prompt_logprobs: bool = False  # the prompt's log-probabilities are returned separately


def write_completion(call: CompletionInfo, answers: Sequence[AnswerDelta]) -> dict[str, Any]:
    """Each choice is written when it is read: together those of many answers are hundreds of thousands of objects."""

    def write_choice(index: int) -> dict[str, Any]:
        prompt = answers[index - index % call.answers_per_prompt].prompt_logprobs
        return write_text_choice(call, index, replace(answers[index], prompt_logprobs=prompt), first=True)

    choices = LazySequence(len(answers), write_choice)
    return write_completion_object(call, "text_completion", choices) | {
        "usage": write_openai_usage(total_usage(answers))
    }


def write_completion_chunk(call: CompletionInfo, index: int, piece: AnswerDelta, *, first: bool) -> dict[str, Any]:
    return add_null_usage(
        call, write_completion_object(call, "text_completion", [write_text_choice(call, index, piece, first=first)])
    )


def write_usage_chunk(call: CompletionInfo, object: str, cost: dict[str, Any]) -> dict[str, Any]:
    return write_completion_object(call, object, []) | {"usage": cost}


def add_null_usage(call: CompletionInfo, chunk: dict[str, Any]) -> dict[str, Any]:
    return chunk | {"usage": None} if call.include_usage else chunk


def write_completion_object(call: CompletionInfo, object: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": call.id,
        "object": object,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": call.fingerprint,
        "choices": choices,
    }


def system_fingerprint(model: Model) -> str:
    """A name of all that decides which tokens a seed leads to: the server's version, the model and how it is computed.

    It does not change when a file is replaced by another at the same place.
    """
    parts = (VERSION, model.name, model.source, model.dtype, model.executor)
    return f"fp_{blake2b(repr(parts).encode(), digest_size=6).hexdigest()}"


def write_text_choice(call: CompletionInfo, index: int, piece: AnswerDelta, *, first: bool) -> dict[str, Any]:
    """One choice.  The `first` chunk of an answer begins with the prompt, and its tokens, if it is echoed."""
    text, tokens = piece.text, piece.logprobs
    if call.echoes:
        echo = call.echoes[index // call.answers_per_prompt]
        tokens = tuple(replace(each, offset=each.offset + len(echo)) for each in tokens)
        if first:
            text, tokens = echo + text, (*(piece.prompt_logprobs if call.include_logprobs else ()), *tokens)
    # an answer without a token has empty lists
    logprobs = write_text_logprobs(tokens) if tokens or (call.include_logprobs and first) else None
    stop = {"stop_reason": piece.stop} if piece.stop != "" else {}
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish or None, **stop}
    return choice | (
        {"prompt_logprobs": write_prompt_logprobs(piece.prompt_logprobs)}
        if call.include_prompt_logprobs and first
        else {}
    )


def write_text_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The log-probabilities as parallel lists.  The sampled token is always among the top tokens."""
    return {
        "tokens": map_lazily(lambda each: each.token.text, tokens),
        "token_logprobs": map_lazily(lambda each: each.token.logprob, tokens),
        "top_logprobs": map_lazily(write_top_logprobs, tokens),
        "text_offset": map_lazily(lambda each: each.offset, tokens),
    }


def write_top_logprobs(token: TokenLogprobs) -> dict[str, float | None] | None:
    """None for the first token of a prompt, which has no log-probability."""
    if token.token.logprob is None:
        return None
    return {one.text: one.logprob for one in (*token.top, token.token)}


def write_prompt_logprobs(prompt: Sequence[TokenLogprobs]) -> Sequence[dict[str, Any] | None]:
    """The prompt's log-probabilities as vLLM writes them: for each token an object keyed by token id."""
    return map_lazily(write_vllm_logprobs, prompt)


def write_vllm_logprobs(each: TokenLogprobs) -> dict[str, Any] | None:
    if each.token.logprob is None:
        return None
    scored = {str(each.id): {"logprob": each.token.logprob, "decoded_token": each.token.text}}
    return scored | {str(one.id): {"logprob": one.logprob, "decoded_token": one.text} for one in each.top}


def total_usage(answers: Sequence[AnswerDelta]) -> Usage:
    return sum((piece.usage for piece in answers), Usage())


def write_openai_usage(cost: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.cached_tokens},
    }


def write_embedding(
    output: ScoreOutput | SparseVector | TokenVectors, encoding: Literal["float", "base64"]
) -> NDArray[np.float32] | str | list[dict[str, Any]]:
    """One output of a text: a vector, a vector for each token [T, W], or weights of words as /embed_sparse has
    them."""
    match output:
        case ScoreOutput(values=values):
            return encode_base64(values) if encoding == "base64" else as_float32(values)
        case TokenVectors(rows=rows):
            return as_float32(rows)
        case SparseVector(weights=weights):
            return [{"index": token, "value": weight} for token, weight in weights]


def encode_base64(values: list[float]) -> str:
    """Little-endian 32-bit floats, in base64."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def write_models(models: Sequence[Model], *, explained: bool) -> dict[str, Any]:
    """A list of all models, with the fields of OpenAI's lists, of Anthropic's and of TypeSafe's, which have the same
    path. Of many labels only the first are listed; a model's own path has them all.
    """
    names = [model.name for model in models]
    pages = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    listed = [write_openai_model(model, explained=explained, whole=False) for model in models]
    return {"object": "list", "data": listed, "models": list(map(write_typesafe_model, models)), **pages}


def write_typesafe_model(model: Model) -> dict[str, Any]:
    released = format_time(model.created)[: len("2026-01-01")]
    description = f"{model.family}: {', '.join(model_tasks(model))}"
    return {"name": model.name, "description": description, "release_date": released}


def write_openai_model(model: Model, *, explained: bool, whole: bool) -> dict[str, Any]:
    """A model, with the fields of OpenAI and of Anthropic.  Those from `task` on are an extension, which clients
    ignore; `whole`: with all of its labels."""
    known = {"id": model.name, "object": "model", "created": model.created, "owned_by": "polyhead"}
    created = format_time(model.created)
    anthropic = {"type": "model", "display_name": model.name, "created_at": created}
    return {**known, **anthropic, **describe_model(model, explained=explained, whole=whole)}
