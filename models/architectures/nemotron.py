"""Nemotron and Arcee: an MLP of squared rectified features without a gate; Nemotron with biased layer norms and
partial rotation."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json
from .gemma import convert_weight


def nemotron_config(hf: Json) -> ModelConfig:
    hf = {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2", **hf}
    return replace(llama.llama_config({**hf, "rms_norm_eps": hf["norm_eps"]}), norm="layer", gated_mlp=False)


def arcee_config(hf: Json) -> ModelConfig:
    return replace(llama.llama_config({"rms_norm_eps": 1e-5, "hidden_act": "relu2", **hf}), gated_mlp=False)


NEMOTRON = Family(
    name="nemotron",
    prefix="model",
    config=nemotron_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Nemotron"),
    convert=convert_weight,
    drop=llama.DROP,
    rotates_share=True,
)
ARCEE = replace(llama.LLAMA, name="arcee", config=arcee_config, heads=llama.llama_heads("Arcee"))
