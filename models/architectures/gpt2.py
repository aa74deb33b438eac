"""GPT-2 and GPT-SW3: causal, pre-norm, learned positions, fused and transposed projections."""

import re
from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from .family import LAST_TOKEN_HEAD, SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, NamedTensors, activation_name

RENAMES = (
    (r"^wte\.", "tokens."),
    (r"^wpe\.", "position.table."),
    (r"^h\.", "blocks."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".mlp_norm."),
    (r"^ln_f\.", "final_norm."),
    (r"\.attn\.(query|key|value)\.", r".attention.\1."),
    (r"\.attn\.c_proj\.", ".attention.output."),
    (r"\.mlp\.c_fc\.", ".mlp.up."),
    (r"\.mlp\.c_proj\.", ".mlp.down."),
)


TRANSPOSED = r"\.(c_attn|c_proj|c_fc)\.weight$"


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Transpose the matrices, and split the fused one of query, key and value."""
    if re.search(TRANSPOSED, name):
        tensor = tensor.t()
    if ".attn.c_attn." in name:
        parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
        return [(name.replace("c_attn", part), piece) for part, piece in parts]
    return [(name, tensor)]


def model_config(hf: Json) -> ModelConfig:
    for switch in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(switch):
            raise UnsupportedError(f"{switch} is not known here")
    if not hf.get("scale_attn_weights", True):
        raise UnsupportedError("scale_attn_weights false is not known here")
    width, heads = hf["n_embd"], hf["n_head"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf.get("n_inner") or 4 * width,
        max_positions=hf["n_positions"],
        causal=True,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(hf.get("activation_function", "gelu_new")),
    )


GPT2 = Family(
    name="gpt2",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "GPT2LMHeadModel": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "GPT2Model": HeadSpec("embed"),
        "GPT2ForSequenceClassification": LAST_TOKEN_HEAD,
        "GPT2ForTokenClassification": TAG_HEAD,
        "GPT2ForQuestionAnswering": SPAN_HEAD,
    },
    convert=convert_weight,
    transposed=TRANSPOSED,
    drop=r"^lm_head\.|\.attn\.(bias|masked_bias)$",
)
GPT_SW3 = replace(GPT2, name="gpt-sw3")
