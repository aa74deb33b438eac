"""Weights of words by sentence-transformers' SparseEncoder, by its usual interface; runs in its own environment."""

import torch
from sentence_transformers import SparseEncoder

from benchmarks.peer_runs.text_workload import BATCH, Answer, reading
from benchmarks.peer_runs.workload import asked, print_figures


def weigher(model: SparseEncoder) -> Answer:
    def weigh(texts: list[str]) -> list[dict[int, float]]:
        vectors = model.encode(texts, batch_size=BATCH, convert_to_sparse_tensor=False, show_progress_bar=False)
        found = ((row, row.nonzero().flatten()) for row in vectors)
        return [dict(zip(words.tolist(), row[words].tolist(), strict=True)) for row, words in found]

    return weigh


def main() -> None:
    run = asked()
    torch.set_num_threads(run.threads)
    print_figures(reading(weigher(SparseEncoder(str(run.model), device="cpu")), run.work))


if __name__ == "__main__":
    main()
