"""An encoder as OpenVINO's int8, weights and activations, calibrated by nncf; runs in OpenVINO's environment.

python -m benchmarks.peer_runs.quantize_openvino SOURCE.onnx TARGET.xml
"""

import sys

import nncf
import numpy as np
import openvino

from benchmarks.peer_runs.workload import prompts


def inputs(text: list[int]) -> dict[str, np.ndarray]:
    ids = np.array([text], np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def main() -> None:
    source, target = sys.argv[1:]
    texts = [text for length in (16, 64, 128) for text in prompts(16, length, 7)]
    model = nncf.quantize(
        openvino.Core().read_model(source), nncf.Dataset(texts, inputs), model_type=nncf.ModelType.TRANSFORMER
    )
    openvino.save_model(model, target, compress_to_fp16=False)


if __name__ == "__main__":
    main()
