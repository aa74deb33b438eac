"""The JSON object of an explanation, the same in every dialect, and the limits of its size.

All parts refer to `tokens`, a list that comes first: attributions are a number for each token, rows and columns of
weights are indexes into it.
"""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..concurrency.time_slices import map_lazily
from ..config.settings import Settings
from ..core.errors import AnswerTooLarge, BadRequest
from ..core.model import Model
from ..core.request import AttentionWeights, Attribution, ExplanationResult
from .explain_request import (
    MAX_ATTENTION_WEIGHTS,
    MAX_FLOW_TOKENS,
    PATH_METHODS,
    AttentionLayout,
    DescribedGoal,
    ExplainParameters,
    ExplainSubject,
)

NUMBER_BYTES = 11  # bytes of a number in JSON, approximately
PAIR_BYTES = 17  # bytes of a column and a weight
WEIGHT_BYTES = 8  # bytes of memory for each weight: a float32, and a copy
PAIR_MEMORY_BYTES = 150  # bytes of memory for each column and weight of a top_k
TOKEN_BYTES = 600  # bytes of memory and of JSON for each token
ATTRIBUTION_BYTES = 400  # the same for each token of each attribution
BASE64_BYTES = 3 << 14  # bytes that are encoded at a time; a multiple of 3, so that only the last part is padded
TOLERANCE = 0.05  # share of the score difference that the attributions may miss
ROUNDING = 1e-4
FloatArray = NDArray[np.float32]


# Size limits


def check_size(
    parameters: ExplainParameters, subject: ExplainSubject, layout: AttentionLayout, settings: Settings
) -> None:
    """Raise BadRequest for layers and heads that do not exist, and AnswerTooLarge for too large a response. The message
    suggests a smaller request.
    """
    tokens = len(subject.shown_tokens)
    check_token_count(tokens, settings)
    if parameters.method == "attention_flow" and tokens > MAX_FLOW_TOKENS:
        message = f"input: {tokens} tokens, a flow is computed for at most {MAX_FLOW_TOKENS}; ask for attention_rollout"
        raise AnswerTooLarge(message, param="input")
    if parameters.method == "attention":
        check_weight_count(parameters, subject, layout, settings.explain_mib)


def check_token_count(tokens: int, settings: Settings) -> None:
    if tokens > settings.explain_tokens:
        message = f"input: {tokens} tokens, at most {settings.explain_tokens} are explained; ask about less text"
        raise AnswerTooLarge(message, param="input")


def check_weight_count(
    parameters: ExplainParameters, subject: ExplainSubject, layout: AttentionLayout, mib: int
) -> None:
    check_indexes("layers", parameters.layers, max((layers for layers, _ in layout.values()), default=0))
    check_indexes("heads", parameters.heads, max((heads for _, heads in layout.values()), default=0))
    raw, pairs = count_weights(parameters, subject, layout)
    size_bytes = json_bytes(parameters, raw, pairs)
    if size_bytes > mib << 20 or raw > MAX_ATTENTION_WEIGHTS:
        most = f"at most {MAX_ATTENTION_WEIGHTS} are computed and {mib} MiB returned"
        size = f"would be {raw} weights, {math.ceil(size_bytes / 2**20)} MiB; {most}"
        message = f"layers: this {size}: ask for fewer layers or heads, a top_k, or encoding base64 with dtype float16"
        raise AnswerTooLarge(message, param="layers")


def count_weights(parameters: ExplainParameters, subject: ExplainSubject, layout: AttentionLayout) -> tuple[int, int]:
    """Return how many weights are computed, and how many of them a `top_k` leaves; 0 without one."""
    if parameters.method in PATH_METHODS:
        return len(subject.shown_tokens) ** 2, 0
    if parameters.method != "attention":
        return 0, 0
    raw = pairs = 0
    for kind, (layers, heads) in layout.items():
        rows, columns = (len(some) for some in row_and_column_ranges(kind, subject))
        maps = len(parameters.layers or range(layers)) * len(parameters.heads or range(heads))
        raw += maps * rows * columns
        pairs += maps * rows * min(parameters.top_k, columns)
    return raw, pairs


def json_bytes(parameters: ExplainParameters, raw: int, pairs: int) -> int:
    """Return the approximate bytes of the weights in JSON."""
    if pairs:
        return pairs * PAIR_BYTES
    return math.ceil(raw * (NUMBER_BYTES if not parameters.as_base64 else 2.67 if parameters.half_precision else 5.34))


def memory_of(parameters: ExplainParameters, subject: ExplainSubject, layout: AttentionLayout) -> int:
    """Return the approximate bytes that an explanation takes until it is sent: what is computed, its objects and its
    JSON.
    """
    raw, pairs = count_weights(parameters, subject, layout)
    tokens, targets = len(subject.shown_tokens), max(len(subject.goals), 1) if parameters.needs_target else 0
    weights = raw * WEIGHT_BYTES + pairs * PAIR_MEMORY_BYTES + json_bytes(parameters, raw, pairs)
    return weights + tokens * (TOKEN_BYTES + targets * ATTRIBUTION_BYTES)


def check_indexes(field: str, asked: Sequence[int], count: int) -> None:
    for number in asked:
        if number >= count:
            raise BadRequest(f"{field}: the network has {count}, counted from 0, got {number}", param=field)


# The response


def explanation_object(
    id: str, model: Model, parameters: ExplainParameters, subject: ExplainSubject, found: ExplanationResult
) -> dict[str, Any]:
    return {
        "id": id,
        "model": model.name,
        "task": model.task,
        "method": parameters.method,
        "computed_in": "float32",
        "tokens": [token_object(index, subject) for index in range(len(subject.shown_tokens))],
        "output": subject.output,
        "attributions": [*attribution_objects(parameters, subject, found)],
        "attention": [weights_object(parameters, subject, each) for each in found.weights],
        "usage": usage_object(subject),
    }


