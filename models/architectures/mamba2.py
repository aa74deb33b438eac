"""Mamba-2: state space layers and nothing else (Dao and Gu 2024, arXiv:2405.21060)."""

from ..network.model_config import MixerConfig, ModelConfig
from . import llama, state_space
from .family import Family, HeadSpec, Json, check_required_values, layer_numbers

RENAMES = (
    (r"^embeddings?\.", "tokens."),
    (r"^layers\.", "blocks."),
    (r"^norm_f\.", "final_norm."),
    *state_space.RENAMES,
    (r"^(blocks\.\d+)\.norm\.", r"\1.attention_norm."),
)
MAX_POSITIONS = 1 << 20  # the files have no limit; it is the one that llama.cpp's converter writes


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"hidden_act": "silu"})
    hf = {"state_size": 128, "num_heads": 128, "head_dim": 64, "n_groups": 8, "conv_kernel": 4, **hf}
    depth, eps, has_bias = hf["num_hidden_layers"], hf.get("layer_norm_epsilon", 1e-5), bool(hf.get("use_bias", False))
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=hf["hidden_size"],
        depth=depth,
        heads=1,  # there is neither attention nor an MLP
        kv_heads=1,
        head_width=1,
        mlp_width=1,
        max_positions=MAX_POSITIONS,
        causal=True,
        position="none",
        norm="rms",
        norm_eps=eps,
        mixers=tuple("state_space" for _ in layer_numbers(depth)),
        mlps=tuple(False for _ in layer_numbers(depth)),
        recurrent=MixerConfig(
            kernel=hf["conv_kernel"],
            kernel_bias=bool(hf.get("use_conv_bias", True)),
            heads=hf["num_heads"],
            head_width=hf["head_dim"],
            key_heads=hf["n_groups"],
            key_width=hf["state_size"],
            input_bias=has_bias,
            output_bias=has_bias,
            norm_groups=hf["n_groups"],
            norm_eps=eps,
            step_limits=state_space.read_step_limits(hf),
        ),
    )


MAMBA2 = Family(
    name="mamba2",
    prefix="backbone",
    config=model_config,
    renames=RENAMES,
    heads={"Mamba2ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD), "Mamba2Model": HeadSpec("embed")},
    convert=state_space.squeeze_taps,
    drop=llama.DROP,
)
