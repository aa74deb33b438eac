"""What an explanation costs: the memory of the network that explains, and the operations of one request.

Does not load a network and does not compute one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from polyhead.models.explain import METHODS, Asked, Text, bytes_of, operations_of
from polyhead.models.network.model_config import ModelConfig

from ..config.settings import Settings
from ..core.errors import AnswerTooLarge
from ..engine.explain_worker import MOST_AT_ONCE
from ..explain.explain_request import MOST_FLOWING, MOST_WEIGHTS
from .memory_budget import Need, Sized, highest

PIECE = 64  # tokens of an explanation that are computed at a time, before others have a turn
GIGA = 10**9


def need_of(size: Sized, settings: Settings) -> Need:
    """Bytes of a network that explains: its weights in float32, and what its longest text takes."""
    numbers = size.size
    return Need(
        name=size.name,
        weights=numbers.weights(torch.float32),
        cache=0,
        workspace=numbers.tokenizer + most_bytes(size, min(settings.explain_tokens, size.context)),
        loading=numbers.tokenizer + numbers.passing(torch.float32),
        blocks=0,
        block_size=0,
    )


def most_bytes(size: Sized, tokens: int) -> int:
    """Whatever is asked: one piece is computed at a time, and what is found of those that take turns is kept."""
    body, reader = size.config, size.reader
    taken = 0
    for method in METHODS:
        some = (0,) * (min(tokens, MOST_FLOWING) if method == "attention_flow" else tokens)
        asked = Asked(Text(some, source=some if reader else ()), method, goals=(((0, 0),),), layers=(0,), heads=(0,))
        taken = max(taken, bytes_of(reader or body, body, asked, PIECE))
    return taken + MOST_AT_ONCE * MOST_WEIGHTS * torch.float32.itemsize


@dataclass(frozen=True)
class WorkLimit:
    """At most `operations` for one explanation by a network of these shapes (see models.explain.operations_of)."""

    config: ModelConfig
    body: ModelConfig
    operations: int

    def check(self, asked: Asked) -> None:
        """Raises AnswerTooLarge with the estimate, the limit and what would be within it."""
        if (wanted := self._of(asked)) <= self.operations:
            return
        field = "steps" if asked.method == "integrated_gradients" else "input"
        size = f"{asked.text.rows} tokens" + (f", {len(asked.goals)} targets" if len(asked.goals) > 1 else "")
        size += f", {asked.steps} steps" if field == "steps" else ""
        limit = f"at most {self.operations / GIGA:.4g} are computed (the server's setting explain_gflop)"
        message = f"{field}: {asked.method} of {size} takes about {wanted / GIGA:.4g} GFLOP, {limit}"
        raise AnswerTooLarge(f"{message}; ask for {', or '.join(self._cheaper(asked))}", param=field)

    def _of(self, asked: Asked) -> int:
        return operations_of(self.config, self.body, asked, PIECE)

    def _cheaper(self, asked: Asked) -> list[str]:
        """Changes that make it small enough, and those that make it smaller."""
        ways = list[str]()
        if asked.method == "integrated_gradients":
            ways += self._largest("at most {} steps", asked.steps, lambda count: replace(asked, steps=count))
        if len(asked.goals) > 1:
            fewer = "at most {} targets (max_tokens, or a shorter target.text)"
            ways += self._largest(fewer, len(asked.goals), lambda count: replace(asked, goals=asked.goals[:count]))
        ways.append("a shorter input")
        if asked.method in ("integrated_gradients", "occlusion"):
            other = replace(asked, method="gradient_x_input")
            ways += ["the method gradient_x_input"] if self._of(other) <= self.operations else []
        return ways

    def _largest(self, words: str, most: int, made: Callable[[int], Asked]) -> list[str]:
        """The words with the largest number that is within the limit; none where no number is."""
        if self._of(made(1)) > self.operations:
            return []
        return [words.format(highest(1, most, lambda count: self._of(made(count)) <= self.operations))]
