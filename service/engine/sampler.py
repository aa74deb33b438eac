"""Samples the next tokens of a whole batch by torch, and scores them.

Each row is sampled with one uniform random number by operations on that row alone, so the tokens of a seed do not
depend on the batch.

Temperature, top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2025, arXiv:2407.01082) and
typical-p (Meister et al. 2022, arXiv:2202.00666) apply in this order and with the meaning they have in transformers.
On a CPU compiled code can take this part (`native_sampling`), with the same options.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.request import Sampling
from .logits_processors import LogitsProcessor, MaskWords, apply_masks, process_logits

TOP_K_BLOCK = 64  # columns reduced to their maximum first: two short searches instead of a long one
MIN_TEMPERATURE = 1e-4  # lower temperatures are raised to this one: logits divided by it stay finite
SORT_LIMIT = 1 << 20  # logits sorted at a time: bounds the memory

TokenScore = tuple[float, tuple[tuple[int, float], ...]]
NO_SCORE: TokenScore = (0.0, ())


class SampleRow(NamedTuple):
    """A token to be sampled from one row of logits with a uniform random number in [0, 1).

    The row is changed by `processor` first, and only tokens whose bit is 1 in `mask` [ceil(V / 32)] are allowed.  The
    score is the token's log-probability and those of the `logprobs` likeliest tokens, before these changes; -1: none.
    """

    row: int
    sampling: Sampling
    uniform: float
    processor: LogitsProcessor | None = None
    mask: MaskWords | None = None
    logprobs: int = -1


class Sampler(Protocol):
    """Samples tokens.  One thread calls it."""

    def sample(self, logits: Tensor, samples: Sequence[SampleRow]) -> list[tuple[int, TokenScore]]:
        """A token and its score for each of `samples`, from the rows of `logits` [N, V], which are not changed.

        The token is -1 where none is allowed.
        """


class TorchSampler:
    """Samples by torch, on any device."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)  # for changed logits, reused from step to step: new memory costs more

    def sample(self, logits: Tensor, samples: Sequence[SampleRow]) -> list[tuple[int, TokenScore]]:
        """See Sampler."""
        rows = [each.row for each in samples]
        logits = logits if rows == list(range(len(logits))) else logits[rows]
        processed = process_logits(logits, [each.processor for each in samples], self._buffer_like(logits))
        masks = {index: each.mask for index, each in enumerate(samples) if each.mask is not None}
        processed = apply_masks(processed, masks, self._buffer_like(logits))
        tokens = sample_rows(processed, [each.sampling for each in samples], [each.uniform for each in samples])
        return list(zip(tokens, score_tokens(logits, tokens, [each.logprobs for each in samples]), strict=True))

    def _buffer_like(self, logits: Tensor) -> Tensor:
        if self._buffer.numel() < logits.numel() or self._buffer.device != logits.device:
            self._buffer = torch.empty(logits.numel(), dtype=logits.dtype, device=logits.device)
        return self._buffer[: logits.numel()].view(logits.shape)


