"""The server's metrics: a table of them, an observer that counts events, and the page that is rendered for each scrape.

`python -m polyhead.service.metrics > docs/metrics.md` writes their documentation.
"""

from .observer import EarlyOutcome, Metrics, ModelInfo, ObservedEngine, OpenRequests

__all__ = ["EarlyOutcome", "Metrics", "ModelInfo", "ObservedEngine", "OpenRequests"]
