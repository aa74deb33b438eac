"""Which token comes next: the whole batch at once.

Knows logits and how each row wants its token drawn; nothing of sequences or models.  The one idea: a row is drawn from
one uniform number by inverting its cumulative distribution, along a path that depends on that row alone.  So the draws
of a seed do not depend on the batch, and a batch costs a few passes over its logits.

Temperature, top-k (Fan et al. 2018), top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2025, arXiv:2407.01082)
apply in this order and with the meaning they have in transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from service.request import Sampling

BLOCK = 64  # words looked at as one first: two short searches instead of a long one
CANDIDATES = (64, 1024)  # how many of the likeliest words are sorted, before all of them are
SORTED = 1 << 20  # words sorted at a time: bounds the memory
COLDEST = 1e-4  # temperatures below are taken for this one: logits divided by it stay finite

Scored = tuple[float, tuple[tuple[int, float], ...]]


def sample(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    likeliest: Sequence[int] | None = None,
) -> list[int]:
    """A token for each row of `logits` [N, V], all finite, from a number in [0, 1) for each.

    `likeliest` are the first of each row's largest, where they are known already.
    """
    greedy = [row for row, sampling in enumerate(samplings) if not sampling.temperature]
    cut = [row for row, sampling in enumerate(samplings) if sampling.temperature and _is_cut(sampling)]
    plain = [row for row, sampling in enumerate(samplings) if sampling.temperature and not _is_cut(sampling)]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if greedy:
        known = None if likeliest is None else torch.tensor([likeliest[row] for row in greedy], device=logits.device)
        _put(tokens, greedy, _likeliest(_rows(logits, greedy)) if known is None else known)
    for rows, draw in ((plain, _draw_plain), (cut, _draw_cut)):
        if rows:
            chosen = [samplings[row] for row in rows]
            uniform = torch.tensor([uniforms[row] for row in rows], dtype=torch.float64, device=logits.device)
            _put(tokens, rows, draw(_rows(logits, rows), chosen, uniform))
    drawn: list[int] = tokens.tolist()
    return drawn


def score(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Scored]:
    """The log-probability of each row's token and of the `counts` likeliest, whatever the temperature was.

    A count of 0 asks for the token's alone, -1 for nothing: (0.0, ()).
    """
    scored: list[Scored] = [(0.0, ())] * len(counts)
    for asked in {count for count in counts if count >= 0}:  # which of equals come first depends on how many are asked
        rows = [row for row, count in enumerate(counts) if count == asked]
        logprobs = _rows(logits, rows).log_softmax(dim=-1)  # [M, V]
        drawn = torch.tensor([tokens[row] for row in rows], device=logits.device)
        of_drawn = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        values, words = _top(logprobs, min(asked, logits.size(1)))
        for row, logprob, ids, theirs in zip(rows, of_drawn, words.tolist(), values.tolist(), strict=True):
            scored[row] = logprob, tuple(zip(ids, theirs, strict=True))
    return scored


def finite(logits: Tensor) -> list[bool]:
    """Which rows hold neither infinities nor NaN.  One pass: a sum is finite only if all it sums is."""
    whole: list[bool] = logits.sum(dim=-1, dtype=torch.float32).isfinite().tolist()
    return whole


def drawing_bytes(rows: int, words: int, kept: int = 0) -> int:
    """At most alive while tokens are drawn from float32 logits [rows, words], which are `kept` bytes each once more.

    Three times the logits (they, a selection of them, and that heated or as weights), and what is sorted at a time:
    values, columns, weights and their sums, in 8 bytes most of them.
    """
    sorted_words = min(rows, max(SORTED // words, 1)) * words
    return rows * words * (3 * 4 + kept) + sorted_words * 48


def _is_cut(sampling: Sampling) -> bool:
    """Whether words are left out by rank."""
    return sampling.top_k > 0 or sampling.top_p < 1


def _likeliest(logits: Tensor) -> Tensor:
    """[M, V] to [M]: the first of the largest, as argmax, which reads slower."""
    block = _by_block(logits, "max").argmax(dim=1)
    columns = _columns(block, logits.size(1))
    return columns.gather(1, logits.gather(1, columns).argmax(dim=1, keepdim=True))[:, 0]


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, descending, and their columns: [M, count] both, as topk, which reads slower.

    They lie in the `count` blocks whose own largest are the largest.
    """
    if 2 * count * BLOCK > logits.size(1):
        values, columns = logits.topk(count)
        return values, columns
    blocks = _by_block(logits, "max").topk(count, dim=1).indices  # [M, count]
    columns = _columns(blocks.flatten(), logits.size(1)).view(len(logits), -1)
    values = logits.gather(1, columns).masked_fill_(_again(columns), float("-inf"))
    values, places = values.topk(count)
    return values, columns.gather(1, places)


