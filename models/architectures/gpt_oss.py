"""gpt-oss: experts with clamped gates in every layer, sinks, windows in every other layer, YaRN (arXiv:2508.10925)."""

import re
from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.mlp import GELU_SIGMOID
from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import ORIGINAL, Family, Json, NamedTensors, has_rotation, layer_numbers, read_positive

RENAMES = ((r"\.self_attn\.sinks$", ".attention.sinks"), *llama.RENAMES)
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?$")


ROPE: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}  # unless the configuration has its own


def split_experts(name: str, tensor: Tensor) -> NamedTensors:
    """The experts' matrices, which are stored transposed [E, inputs, outputs], rows of gate and up by turns."""
    found = FUSED.match(name)
    if found is None:
        return [(name, tensor)]
    leaf = "bias" if found[3] else "weight"
    pieces: NamedTensors = []
    for number, stored in enumerate(experts.list_experts(tensor)):
        each = stored if found[3] else stored.t()
        parts = {"down": each} if found[2] == "down_proj" else {"gate": each[::2], "up": each[1::2]}
        pieces += [(f"{found[1]}.{number}.{part}.{leaf}", piece) for part, piece in parts.items()]
    return pieces


def model_config(hf: Json) -> ModelConfig:
    if hf.get("swiglu_alpha", GELU_SIGMOID) != GELU_SIGMOID:
        raise UnsupportedError(f"swiglu_alpha {show_value(hf['swiglu_alpha'])} is not known here; {GELU_SIGMOID} is")
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["intermediate_size"],
        router_bias=True,
        bias=True,
        clamp=read_positive({"swiglu_limit": 7.0, **hf}, "swiglu_limit"),
    )
    hf = {"attention_bias": True, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, **hf}
    shape = llama.model_config(hf if has_rotation(hf) else {**hf, "rope_parameters": ROPE})
    alternating = tuple(layer % 2 == 0 for layer in layer_numbers(hf["num_hidden_layers"]))
    return replace(shape, windowed=shape.windowed or alternating, sinks=True, experts=mixture)


GPT_OSS = Family(
    name="gpt_oss",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("GptOss", ("ForSequenceClassification", "ForTokenClassification")),
    convert=split_experts,
    drop=llama.DROP,
)
