"""LFM2, also with experts: gated short convolutions in most layers, attention in the others (arXiv:2511.23404)."""

from dataclasses import replace

from torch import Tensor

from ..network.model_config import ExpertConfig, MixerConfig, MixerName, ModelConfig
from . import experts, llama
from .family import Family, Json, NamedTensors, layer_numbers, read_mixers, read_sizes

KINDS: dict[str, MixerName] = {"conv": "convolution", "full_attention": "attention"}
RENAMES = (
    (r"^embedding_norm\.", "final_norm."),
    (r"\.operator_norm\.", ".attention_norm."),
    (r"\.ffn_norm\.", ".mlp_norm."),
    (r"\.self_attn\.out_proj\.", ".attention.output."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.conv\.in_proj\.", ".attention.input."),
    (r"\.conv\.out_proj\.", ".attention.output."),
    (r"\.conv\.conv\.weight$", ".attention.taps"),
    (r"\.conv\.conv\.bias$", ".attention.taps_bias"),
    (r"\.feed_forward\.gate\.weight$", ".mlp.router.weight"),
    (r"\.feed_forward\.expert_bias$", ".mlp.choice_bias"),
    (r"\.feed_forward\.(experts\.\d+\.)?w1\.", r".mlp.\1gate."),
    (r"\.feed_forward\.(experts\.\d+\.)?w2\.", r".mlp.\1down."),
    (r"\.feed_forward\.(experts\.\d+\.)?w3\.", r".mlp.\1up."),
    *llama.RENAMES,
)


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """The convolution's factors [C, 1, K] as [C, K]."""
    return [(name, tensor.squeeze(1))] if name.endswith(".conv.conv.weight") else [(name, tensor)]


def model_config(hf: Json) -> ModelConfig:
    hf = {"num_key_value_heads": 8, "conv_L_cache": 3, "rope_theta": 1e6, **hf}
    hf |= {"rms_norm_eps": hf.get("norm_eps", 1e-5), "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    has_bias = bool(hf.get("conv_bias", False))
    return replace(
        llama.llama_config({**hf, "intermediate_size": read_mlp_width(hf)}),
        query_key_norm="shared",
        mixers=read_layers(hf),
        recurrent=MixerConfig(
            kernel=hf["conv_L_cache"], kernel_bias=has_bias, input_bias=has_bias, output_bias=has_bias
        ),
    )


def moe_config(hf: Json) -> ModelConfig:
    """Experts behind the first layers."""
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=experts.layers_from(hf, hf.get("num_dense_layers", 2)),
        scoring="sigmoid",
        normalised=bool(hf.get("norm_topk_prob", True)),
        normalised_eps=1e-6,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        choice_bias=bool(hf.get("use_expert_bias", True)),
    )
    return replace(model_config({**hf, "block_auto_adjust_ff_dim": False}), experts=mixture)


def read_layers(hf: Json) -> tuple[MixerName, ...]:
    """What the layers have, from `layer_types` or from the numbers of those with attention."""
    if hf.get("layer_types"):
        return read_mixers(hf, KINDS)
    attending, layers = hf.get("full_attn_idxs"), layer_numbers(hf["num_hidden_layers"])
    return tuple("attention" if attending is None or layer in attending else "convolution" for layer in layers)


def read_mlp_width(hf: Json) -> int:
    """The width of the MLPs: two thirds of the field, times a multiplier, up to the next multiple of another field."""
    width: int = hf.get("block_ff_dim") or hf["intermediate_size"]
    if not hf.get("block_auto_adjust_ff_dim", True):
        return width
    [width, multiple] = read_sizes({"block_multiple_of": 256, **hf, "width": width}, "width", "block_multiple_of")
    width = int(2 * width / 3)
    if (multiplier := hf.get("block_ffn_dim_multiplier", 1.0)) is not None:
        width = multiple * -(-int(float(multiplier) * width) // multiple)
    return width


LFM2 = Family(
    name="lfm2",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Lfm2", ()),
    convert=convert_weight,
    drop=llama.DROP,
)
LFM2_MOE = replace(LFM2, name="lfm2_moe", config=moe_config, heads=llama.llama_heads("Lfm2Moe", ()))
