"""What a goal owes to each row, by its derivatives after what the network reads of it.

Knows embeddings, and nothing of what is inside a network.  The one idea: the embeddings of the words alone are moved,
positions and segments stay where they are; and as many texts between the baseline and the text are computed together
as make a piece.
"""

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .explain_types import Attribution, Explanation, ExplanationRequest
from .head_scores import GoalReader
from .instrumented_network import InstrumentedNetwork, Segment, run_in_pieces


def gradient_x_input(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """The derivative after a row's embedding, times that embedding (Shrikumar et al. 2017, arXiv:1704.02685)."""
    reading, there = (yield from watched.read_goals(asked, piece)), watched.embeddings(asked.text)
    values, found = np.zeros(len(asked.goals)), []
    for computed in goal_gradients(watched, asked, reading, there[None], piece):
        if computed is not None:
            goal, value, slopes = computed
            values[goal] = value.item()
            found.append((slopes[0] * there).sum(dim=-1).cpu().numpy())
        yield
    pairs = zip(found, values.tolist(), strict=True)
    return Explanation(attributions=tuple(Attribution(rows, score, float("nan")) for rows, score in pairs))


def integrated_gradients(
    watched: InstrumentedNetwork, asked: ExplanationRequest, piece: int
) -> Generator[None, None, Explanation]:
    """The mean of those derivatives on the way from a baseline to the text, times that way (Sundararajan et al. 2017,
    arXiv:1703.01365).

    The mean is taken by Gauss and Legendre's rule with `steps` points, which is exact for polynomials of twice that
    degree.  What all rows owe together is the goal's value for the text less that for the baseline (completeness),
    but for what the rule misses.
    """
    reading = yield from watched.read_goals(asked, piece)
    there, nothing = watched.embeddings(asked.text), baseline_embeddings(watched, asked)
    way = there - nothing
    means = np.zeros((len(asked.goals), *way.shape))
    for at, weights in quadrature_points(asked.steps, max(1, piece // asked.text.row_count), way):
        for computed in goal_gradients(watched, asked, reading, nothing + at[:, None, None] * way, piece):
            if computed is not None:
                goal, _, slopes = computed
                means[goal] += torch.einsum("n,nre->re", weights, slopes).cpu().numpy()
            yield
    owed = np.einsum("gre,re->gr", means, way.cpu().numpy()).astype(np.float32)
    ends = []
    for point in (there, nothing):
        states = yield from watched.states_in_pieces([asked.text], piece, point[None])
        with torch.no_grad():
            ends.append(reading(states)[0].tolist())
        yield
    return Explanation(attributions=tuple(map(Attribution, owed, *ends)))


def goal_gradients(
    watched: InstrumentedNetwork, asked: ExplanationRequest, reading: GoalReader, at: Tensor, piece: int
) -> Iterator[tuple[int, Tensor, Tensor] | None]:
    """The number of each goal, its values [N] where embeddings are `at` [N, rows, E], and their derivatives there; None
    between pieces of a pass.

    One forward pass for all goals, and a backward pass for each.  Between them nothing of torch's modes is held.
    """
    most = piece * max([1, *(layers for layers, _ in watched.layout.values())])
    with torch.inference_mode(False), torch.enable_grad():
        at = at.clone().requires_grad_()
    segments = yield from run_in_pieces(watched.segments([asked.text] * len(at), at), most)
    with torch.inference_mode(False), torch.enable_grad():
        states = segments[-1][1].detach().requires_grad_()
        values = reading(states)  # [N, G]
    last = values.size(1) - 1
    for goal in range(last + 1):
        with torch.inference_mode(False), torch.enable_grad():
            (slopes,) = torch.autograd.grad(values[:, goal].sum(), states, retain_graph=goal < last)
        slopes = yield from run_in_pieces(backpropagate(segments, slopes, keep=goal < last), most)
        yield goal, values[:, goal].detach(), slopes


def backpropagate(segments: Sequence[Segment], slopes: Tensor, *, keep: bool) -> Generator[int, None, Tensor]:
    """The derivatives after what the first part reads, given those after what the last one made; `keep` their graphs.

    Yields how many rows a part had, once it is computed.
    """
    for entered, made in reversed(segments):
        with torch.inference_mode(False), torch.enable_grad():
            (slopes,) = torch.autograd.grad(made, entered, slopes, retain_graph=keep)
        yield slopes.numel() // slopes.size(-1)
    return slopes


def quadrature_points(steps: int, together: int, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Where between 0 and 1 to look, and how much each look counts: so many at a time."""
    places, weights = np.polynomial.legendre.leggauss(steps)
    at, counts = (like.new_tensor(numbers) for numbers in ((1 + places) / 2, weights / 2))
    yield from zip(torch.split(at, together), torch.split(counts, together), strict=True)


@torch.no_grad()
def baseline_embeddings(watched: InstrumentedNetwork, asked: ExplanationRequest) -> Tensor:
    """[rows, E] of a text that says nothing: each row the baseline's token, or zero; but for those that are kept."""
    there = watched.embeddings(asked.text)
    nothing = torch.zeros_like(there) if asked.baseline < 0 else watched.embed_tokens([asked.baseline]).expand_as(there)
    kept = torch.tensor([row in asked.kept_rows for row in range(len(there))], device=there.device)
    return torch.where(kept[:, None], there, nothing)
