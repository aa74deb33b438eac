"""How many replicas there should be: so many that each has a share of the queued tokens that it can bear.

Knows no Ray, but how its Serve asks (ray.serve.config.AutoscalingContext).  The one idea: requests differ a
thousandfold, so what is counted is the tokens that are still to be computed, not who waits for them.
"""

import math
from collections.abc import Mapping
from typing import Any

QUEUED_TOKENS_STAT = "queued_tokens"  # what a replica calls them
TARGET_TOKENS = 2048  # of them, a replica


class QueuedTokensPolicy:
    """A policy of Ray Serve: `target` tokens queued at each replica.  How soon is for `upscale_delay_s` and
    `downscale_delay_s` to say, as of any policy."""

    def __init__(self, target: float = TARGET_TOKENS) -> None:
        self.target = target

    def replicas_needed(self, queued: float) -> int:
        """Replicas for so many queued tokens; one at least."""
        return max(math.ceil(queued / self.target), 1)

    def __call__(self, asked: Any) -> tuple[int, dict[str, Any]]:
        """The replicas there should be, and nothing to be remembered."""
        told: Mapping[Any, float] = (asked.aggregated_metrics or {}).get(QUEUED_TOKENS_STAT, {})
        if not told:  # nobody has said anything yet
            return asked.target_num_replicas, {}
        low, high = asked.capacity_adjusted_min_replicas, asked.capacity_adjusted_max_replicas
        return min(max(self.replicas_needed(sum(told.values())), low), high), {}
