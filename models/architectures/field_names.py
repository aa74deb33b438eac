"""Fields of configurations that have two names: transformers' classes read either as the same field.

`OTHER_NAMES` is `attribute_map` of these classes by `model_type`, without fields that change no answer.
"""

from collections.abc import Mapping

from ..core.errors import UnsupportedError, show_value
from .family import Json

Names = Mapping[str, str]  # the other name -> the one that is read here

STACKS = ("text_config", "encoder", "decoder")  # fields of a configuration that have those of a stack
GPT2: Names = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
BART: Names = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
SWITCH: Names = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
T5: Names = {**SWITCH, "head_dim": "d_kv"}
MPT: Names = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
XLM: Names = {
    "hidden_size": "emb_dim",
    "n_words": "vocab_size",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
ROUTED: Names = {"num_local_experts": "n_routed_experts"}
LOCAL: Names = {"num_experts": "num_local_experts"}
EXPERTS: Names = {"num_local_experts": "num_experts"}

OTHER_NAMES: Mapping[str, Names] = {
    **dict.fromkeys(("codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), GPT2),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "m2m_100"), BART),
    **dict.fromkeys(("marian", "mbart", "mvp", "pegasus", "plbart"), BART),
    **dict.fromkeys(("mt5", "t5", "umt5"), T5),
    **dict.fromkeys(("flaubert", "xlm"), XLM),
    **dict.fromkeys(("axk1", "deepseek_v3", "dots1", "glm4_moe", "mimo_v2_flash", "mistral4", "solar_open"), ROUTED),
    **dict.fromkeys(("gpt_oss", "kolibri1", "mellum", "minimax_m2", "mixtral", "qwen3_moe"), LOCAL),
    **dict.fromkeys(("flex_olmo", "hy_v3", "olmoe"), EXPERTS),
    "bamba": {"layer_types": "layers_block_type"},
    "bloom": {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "dbrx": {**MPT, "max_position_embeddings": "max_seq_len"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "distilbert": {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe_lite": {**ROUTED, "head_dim": "qk_rope_head_dim"},
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "hunyuan_v1_moe": {**EXPERTS, "num_experts_per_tok": "moe_topk"},
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "mpt": MPT,
    "nemotron_h": {**ROUTED, "layer_types": "layers_block_type"},
    "prophetnet": {"num_attention_heads": "num_encoder_attention_heads"},
    "qwen3_vl_moe_text": LOCAL,
    "switch_transformers": SWITCH,
    "xglm": {"hidden_size": "d_model", "num_attention_heads": "attention_heads", "num_hidden_layers": "num_layers"},
}


def unify_names(hf: Json) -> dict[str, object]:
    """The configuration with each field under the name that is read here. UnsupportedError for a field that has other
    values under its two names: which one is followed differs between versions of transformers."""
    config = _unify(hf, hf.get("model_type"))
    for name in STACKS:
        if isinstance(stack := config.get(name), Mapping):
            config[name] = _unify(stack, stack.get("model_type", f"{hf.get('model_type')}_text"))
    return config


def _unify(hf: Json, model_type: object) -> dict[str, object]:
    config = dict(hf)
    names = OTHER_NAMES.get(model_type, {}) if isinstance(model_type, str) else {}
    for other, name in names.items():
        if (value := hf.get(other)) is None:
            continue
        if config.get(name) is None:
            config[name] = value
        elif not _is_same(config[name], value):
            values = f"{other} is {show_value(value)} and {name} is {show_value(config[name])}"
            raise UnsupportedError(f"{values}: two names of one field, which should have one value; remove {other}")
    return config


def _is_same(one: object, other: object) -> bool:
    """Whether the values are equal; a list for all layers may be one number for each of them."""
    numbers = one if isinstance(one, list) and one and not isinstance(other, list) else [one]
    return all(each == other for each in numbers)
