"""Attribution of a goal to rows by gradients with respect to the token embeddings.

Only token embeddings are varied; position and segment embeddings stay. Several points between the baseline and the text
are computed together, as many as fit in a piece.
"""

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .explain_types import Attribution, Explanation, ExplanationRequest, Share
from .head_scores import GoalReader
from .instrumented_network import InstrumentedNetwork, Segment, run_in_pieces


def gradient_x_input(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[Share, None, Explanation]:
    """The gradient at a row's embedding times that embedding (Shrikumar et al. 2017, arXiv:1704.02685)."""
    reader, embedded = (yield from network.read_goals(request, piece)), network.embeddings(request.text)
    values, found = np.zeros(len(request.goals)), []
    for computed in goal_gradients(network, request, reader, embedded[None], piece):
        if computed is not None:
            goal, value, gradients = computed
            values[goal] = value.item()
            found.append((gradients[0] * embedded).sum(dim=-1).cpu().numpy())
        yield len(found) / len(request.goals)
    pairs = zip(found, values.tolist(), strict=True)
    return Explanation(attributions=tuple(Attribution(rows, score, float("nan")) for rows, score in pairs))


def integrated_gradients(
    network: InstrumentedNetwork, request: ExplanationRequest, piece: int
) -> Generator[Share, None, Explanation]:
    """The mean gradient on the path from a baseline to the text, times the path (Sundararajan et al. 2017,
    arXiv:1703.01365).

    The mean is a Gauss-Legendre quadrature with `steps` points, exact for polynomials of twice that degree. The
    attributions sum to the goal's value for the text minus that for the baseline (completeness), up to the error of the
    quadrature.
    """
    reader = yield from network.read_goals(request, piece)
    embedded, start = network.embeddings(request.text), baseline_embeddings(network, request)
    path = embedded - start
    means = np.zeros((len(request.goals), *path.shape))
    done, passes = 0, request.steps * len(request.goals) + 2  # backward, and two forward at the ends of the path
    for at, weights in quadrature_points(request.steps, max(1, piece // request.text.row_count), path):
        for computed in goal_gradients(network, request, reader, start + at[:, None, None] * path, piece):
            if computed is not None:
                goal, _, gradients = computed
                means[goal] += torch.einsum("n,nre->re", weights, gradients).cpu().numpy()
                done += len(at)
            yield done / passes
    owed = np.einsum("gre,re->gr", means, path.cpu().numpy()).astype(np.float32)
    ends = []
    for point in (embedded, start):
        states = yield from network.states_in_pieces([request.text], piece, point[None])
        with torch.no_grad():
            ends.append(reader(states)[0].tolist())
        yield (done + len(ends)) / passes
    return Explanation(attributions=tuple(map(Attribution, owed, *ends)))


def goal_gradients(
    network: InstrumentedNetwork, request: ExplanationRequest, reader: GoalReader, at: Tensor, piece: int
) -> Iterator[tuple[int, Tensor, Tensor] | None]:
    """For each goal its number, its values [N] at the embeddings `at` [N, rows, E], and its gradients there; None
    between pieces of a pass.

    There is one forward pass for all goals, and a backward pass for each. Torch's gradient modes are not held between
    yields.
    """
    most = piece * max([1, *(layers for layers, _ in network.layout.values())])
    with torch.inference_mode(False), torch.enable_grad():
        at = at.clone().requires_grad_()
    segments = yield from run_in_pieces(network.segments([request.text] * len(at), at), most)
    with torch.inference_mode(False), torch.enable_grad():
        states = segments[-1][1].detach().requires_grad_()
        values = reader(states)  # [N, G]
    last = values.size(1) - 1
    for goal in range(last + 1):
        with torch.inference_mode(False), torch.enable_grad():
            (gradients,) = torch.autograd.grad(values[:, goal].sum(), states, retain_graph=goal < last)
        gradients = yield from run_in_pieces(backpropagate(segments, gradients, keep=goal < last), most)
        yield goal, values[:, goal].detach(), gradients


def backpropagate(segments: Sequence[Segment], gradients: Tensor, *, keep: bool) -> Generator[int, None, Tensor]:
    """The gradients at the input of the first segment, given those at the output of the last one; `keep`: keep the
    graphs.

    Yields the number of rows of each segment when it is done.
    """
    for entered, made, rows in reversed(segments):
        with torch.inference_mode(False), torch.enable_grad():
            (gradients,) = torch.autograd.grad(made, entered, gradients, retain_graph=keep)
        yield rows
    return gradients


def quadrature_points(steps: int, together: int, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The quadrature points between 0 and 1 with their weights, `together` at a time."""
    places, weights = np.polynomial.legendre.leggauss(steps)
    at, counts = (like.new_tensor(numbers) for numbers in ((1 + places) / 2, weights / 2))
    yield from zip(torch.split(at, together), torch.split(counts, together), strict=True)


@torch.no_grad()
def baseline_embeddings(network: InstrumentedNetwork, request: ExplanationRequest) -> Tensor:
    """[rows, E] of the baseline: the baseline's token in each row, or zeros, but the own embedding in rows that are
    kept."""
    embedded = network.embeddings(request.text)
    start = (
        torch.zeros_like(embedded)
        if request.baseline < 0
        else network.embed_sides(
            *([request.baseline] * len(side) for side in (request.text.source, request.text.tokens))
        )
    )
    kept = torch.tensor([row in request.kept_rows for row in range(len(embedded))], device=embedded.device)
    return torch.where(kept[:, None], embedded, start)
