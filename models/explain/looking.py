"""Attention as it is: of each layer and head that is asked for.

Knows nothing of gradients.
"""

from collections.abc import Generator

from models.errors import UnsupportedError
from models.explain.asked import Asked, Explanation, Part, Weights
from models.explain.lens import Plate
from models.explain.watched import Shape, Watched


def attention(watched: Watched, asked: Asked, piece: int) -> Generator[None, None, Explanation]:  # noqa: ARG001
    """Of every part that the network has; layers and heads that a part doesn't have are left out of it."""
    if not watched.layout:
        raise UnsupportedError(
            "it has no attention to be seen; ask for gradient_x_input, integrated_gradients or occlusion"
        )
    yield from ()
    text = asked.text
    if not watched.lenses:
        values = watched.alignments(text)[None, None]
        return Explanation((Weights("cross", values, (0,), (0,)),))
    plates = {part: plate_of(asked, part, shape) for part, shape in watched.layout.items()}
    watched.look(text, plates)
    return Explanation(tuple(Weights(part, plate.values, plate.layers, plate.heads) for part, plate in plates.items()))


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
