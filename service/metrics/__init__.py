"""The server's metrics: declared as data, observed in one place, and a page of them whenever somebody asks.

`python -m polyhead.service.metrics > docs/metrics.md` writes them down.
"""

from .observer import EarlyOutcome, Metrics, ModelInfo, ObservedEngine, OpenRequests

__all__ = ["EarlyOutcome", "Metrics", "ModelInfo", "ObservedEngine", "OpenRequests"]
