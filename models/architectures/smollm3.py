"""SmolLM3: Llama in which every fourth layer has no positions."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, layer_numbers, read_windowed_layers


def model_config(hf: Json) -> ModelConfig:
    layers = layer_numbers(hf["num_hidden_layers"])
    every = hf.get("no_rope_layer_interval") or 4
    listed = hf.get("no_rope_layers")  # 1 for a layer that is rotated, in spite of its name
    rotated = tuple((layer + 1) % every != 0 for layer in layers) if listed is None else tuple(map(bool, listed))
    by_depth = tuple(bool(hf.get("use_sliding_window")) and not turned for turned in rotated)
    windowed = read_windowed_layers(hf) or by_depth
    window = (hf.get("sliding_window") or 0) if any(windowed) else 0
    shape = llama.model_config({"rope_theta": 2_000_000.0, **hf})
    return replace(shape, rotated=rotated, window=window, windowed=windowed if window else ())


SMOLLM3 = Family(
    name="smollm3",
    prefix="model",
    config=model_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("SmolLM3"),
    drop=llama.DROP,
)
