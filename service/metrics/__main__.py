"""`python -m service.metrics > docs/metrics.md`."""

import sys

from service.metrics.document import document

if __name__ == "__main__":
    sys.stdout.write(document())
