"""Seed-OSS: Llama with biases of queries, keys and values."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Json


def model_config(hf: Json) -> ModelConfig:
    shape = llama.llama_config({"head_dim": 128, "attention_bias": True, **hf})
    return replace(shape, output_bias=bool(hf.get("attention_out_bias", False)))


SEED_OSS = replace(llama.LLAMA, name="seed_oss", config=model_config, heads=llama.llama_heads("SeedOss"))
