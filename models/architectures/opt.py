"""OPT: causal, learned positions, ReLU. The network of 350 million parameters has post-norm, and embeddings that are
projected to the layers' width and back."""

from torch import Tensor

from ..network.model_config import ModelConfig
from .bart import RENAMES as BART_RENAMES
from .family import (
    LAST_TOKEN_HEAD,
    SPAN_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    check_required_values,
)

RENAMES = (
    (r"^(model\.)?decoder\.", ""),
    (r"^embed_tokens\.", "tokens."),
    (r"^project_in\.", "projection."),
    (r"^project_out\.", "output_projection."),
    (r"^final_layer_norm\.", "final_norm."),
    *BART_RENAMES,
)


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """The projection of the embeddings has no bias: it is 0."""
    if name.endswith("project_in.weight"):
        return [(name, tensor), (name.replace("weight", "bias"), tensor.new_zeros(tensor.shape[0]))]
    return [(name, tensor)]


def model_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"_remove_final_layer_norm": False})
    width, heads, biased = hf["hidden_size"], hf["num_attention_heads"], bool(hf.get("enable_bias", True))
    before, narrow = hf.get("do_layer_norm_before", True), hf.get("word_embed_proj_dim") or width
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["ffn_dim"],
        max_positions=hf["max_position_embeddings"],
        position_offset=2,
        position_last=narrow != width,
        causal=True,
        norm_order="pre" if before else "post",
        norm_weight=bool(hf.get("layer_norm_elementwise_affine", True)),
        embedding_width=narrow if narrow != width else 0,
        output_width=narrow if narrow != width else 0,
        activation=activation_name(hf.get("activation_function", "relu")),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
    )


OPT = Family(
    name="opt",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "OPTForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "OPTModel": HeadSpec("embed"),
        "OPTForSequenceClassification": LAST_TOKEN_HEAD,
        "OPTForQuestionAnswering": SPAN_HEAD,
    },
    convert=convert_weight,
    drop=r"^lm_head\.",
)
