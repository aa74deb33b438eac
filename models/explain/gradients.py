"""Attribution of a goal to rows by gradients with respect to the token embeddings.

Only token embeddings are varied; position and segment embeddings stay. Several points between the baseline and the text
are computed together, as many as fit in a piece.
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
    """The gradient at a row's embedding times that embedding (Shrikumar et al. 2017, arXiv:1704.02685)."""
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
    """The mean gradient on the path from a baseline to the text, times the path (Sundararajan et al. 2017,
    arXiv:1703.01365).

    The mean is a Gauss-Legendre quadrature with `steps` points, exact for polynomials of twice that degree. The
    attributions sum to the goal's value for the text minus that for the baseline (completeness), up to the error of the
    quadrature.
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
    """For each goal its number, its values [N] at the embeddings `at` [N, rows, E], and its gradients there; None
    between pieces of a pass.

    There is one forward pass for all goals, and a backward pass for each. Torch's gradient modes are not held between
    yields.
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
    """The gradients at the input of the first segment, given those at the output of the last one; `keep`: keep the
    graphs.

    Yields the number of rows of each segment when it is done.
    """
    for entered, made in reversed(segments):
        with torch.inference_mode(False), torch.enable_grad():
            (slopes,) = torch.autograd.grad(made, entered, slopes, retain_graph=keep)
        yield slopes.numel() // slopes.size(-1)
    return slopes


def quadrature_points(steps: int, together: int, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The quadrature points between 0 and 1 with their weights, `together` at a time."""
    places, weights = np.polynomial.legendre.leggauss(steps)
    at, counts = (like.new_tensor(numbers) for numbers in ((1 + places) / 2, weights / 2))
    yield from zip(torch.split(at, together), torch.split(counts, together), strict=True)


@torch.no_grad()
def baseline_embeddings(watched: InstrumentedNetwork, asked: ExplanationRequest) -> Tensor:
    """[rows, E] of the baseline: the baseline's token in each row, or zeros, but the own embedding in rows that are
    kept."""
    there = watched.embeddings(asked.text)
    nothing = torch.zeros_like(there) if asked.baseline < 0 else watched.embed_tokens([asked.baseline]).expand_as(there)
    kept = torch.tensor([row in asked.kept_rows for row in range(len(there))], device=there.device)
    return torch.where(kept[:, None], there, nothing)
