"""Nemotron-H: each layer is a state space (Mamba-2), attention without positions, an MLP, or experts
(arXiv:2504.03624)."""

import math
import re
from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, MixerConfig, MixerName, ModelConfig
from . import experts, llama, state_space
from .family import Family, Json, NamedTensors, activation_name, check_required_values, layer_numbers, read_mixers
from .qwen_moe import read_groups

RENAMES = (
    (r"^embeddings\.", "tokens."),
    (r"^norm_f\.", "final_norm."),
    *state_space.RENAMES,
    (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.mixer\.", ".mlp."),
    *experts.RENAMES,
    *llama.RENAMES,
)
KINDS: dict[str, MixerName] = {**state_space.KINDS, "mlp": "none", "moe": "none"}
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
FUSED = re.compile(r"(.*\.mixer\.experts)\.(up|down)_proj$")
NORM = re.compile(r"(layers\.(\d+))\.norm\.weight$")


def convert_weight(mixers: tuple[MixerName, ...], name: str, tensor: Tensor) -> NamedTensors:
    """Split tensors [E, ..] of all experts; name the norm of a layer by what follows it."""
    name = name.removeprefix("backbone.")
    if found := FUSED.match(name):
        matrices = enumerate(experts.list_experts(tensor))
        return [(f"{found[1]}.{number}.{found[2]}_proj.weight", matrix) for number, matrix in matrices]
    if (found := NORM.match(name)) and int(found[2]) < len(mixers):
        kind = "post_attention_layernorm" if mixers[int(found[2])] == "none" else "input_layernorm"
        return [(f"{found[1]}.{kind}.weight", tensor)]
    return state_space.squeeze_taps(name, tensor)


def list_kinds(hf: Json) -> list[str]:
    """The kind of each layer, from a list or from an older pattern of letters."""
    kinds = hf.get("layers_block_type")
    if kinds is None and (pattern := hf.get("hybrid_override_pattern")) is not None:
        if unknown := set(pattern) - PATTERN.keys():
            [letter, *_] = sorted(unknown)
            message = f"hybrid_override_pattern has {show_value(letter)}, which should be one of {' '.join(PATTERN)}"
            raise UnsupportedError(message)
        kinds = [PATTERN[letter] for letter in pattern]
    return list(kinds or ("linear_attention", "moe", "full_attention", "mlp"))


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"mamba_hidden_act": "silu", "moe_latent_size": None, "sliding_window": None})
    hf = {"num_key_value_heads": 8, "head_dim": 128, "ssm_state_size": 128, "mamba_num_heads": 128, **hf}
    hf = {"mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, **hf}
    hf = {"time_step_min": 0.001, **hf}
    hf = {"mlp_hidden_act": "relu2", "max_position_embeddings": 4096, **hf}
    kinds = list_kinds(hf)
    layer_numbers(len(kinds))
    plain = {"num_hidden_layers": len(kinds), "hidden_act": hf["mlp_hidden_act"], "attention_bias": False}
    shape = llama.llama_config({**hf, **plain, "rms_norm_eps": hf["layer_norm_epsilon"]})
    return replace(
        shape,
        position="none",
        activation=activation_name(hf["mlp_hidden_act"]),
        gated_mlp=False,
        mixers=read_mixers({"layers": kinds}, KINDS, "layers"),
        mlps=tuple(KINDS[kind] == "none" for kind in kinds),
        experts=read_experts(hf, kinds) if "moe" in kinds else None,
        recurrent=read_recurrent(hf),
    )


def read_recurrent(hf: Json) -> MixerConfig:
    has_bias = bool(hf.get("use_bias", False))
    return MixerConfig(
        kernel=hf["conv_kernel"],
        kernel_bias=bool(hf.get("use_conv_bias", True)),
        heads=hf["mamba_num_heads"],
        head_width=hf["mamba_head_dim"],
        key_heads=hf["n_groups"],
        key_width=hf["ssm_state_size"],
        input_bias=has_bias,
        output_bias=has_bias,
        norm_groups=hf["n_groups"],
        norm_eps=hf["layer_norm_epsilon"],
        # The reference reads the lower limit from the field for training, and no upper one.
        step_limits=(float(hf.get("mamba_dt_min", hf["time_step_min"])), math.inf),
    )


def read_experts(hf: Json, kinds: list[str]) -> ExpertConfig:
    """As DeepSeek-V3 has them, each a plain MLP."""
    groups, chosen_groups = read_groups(hf)
    return ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=tuple(kind == "moe" for kind in kinds),
        scoring="sigmoid",
        normalised=bool(hf.get("norm_topk_prob", True)),
        normalised_eps=1e-20,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        groups=groups if groups > 1 else 0,
        chosen_groups=chosen_groups,
        choice_bias=True,
        bias=bool(hf.get("mlp_bias", False)),
        shared_width=hf["moe_shared_expert_intermediate_size"],
    )


def choose_variant(family: Family, hf: Json) -> Family:
    mixers = read_mixers({"layers": list_kinds(hf)}, KINDS, "layers")

    def convert(name: str, tensor: Tensor) -> NamedTensors:
        return convert_weight(mixers, name, tensor)

    return replace(family, convert=convert)


NEMOTRON_HYBRID = Family(
    name="nemotron_h",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("NemotronH", ()),
    drop=rf"{llama.DROP}|^(backbone\.)?mtp\.",  # layers that predict further tokens in training
    variant=choose_variant,
)
