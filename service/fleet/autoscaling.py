"""The autoscaling policy: the number of replicas follows from the tokens that are queued.

It counts tokens, not requests, because the work of requests differs a thousandfold.  Ray is not imported; the policy
reads the context that Ray Serve passes (ray.serve.config.AutoscalingContext).
"""

import math
from collections.abc import Mapping
from typing import Any

QUEUED_TOKENS_STAT = "queued_tokens"  # the name of this statistic in a replica's report
TARGET_TOKENS = 2048  # queued tokens per replica


class QueuedTokensPolicy:
    """A policy of Ray Serve: one replica for each `target` queued tokens.

    `upscale_delay_s` and `downscale_delay_s` of the autoscaling config set how soon the number changes, as for any
    policy.
    """

    def __init__(self, target: float = TARGET_TOKENS) -> None:
        self.target = target

    def replicas_needed(self, queued: float) -> int:
        """Return the number of replicas for `queued` tokens, at least one."""
        return max(math.ceil(queued / self.target), 1)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas and an empty policy state."""
        queued: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUED_TOKENS_STAT, {})
        if not queued:  # no replica has reported yet
            return context.target_num_replicas, {}
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(self.replicas_needed(sum(queued.values())), low), high), {}
