"""Granite with experts, and with an expert that all tokens use: Llama with scaled embeddings, residual sums and logits
(https://huggingface.co/ibm-granite)."""

import re
from dataclasses import replace

from torch import Tensor

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import Family, Json, NamedTensors
from .granite import SINK_RENAMES, add_windows, granite_config

RENAMES = (
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.router."),
    *SINK_RENAMES,
)
# Of published files and of the newer form: the experts' matrices, with the gate's rows above the others.
FUSED = re.compile(
    r"(.*)\.block_sparse_moe\.(?:experts\.)?(input_linear\.weight|gate_up_proj|output_linear\.weight|down_proj)$"
)
SHARED = re.compile(r"(.*)\.shared_mlp\.(input|output)_linear\.weight$")


def split_experts(name: str, tensor: Tensor) -> NamedTensors:
    """The experts' matrices out of tensors [E, 2 I, W] and [E, W, I], and those of the shared expert."""
    if found := FUSED.match(name):
        kind = "gate_up_proj" if found[2].startswith(("input", "gate")) else "down_proj"
        return experts.split_experts(f"{found[1]}.mlp.experts.{kind}", tensor)
    if found := SHARED.match(name):
        parts = ("gate", "up") if found[2] == "input" else ("down",)
        pieces = zip(parts, tensor.chunk(len(parts)), strict=True)
        return [(f"{found[1]}.mlp.shared.{part}.weight", piece) for part, piece in pieces]
    return [(name, tensor)]


def model_config(hf: Json) -> ModelConfig:
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["intermediate_size"],
        shared_width=hf.get("shared_intermediate_size") or 0,
    )
    return replace(granite_config({**hf, "mlp_bias": False}), experts=mixture)


def plain_config(hf: Json) -> ModelConfig:
    """Without the shared expert, whatever the configuration says."""
    return model_config({**hf, "shared_intermediate_size": 0})


def windowed_config(hf: Json) -> ModelConfig:
    """With windows in most layers, and sinks."""
    return add_windows(model_config(hf), hf)


GRANITE_MOE_SHARED = Family(
    name="granitemoeshared",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("GraniteMoeShared", ()),
    convert=split_experts,
    drop=llama.DROP,
)
GRANITE_MOE = replace(
    GRANITE_MOE_SHARED, name="granitemoe", config=plain_config, heads=llama.llama_heads("GraniteMoe", ())
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED, name="granitemoe_swa", config=windowed_config, heads=llama.llama_heads("GraniteMoeSWA", ())
)
