"""The first GPT: causal, post-norm, learned positions, fused and transposed projections."""

from typing import Literal

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .family import LAST_TOKEN_HEAD, Family, HeadSpec, Json
from .gpt2 import RENAMES, TRANSPOSED, convert_weight

# The values of `afn` in its configuration.
GPT_ACTIVATIONS: dict[str, Literal["gelu_tanh", "silu", "relu"]] = {
    "gelu": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def model_config(hf: Json) -> ModelConfig:
    width, heads, activation = hf["n_embd"], hf["n_head"], hf.get("afn", "gelu")
    if activation not in GPT_ACTIVATIONS:
        raise UnsupportedError(f"afn {show_value(activation)} is not one of {', '.join(sorted(GPT_ACTIVATIONS))}")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=4 * width,
        max_positions=hf["n_positions"],
        causal=True,
        norm_order="post",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=GPT_ACTIVATIONS[activation],
    )


GPT = Family(
    name="openai-gpt",
    prefix="transformer",
    config=model_config,
    renames=((r"^tokens_embed\.", "tokens."), (r"^positions_embed\.", "position.table."), *RENAMES),
    heads={
        "OpenAIGPTLMHeadModel": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "OpenAIGPTModel": HeadSpec("embed"),
        "OpenAIGPTForSequenceClassification": LAST_TOKEN_HEAD,
    },
    convert=convert_weight,
    transposed=TRANSPOSED,
    drop=r"^lm_head\.|\.attn\.bias$|^position_ids$",
)
