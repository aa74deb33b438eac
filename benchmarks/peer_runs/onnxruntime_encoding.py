"""onnxruntime over an exported encoder, with its transformer fusions where it has them; runs in its own environment."""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import onnxruntime

from benchmarks.peer_runs.workload import Run, asked, encoding, print_figures

Vectors = Callable[[list[list[int]]], list[list[float]]]


def encoder(session: onnxruntime.InferenceSession) -> Vectors:
    names = {given.name for given in session.get_inputs()}

    def encode(batch: list[list[int]]) -> list[list[float]]:
        longest = max(map(len, batch))
        ids = np.array([text + [0] * (longest - len(text)) for text in batch], np.int64)
        mask = np.array([[1] * len(text) + [0] * (longest - len(text)) for text in batch], np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = session.run(None, {name: inputs[name] for name in names})[0]  # [N, K, W]
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors: list[list[float]] = (pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).tolist()
        return vectors

    return encode


def opened(run: Run) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = run.threads
    return onnxruntime.InferenceSession(str(run.model), options, providers=["CPUExecutionProvider"])


def main() -> None:
    run = asked()
    began = perf_counter()
    session = opened(run)
    loaded = perf_counter() - began
    print_figures({"load": loaded, **encoding(encoder(session))})


if __name__ == "__main__":
    main()
