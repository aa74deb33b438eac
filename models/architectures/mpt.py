"""MPT: causal, linear biases instead of positions, no biases of layers and norms, one matrix of queries, keys and
values."""

from torch import Tensor

from ..network.model_config import ModelConfig
from .family import (
    LAST_TOKEN_HEAD,
    SPAN_HEAD,
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    check_required_values,
    read_limit,
)

RENAMES = (
    (r"^wte\.", "tokens."),
    (r"^norm_f\.", "final_norm."),
    (r"\.norm_1\.", ".attention_norm."),
    (r"\.norm_2\.", ".mlp_norm."),
    (r"\.attn\.(query|key|value)\.", r".attention.\1."),
    (r"\.attn\.out_proj\.", ".attention.output."),
    (r"\.ffn\.(up|down)_proj\.", r".mlp.\1."),
)
REQUIRED_VALUES = {"no_bias": True, "logit_scale": None}
REQUIRED_ATTENTION = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrix."""
    if ".attn.Wqkv." not in name:
        return [(name, tensor)]
    parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
    return [(name.replace("Wqkv", part), piece) for part, piece in parts]


def model_config(hf: Json) -> ModelConfig:
    attention = hf.get("attn_config") or {}
    check_required_values(hf, REQUIRED_VALUES)
    check_required_values(attention, REQUIRED_ATTENTION)
    width, heads = hf["d_model"], hf["n_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf.get("expansion_ratio", 4) * width,
        max_positions=hf.get("max_seq_len", 2048),
        causal=True,
        position="alibi",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        norm_bias=False,
        score_scale=read_limit(attention, "softmax_scale"),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


MPT = Family(
    name="mpt",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "MptForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "MPTForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "MptModel": HeadSpec("embed"),
        "MptForSequenceClassification": LAST_TOKEN_HEAD,
        "MptForTokenClassification": TAG_HEAD,
        "MptForQuestionAnswering": SPAN_HEAD,
    },
    convert=convert_weight,
    drop=r"^lm_head\.",
    published_classes=frozenset(("MPTForCausalLM",)),
)
