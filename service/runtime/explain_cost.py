"""The cost of explanations: the memory of the network that computes them, and the floating-point operations of a
request.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from polyhead.models.explain import (
    FEW_CELLS,
    METHODS,
    ExplanationRequest,
    HeadSize,
    InputTokens,
    estimate_bytes,
    estimate_operations,
)
from polyhead.models.network.model_config import ModelConfig

from ..config.settings import Settings
from ..core.errors import AnswerTooLarge
from ..engine.explain_worker import MAX_JOBS
from ..explain.explain_request import MAX_ATTENTION_WEIGHTS, MAX_FLOW_TOKENS
from .memory_budget import MemoryNeed, ModelSize, search_highest

CHUNK_TOKENS = 64  # tokens of an explanation computed at a time; then other models compute a step
GIGA = 10**9


def explainer_memory_need(size: ModelSize, settings: Settings) -> MemoryNeed:
    """Predict the bytes of an explainer: its float32 weights, and the working memory of its longest text. It has the
    tokenizer of the served model.
    """
    numbers = size.checkpoint_size
    return MemoryNeed(
        name=size.name,
        weights=numbers.weight_bytes(torch.float32),
        cache=0,
        workspace=max_explain_bytes(size, min(settings.explain_tokens, size.context)),
        loading=numbers.temporary_bytes(torch.float32),
        blocks=0,
        block_size=0,
    )


def max_explain_bytes(size: ModelSize, tokens: int) -> int:
    """Return the most bytes that one explanation of `tokens` tokens can take, over all methods.

    One chunk is computed at a time. The results of all MAX_JOBS explanations that are computed in turns are
    kept meanwhile.
    """
    body, reader = size.config, size.encoder_config
    taken = 0
    for method in METHODS:
        ids = (0,) * (min(tokens, MAX_FLOW_TOKENS) if method == "attention_flow" else tokens)
        request = ExplanationRequest(
            InputTokens(ids, source=ids if reader else ()), method, goals=(((0, 0),),), layers=(0,), heads=(0,)
        )
        head = size.checkpoint_size.explained_head
        taken = max(taken, estimate_bytes(reader or body, body, request, CHUNK_TOKENS, head))
    return taken + MAX_JOBS * MAX_ATTENTION_WEIGHTS * torch.float32.itemsize


@dataclass(frozen=True)
class WorkLimit:
    """At most `operations` floating-point operations for one explanation by a network of these shapes with a head of
    this size (see models.explain.estimate_operations).
    """

    config: ModelConfig
    body: ModelConfig
    operations: int
    head: HeadSize = FEW_CELLS

    def check(self, request: ExplanationRequest) -> None:
        """Raise AnswerTooLarge if the request needs more. The message has the estimate, the limit and the changes that
        would be within it.
        """
        if (needed := self._operations_of(request)) <= self.operations:
            return
        field = "steps" if request.method == "integrated_gradients" else "input"
        size = f"{request.text.row_count} tokens" + (
            f", {len(request.goals)} targets" if len(request.goals) > 1 else ""
        )
        size += f", {request.steps} steps" if field == "steps" else ""
        limit = f"at most {self.operations / GIGA:.4g} are computed (the server's setting explain_gflop)"
        message = f"{field}: {request.method} of {size} takes about {needed / GIGA:.4g} GFLOP, {limit}"
        raise AnswerTooLarge(f"{message}; ask for {', or '.join(self._suggest_changes(request))}", param=field)

    def _operations_of(self, request: ExplanationRequest) -> int:
        return estimate_operations(self.config, self.body, request, CHUNK_TOKENS, self.head)

    def _suggest_changes(self, request: ExplanationRequest) -> list[str]:
        """Return the changes that make the request small enough or smaller."""
        changes = list[str]()
        if request.method == "integrated_gradients":
            changes += self._suggest_largest(
                "at most {} step{}", request.steps, lambda count: replace(request, steps=count)
            )
        if len(request.goals) > 1:
            fewer = "at most {} target{} (max_tokens, or a shorter target.text)"
            changes += self._suggest_largest(
                fewer, len(request.goals), lambda count: replace(request, goals=request.goals[:count])
            )
        changes.append("a shorter input")
        if request.method in ("integrated_gradients", "occlusion"):
            other = replace(request, method="gradient_x_input")
            changes += ["the method gradient_x_input"] if self._operations_of(other) <= self.operations else []
        return changes

    def _suggest_largest(self, words: str, most: int, build: Callable[[int], ExplanationRequest]) -> list[str]:
        """Return `words` with the largest number up to `most` that is within the limit, and an s if it is no 1; nothing
        if even 1 is not.
        """
        if self._operations_of(build(1)) > self.operations:
            return []
        largest = search_highest(1, most, lambda count: self._operations_of(build(count)) <= self.operations)
        return [words.format(largest, "s" if largest > 1 else "")]