def _draw_plain(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> Tensor:
    """Rows without a cut by rank: in the order of the vocabulary, nothing sorted."""
    weights = _heated(logits, samplings).softmax(dim=-1)  # [M, V]
    if any(sampling.min_p for sampling in samplings):
        least = _column([sampling.min_p for sampling in samplings], weights)
        weights.masked_fill_(weights < least * weights.amax(dim=1, keepdim=True), 0)
    sums = _by_block(weights, "sum").double()
    cumulative = sums.cumsum(dim=1)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = (cumulative - sums).gather(1, block)
    columns = _columns(block[:, 0], weights.size(1))
    inside = weights.gather(1, columns).masked_fill_(_again(columns), 0).double()
    return columns.gather(1, _first_above(inside.cumsum(dim=1), target - before))[:, 0]


def _draw_cut(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> Tensor:
    """Rows with a cut by rank: likeliest first, sorting no more of them than the cut needs."""
    heated = _heated(logits, samplings)
    total = heated.logsumexp(dim=1, keepdim=True)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    left = list(range(len(samplings)))
    for count in (*CANDIDATES, logits.size(1)):
        count = min(count, logits.size(1))
        undecided: list[int] = []
        at_once = max(SORTED // count, 1)
        for some in (left[start : start + at_once] for start in range(0, len(left), at_once)):
            values, words = _top(_rows(heated, some), count)  # [L, C]
            kept, settled = _keep((values - total[some]).exp().double(), [samplings[row] for row in some])
            cumulative = kept.cumsum(dim=1)
            place = _first_above(cumulative, uniforms[some, None] * cumulative[:, -1:])
            tokens[some] = words.gather(1, place)[:, 0]
            undecided += [row for row, done in zip(some, settled.tolist(), strict=True) if not done]
        left = undecided
        if not left or count == logits.size(1):
            break
    return tokens


def _keep(weights: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Descending probabilities [L, C], those cut off made zero; and whether all cuts fell inside, for each row.

    What is kept is a beginning of the row: if its last word is not kept, no word after it would be.
    """
    ranks = torch.tensor([min(s.top_k or weights.size(1), weights.size(1)) - 1 for s in samplings])
    ranked = torch.tensor([[s.top_k > 0] for s in samplings], device=weights.device)
    among = ~ranked | (weights >= weights.gather(1, ranks[:, None].to(weights.device)))  # ties with the last stay
    mass = torch.where(ranked, (weights * among).sum(dim=1, keepdim=True), 1.0)
    most = _column([s.top_p if s.top_p < 1 else float("inf") for s in samplings], weights)
    least = _column([s.min_p for s in samplings], weights)
    before = weights.cumsum(dim=1) - weights
    kept = among & (before < most * mass) & (weights >= least * weights[:, :1])
    kept[:, 0] = True
    return weights * kept, ~kept[:, -1] & (~ranked[:, 0] | ~among[:, -1])


def _heated(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    if all(sampling.temperature == 1 for sampling in samplings):
        return logits
    return logits / _column([max(sampling.temperature, COLDEST) for sampling in samplings], logits)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[M, 1]: the first column whose cumulative weight exceeds `target` [M, 1]: never one of no weight."""
    most = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cumulative, target.clamp(min=0).minimum(most), right=True)


def _by_block(values: Tensor, reduction: str) -> Tensor:
    """[M, V] to [M, blocks]: the largest or the sum of every BLOCK columns, the last block as short as it is."""
    reduce = torch.amax if reduction == "max" else torch.sum
    whole = values.size(1) // BLOCK * BLOCK
    parts = [reduce(values[:, :whole].view(len(values), -1, BLOCK), dim=-1)] if whole else []
    if whole < values.size(1):
        parts.append(reduce(values[:, whole:], dim=1, keepdim=True))
    return torch.cat(parts, dim=1)


def _columns(block: Tensor, width: int) -> Tensor:
    """[M] blocks to the columns of each [M, BLOCK]; past the end the last column again."""
    return (block[:, None] * BLOCK + torch.arange(BLOCK, device=block.device)).clamp(max=width - 1)


def _again(columns: Tensor) -> Tensor:
    """Which of some blocks' columns repeat the one before."""
    again = torch.zeros_like(columns, dtype=torch.bool)
    again[:, 1:] = columns[:, 1:] == columns[:, :-1]
    return again


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _put(tokens: Tensor, rows: list[int], chosen: Tensor) -> None:
    tokens[torch.tensor(rows, device=tokens.device)] = chosen
