"""sentence-transformers by its usual interface, `encode`, which sorts by length; runs in its own environment."""

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.peer_runs.text_workload import BATCH, Answer, reading
from benchmarks.peer_runs.workload import asked, print_figures


def embedder(model: SentenceTransformer) -> Answer:
    def embed(texts: list[str]) -> list[list[float]]:
        vectors = model.encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False)
        answers: list[list[float]] = vectors.tolist()
        return answers

    return embed


def main() -> None:
    run = asked()
    torch.set_num_threads(run.threads)
    print_figures(reading(embedder(SentenceTransformer(str(run.model), device="cpu")), run.work))


if __name__ == "__main__":
    main()
