"""EXAONE 4: Llama with norms after each part, normed queries and keys, and no positions in layers without a window."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, layer_numbers, read_windowed_layers
from .olmo import INNER_RENAMES


def model_config(hf: Json) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, **hf}
    hf |= {"attention_bias": False, "mlp_bias": False}
    windowed = read_windowed_layers(hf) or by_depth(hf["num_hidden_layers"], hf["sliding_window_pattern"])
    shape = replace(llama.llama_config(hf), norm_order="inner", query_key_norm="shared")
    if not hf["sliding_window"]:
        return shape
    return replace(shape, window=hf["sliding_window"], windowed=windowed, rotated=windowed)


def by_depth(depth: int, pattern: int | str) -> tuple[bool, ...]:
    """Which layers have a window: all but every n-th, or as the letters of the pattern say, L for a window."""
    if isinstance(pattern, str):
        return tuple(pattern[layer % len(pattern)] == "L" and layer < depth - 1 for layer in layer_numbers(depth))
    return tuple(bool((layer + 1) % pattern) for layer in layer_numbers(depth))


EXAONE4 = Family(
    name="exaone4",
    prefix="model",
    config=model_config,
    renames=INNER_RENAMES,
    heads=llama.llama_heads("Exaone4"),
    drop=llama.DROP,
)
