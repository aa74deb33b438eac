"""Writes the documentation of the metrics: `python -m polyhead.service.metrics > docs/metrics.md`."""

import sys

from .metrics_document import render_document

if __name__ == "__main__":
    sys.stdout.write(render_document())
