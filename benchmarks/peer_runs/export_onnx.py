"""An encoder's folder as ONNX, attention and normalisation fused, in float32 or dynamically quantised to int8.

    python -m benchmarks.peer_runs.export_onnx plain|fused|int8 FOLDER TARGET

Runs in onnxruntime's environment, which sees Polyhead's torch and transformers.
"""

import sys
from pathlib import Path

import onnx
import torch
import transformers
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

INPUTS = ["input_ids", "attention_mask", "token_type_ids"]


class States(torch.nn.Module):
    """The last states alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.body(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        return states


def plain(folder: Path, target: Path) -> None:
    example = (torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long), torch.zeros(2, 8).long())
    batch, length = {0: "N"}, {1: "K"}
    axes = {name: {**batch, **length} for name in INPUTS}
    torch.onnx.export(
        States(folder),
        example,
        str(target),
        input_names=INPUTS,
        output_names=["states"],
        dynamic_axes={**axes, "states": {**batch, **length}},
        opset_version=17,
        dynamo=False,
    )


def fused(source: Path, folder: Path, target: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = optimize_model(
        str(source),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    print(model.get_fused_operator_statistics())
    model.save_model_to_file(str(target))


def main() -> None:
    kind, folder, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    exported = target if kind == "plain" else target.with_suffix(".plain.onnx")
    plain(folder, exported)
    if kind == "plain":
        return
    joined = target if kind == "fused" else target.with_suffix(".fused.onnx")
    fused(exported, folder, joined)
    if kind == "int8":
        wide = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # of fused operators, whose shapes it cannot infer
        # One scale a column: with one a matrix, MiniLM's embeddings are at a cosine of 0.90 to its own, not 0.985.
        quantize_dynamic(joined, target, per_channel=True, weight_type=QuantType.QInt8, extra_options=wide)


if __name__ == "__main__":
    main()