def token_object(index: int, subject: ExplainSubject) -> dict[str, Any]:
    token = subject.shown_tokens[index]
    return {
        "index": index,
        "id": token.id,
        "token": token.piece,
        "special": token.special,
        "part": "output" if token.output else "input",
        "text": token.text,
        "start": token.start,
        "end": token.end,
    }


def usage_object(subject: ExplainSubject) -> dict[str, int]:
    written = sum(token.output for token in subject.shown_tokens)
    every = len(subject.shown_tokens)
    return {"prompt_tokens": every - written, "completion_tokens": written, "total_tokens": every}


def attribution_objects(
    parameters: ExplainParameters, subject: ExplainSubject, found: ExplanationResult
) -> Iterator[dict[str, Any]]:
    if parameters.method in PATH_METHODS and not subject.source:  # an encoder has no row of the answer
        matrix = np.asarray(found.weights[0].values)[0, 0]
        for described in subject.goals or (None,):
            yield attribution_object(described, attention_from_answer(matrix, described, found), subject)
    for described, each in zip(subject.goals, found.attributions, strict=False):
        entry = attribution_object(described, np.asarray(each.values), subject)
        entry["target"]["score"] = each.score
        if parameters.method == "integrated_gradients":
            entry["completeness"] = completeness_object(each)
        yield entry


def attention_from_answer(matrix: FloatArray, described: DescribedGoal | None, found: ExplanationResult) -> FloatArray:
    """Return the row of the answer in a rollout or a flow; the mean of several rows."""
    rows = [row for row, _ in described.goal] if described and not found.head_rows else list(found.head_rows)
    return np.asarray(matrix[rows or [len(matrix) - 1]].mean(axis=0), np.float32)


def attribution_object(described: DescribedGoal | None, values: FloatArray, subject: ExplainSubject) -> dict[str, Any]:
    target: dict[str, Any] = {**described.description} if described else {"kind": "text"}
    if described is not None and described.probability is not None:
        target["probability"] = described.probability
    padded = np.zeros(len(subject.shown_tokens), np.float32)  # tokens that were generated later have no attribution
    padded[: len(values)] = values
    return {"target": target, "tokens": padded, "characters": [*character_scores(subject, padded)]}


def character_scores(subject: ExplainSubject, values: FloatArray) -> Iterator[dict[str, Any]]:
    """Yield the attributions of the caller's characters. Tokens that are parts of the same character are added."""
    sums: dict[tuple[int, int, int], float] = {}
    for token, value in zip(subject.shown_tokens, values.tolist(), strict=True):
        if token.text is not None and token.start is not None and token.end is not None and token.start < token.end:
            place = (token.text, token.start, token.end)
            sums[place] = sums.get(place, 0.0) + value
    for (text, start, end), score in sums.items():
        yield {"text": text, "start": start, "end": end, "score": score}


def completeness_object(each: Attribution) -> dict[str, Any]:
    """Check that the attributions sum to the score minus the baseline's score (Sundararajan et al. 2017,
    arXiv:1703.01365).
    """
    difference, total = each.score - each.baseline, float(np.asarray(each.values).sum(dtype=np.float64))
    delta = total - difference
    holds = abs(delta) <= TOLERANCE * abs(difference) + ROUNDING
    return {"difference": difference, "sum": total, "delta": delta, "holds": holds}


def weights_object(parameters: ExplainParameters, subject: ExplainSubject, each: AttentionWeights) -> dict[str, Any]:
    values = np.asarray(each.values)
    rows, columns = row_and_column_ranges(each.kind, subject)
    entry = {"kind": each.kind, "layers": each.layers, "heads": each.heads, "rows": [*rows], "columns": [*columns]}
    return {**entry, "shape": values.shape, **encode_weights(parameters, values, columns)}


def row_and_column_ranges(kind: str, subject: ExplainSubject) -> tuple[range, range]:
    """Return the tokens that attend (rows), and those that they attend to (columns)."""
    read, every = len(subject.source), len(subject.shown_tokens)
    match kind:
        case "cross":
            return range(read, every), range(read)
        case "decoder":
            return range(read, every), range(read, every)
        case _ if read:
            return range(read), range(read)
        case _:
            return range(every), range(every)


def encode_weights(parameters: ExplainParameters, values: FloatArray, columns: range) -> Mapping[str, Any]:
    """Return the weights [L, H, R, C]: of a top_k for each row the largest, which are found when they are written."""
    if parameters.top_k and parameters.method == "attention":
        find_largest = partial(largest_weights, parameters.top_k, columns)
        return {"top": map_lazily(partial(map_lazily, partial(map_lazily, find_largest)), list(values))}
    if parameters.as_base64:
        dtype = np.dtype("<f2" if parameters.half_precision else "<f4")
        packed = encode_base64(np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8))
        return {"values": {"dtype": "float16" if parameters.half_precision else "float32", "data": packed}}
    return {"values": np.ascontiguousarray(values)}


def encode_base64(data: NDArray[np.uint8]) -> str:
    """Encode bytes in base64, BASE64_BYTES in one call, which blocks all other threads."""
    starts = range(0, len(data), BASE64_BYTES)
    return "".join(base64.b64encode(data[start : start + BASE64_BYTES].data).decode() for start in starts)


def largest_weights(count: int, columns: range, row: FloatArray) -> list[tuple[int, float]]:
    order = np.argsort(-row, kind="stable")[:count]
    return [(columns[column], float(row[column])) for column in order.tolist()]
