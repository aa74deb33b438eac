"""Attention as it is, of each layer and head that is asked for; and that of all layers together.

Knows nothing of gradients.
"""

from collections.abc import Generator, Mapping
from typing import Literal

from ..core.errors import UnsupportedError
from . import max_flow
from .attention_probe import Plate
from .explain_types import Asked, Explanation, Part, Weights
from .instrumented_network import Shape, Watched, in_pieces
from .max_flow import Floats


def attention(watched: Watched, asked: Asked, piece: int) -> Generator[None, None, Explanation]:
    """Of every part that the network has; layers and heads that a part doesn't have are left out of it."""
    if not watched.layout:
        raise UnsupportedError(
            "it has no attention to be seen; ask for gradient_x_input, integrated_gradients or occlusion"
        )
    if not watched.lenses:
        values = watched.alignments(asked.text)[None, None]
        return Explanation((Weights("cross", values, (0,), (0,)),))
    plates = {part: plate_of(asked, part, shape) for part, shape in watched.layout.items()}
    yield from seen(watched, asked, plates, piece)
    return Explanation(tuple(Weights(part, plate.values, plate.layers, plate.heads) for part, plate in plates.items()))


def attention_rollout(watched: Watched, asked: Asked, piece: int) -> Generator[None, None, Explanation]:
    """See models.explain.attention_flow.  Of an encoder-decoder that of its encoder."""
    weights = yield from means(watched, asked, piece)
    return together("rollout", max_flow.rollout(weights))


def attention_flow(watched: Watched, asked: Asked, piece: int) -> Generator[None, None, Explanation]:
    """The same."""
    weights = yield from means(watched, asked, piece)
    return together("flow", (yield from max_flow.flow(weights)))


def means(watched: Watched, asked: Asked, piece: int) -> Generator[None, None, Floats]:
    """[L, Q, Q] of all layers, each the mean of its heads: what models.explain.attention_flow takes."""
    part: Part = "encoder" if "encoder" in watched.layout else "self"
    if part not in watched.layout:
        raise UnsupportedError("nothing in it looks at its own text; ask for attention, which is its alignment")
    layers, heads = watched.layout[part]
    plate = Plate.of(tuple(range(layers)), tuple(range(heads)), sides(asked, part), mean=True)
    yield from seen(watched, asked, {part: plate}, piece)
    return plate.values[:, 0]


def seen(watched: Watched, asked: Asked, plates: Mapping[Part, Plate], piece: int) -> Generator[None, None, None]:
    """Yields when so many rows have gone through a layer as make a piece going through all of them."""
    yield from in_pieces(watched.look(asked.text, plates), piece * max(layers for layers, _ in watched.layout.values()))


def together(kind: Literal["rollout", "flow"], values: Floats) -> Explanation:
    return Explanation((Weights(kind, values[None, None], (0,), (0,)),))


def plate_of(asked: Asked, part: Part, shape: Shape) -> Plate:
    """Room for what is asked of a part, and for nothing else."""
    layers, heads = (
        tuple(number for number in wanted or range(count) if number < count)
        for wanted, count in zip((asked.layers, asked.heads), shape, strict=True)
    )
    return Plate.of(layers, heads, sides(asked, part), mean=False)


def sides(asked: Asked, part: Part) -> tuple[int, int]:
    """How many rows look at how many."""
    read, written = len(asked.text.source), len(asked.text.tokens)
    rows = read if part == "encoder" else written
    return rows, read if part in ("encoder", "cross") else written
