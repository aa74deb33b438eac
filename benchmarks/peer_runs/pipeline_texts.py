"""transformers' text classification pipeline in batches, padded each to its longest; in Polyhead's own environment."""

from typing import Any

import torch
import transformers

from benchmarks.peer_runs.text_workload import BATCH, reading
from benchmarks.peer_runs.workload import asked, print_figures


def main() -> None:
    run = asked()
    torch.set_num_threads(run.threads)
    transformers.logging.set_verbosity_error()
    pipeline: Any = transformers.pipeline(
        "text-classification", str(run.model), device="cpu", dtype=torch.float32, batch_size=BATCH
    )
    print_figures(reading(lambda texts: [(answer["label"], answer["score"]) for answer in pipeline(texts)]))


if __name__ == "__main__":
    main()