def sample_rows(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token for each row of `logits` [N, V] by its uniform number in [0, 1); -1 where all are minus infinity."""
    tokens = [-1] * len(samplings)
    greedy = [row for row, sampling in enumerate(samplings) if not sampling.temperature]
    random = [row for row, sampling in enumerate(samplings) if sampling.temperature]
    if greedy:
        values, columns = _select_rows(logits, greedy).max(dim=1)  # the first of equal maxima
        _set_rows(tokens, greedy, columns.where(values > -math.inf, -1).tolist())
    rows_at_once = max(SORT_LIMIT // logits.size(1), 1)
    for part in (random[start : start + rows_at_once] for start in range(0, len(random), rows_at_once)):
        sampled = sample_sorted(
            _select_rows(logits, part), [samplings[row] for row in part], [uniforms[row] for row in part]
        )
        _set_rows(tokens, part, sampled)
    return tokens


def _set_rows(tokens: list[int], rows: list[int], chosen: list[int]) -> None:
    for row, token in zip(rows, chosen, strict=True):
        tokens[row] = token


def score_tokens(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenScore]:
    """The log-probability of each row's token and of the `counts` likeliest, at temperature 1.

    A count of 0 asks for the token's alone, -1 for nothing: (0.0, ()), which a token of -1 gets, too.
    """
    counts = [count if token >= 0 else -1 for token, count in zip(tokens, counts, strict=True)]
    scored = [NO_SCORE] * len(counts)
    for wanted in {count for count in counts if count >= 0}:  # which of equal values come first depends on the count
        rows = [row for row, count in enumerate(counts) if count == wanted]
        logprobs = _select_rows(logits, rows).log_softmax(dim=-1)  # [M, V]
        sampled = torch.tensor([tokens[row] for row in rows], device=logits.device)
        logprobs_sampled = logprobs.gather(1, sampled[:, None])[:, 0].tolist()
        values, columns = _top_k(logprobs, min(wanted, logits.size(1)))
        for row, logprob, ids, top in zip(rows, logprobs_sampled, columns.tolist(), values.tolist(), strict=True):
            scored[row] = logprob, tuple(pair for pair in zip(ids, top, strict=True) if pair[1] > -math.inf)
    return scored


def score_targets(logits: Tensor, token: int, targets: Sequence[int]) -> TokenScore:
    """The log-probability of a row's token and those of `targets`, at temperature 1, from its logits [V]."""
    if token < 0:
        return NO_SCORE
    logprobs = logits.log_softmax(dim=-1)[[token, *targets]].tolist()
    return logprobs[0], tuple(zip(targets, logprobs[1:], strict=True))


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows hold neither infinity nor NaN.  One pass: a sum is finite only if all its terms are."""
    finite: list[bool] = logits.sum(dim=-1, dtype=torch.float32).isfinite().tolist()
    return finite


def sampling_bytes(rows: int, words: int, kept: int = 0, *, sorts: bool) -> int:
    """Upper bound of the memory for sampling from float32 logits [rows, words], each copied once more in `kept` bytes.

    Four times the logits: they, the processed logits, and a selection to be scored before and after softmax.  Where
    torch sorts (`sorts`), also the rows that are sorted at a time: values, columns, weights and their sums, most of 8
    bytes.
    """
    sorted_logits = min(rows, max(SORT_LIMIT // words, 1)) * words if sorts else 0
    return rows * words * (4 * 4 + kept) + sorted_logits * 48


def sample_sorted(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token for each row of [M, V], as `sample_rows`, by inverting the cumulative distribution."""
    scaled = logits / _column_tensor([max(sampling.temperature, MIN_TEMPERATURE) for sampling in samplings], logits)
    if any(sampling.top_k or sampling.top_p < 1 or sampling.min_p for sampling in samplings):
        _keep_likely(scaled, samplings)
    if any(sampling.typical_p < 1 for sampling in samplings):
        _keep_typical(scaled, samplings)
    cumulative = (scaled - scaled.amax(dim=1, keepdim=True)).exp().nan_to_num(0).double().cumsum(dim=1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    target = target.minimum(torch.nextafter(cumulative[:, -1:], torch.zeros_like(target)))
    places = torch.searchsorted(cumulative, target, right=True)
    tokens: list[int] = places.where(cumulative[:, -1:] > 0, -1)[:, 0].tolist()
    return tokens


def _keep_likely(scaled: Tensor, samplings: Sequence[Sampling]) -> None:
    """Set to minus infinity in [M, V] what top-k, top-p and min-p exclude."""
    descending, columns = scaled.sort(dim=1, descending=True)
    width = scaled.size(1)
    ranks = torch.tensor([min(s.top_k or width, width) - 1 for s in samplings], device=scaled.device)
    descending.masked_fill_(descending < descending.gather(1, ranks[:, None]), -math.inf)  # ties with the last stay
    weights = descending.softmax(dim=1).nan_to_num_(0).double()
    before = weights.cumsum(dim=1) - weights
    kept = before < _column_tensor([s.top_p if s.top_p < 1 else math.inf for s in samplings], before)
    kept &= weights >= _column_tensor([s.min_p for s in samplings], weights) * weights[:, :1]
    kept[:, 0] = True
    scaled.scatter_(1, columns, descending.masked_fill_(~kept, -math.inf))


def _keep_typical(scaled: Tensor, samplings: Sequence[Sampling]) -> None:
    """Set to minus infinity in [M, V] what typical-p excludes."""
    logs = scaled.log_softmax(dim=1)
    weights = logs.exp()
    distance = (logs + torch.special.entr(weights).sum(dim=1, keepdim=True)).abs_()
    ascending, columns = distance.sort(dim=1)
    before = weights.gather(1, columns).double().cumsum(dim=1) - weights.gather(1, columns)
    mass = _column_tensor([s.typical_p if s.typical_p < 1 else math.inf for s in samplings], before)
    last = (before < mass).sum(dim=1, keepdim=True).clamp_(min=1) - 1
    scaled.masked_fill_(distance > ascending.gather(1, last), -math.inf)


def _top_k(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, descending, and their columns: both [M, count], as `topk`, but faster.

    They lie in the `count` blocks with the largest maxima.
    """
    if 2 * count * TOP_K_BLOCK > logits.size(1):
        values, columns = logits.topk(count)
        return values, columns
    blocks = _block_maxima(logits).topk(count, dim=1).indices  # [M, count]
    columns = _block_columns(blocks.flatten(), logits.size(1)).view(len(logits), -1)
    values = logits.gather(1, columns).masked_fill_(_repeated_columns(columns), float("-inf"))
    values, places = values.topk(count)
    return values, columns.gather(1, places)


def _block_maxima(values: Tensor) -> Tensor:
    """[M, V] to [M, blocks]: the maximum of every TOP_K_BLOCK columns; the last block may be shorter."""
    full_width = values.size(1) // TOP_K_BLOCK * TOP_K_BLOCK
    parts = [values[:, :full_width].view(len(values), -1, TOP_K_BLOCK).amax(dim=-1)] if full_width else []
    if full_width < values.size(1):
        parts.append(values[:, full_width:].amax(dim=1, keepdim=True))
    return torch.cat(parts, dim=1)


def _block_columns(block: Tensor, width: int) -> Tensor:
    """[M] blocks to the columns of each [M, TOP_K_BLOCK]; past the end the last column is repeated."""
    return (block[:, None] * TOP_K_BLOCK + torch.arange(TOP_K_BLOCK, device=block.device)).clamp(max=width - 1)


def _repeated_columns(columns: Tensor) -> Tensor:
    """Which of the columns of some blocks repeat the one before."""
    repeated = torch.zeros_like(columns, dtype=torch.bool)
    repeated[:, 1:] = columns[:, 1:] == columns[:, :-1]
    return repeated


def _column_tensor(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _select_rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
