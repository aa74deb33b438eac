"""OpenVINO over an exported encoder, in the precision of its file; runs in its own environment."""

from time import perf_counter

import numpy as np
import openvino

from benchmarks.peer_runs.workload import Encode, asked, encoding, print_figures


def encoder(compiled: openvino.CompiledModel) -> Encode:
    names = {given.any_name for given in compiled.inputs}
    request = compiled.create_infer_request()

    def encode(batch: list[list[int]]) -> list[list[float]]:
        longest = max(map(len, batch))
        ids = np.array([text + [0] * (longest - len(text)) for text in batch], np.int64)
        mask = np.array([[1] * len(text) + [0] * (longest - len(text)) for text in batch], np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = request.infer({name: inputs[name] for name in names}, share_inputs=True, share_outputs=True)[0]
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors: list[list[float]] = (pooled / np.linalg.norm(pooled, axis=1, keepdims=True)).tolist()
        return vectors

    return encode


def main() -> None:
    run = asked()
    began = perf_counter()
    settings = {
        "INFERENCE_NUM_THREADS": run.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # what is not quantised stays as wide as the others have it
    }
    compiled = openvino.Core().compile_model(str(run.model), "CPU", settings)
    loaded = perf_counter() - began
    print_figures({"load": loaded, **encoding(encoder(compiled))})


if __name__ == "__main__":
    main()
