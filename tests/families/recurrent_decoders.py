"""Rows of decoder families with recurrent layers: a configuration of transformers, its class, and its form as GGUF."""

from typing import Any

import transformers as tf

from tests.families.classic_decoders import MODEL, SPAN, TAG, TEXT, Row
from tests.families.modern_decoders import PLAIN, SHAPE, shape_of, with_images

HYBRID = ["linear_attention", "full_attention", "linear_attention"]
# Fewer features of a key would make rounding errors of the reference larger than what is compared.
DELTA = dict(
    SHAPE, layer_types=HYBRID, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=8,
)  # fmt: skip
QWEN = dict(DELTA, head_dim=16)
MAMBA = dict(SHAPE, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
SCALES = dict(embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=3.0)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
    num_position_embeddings=16,
)  # fmt: skip
MAMBA2 = dict(
    hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16, state_size=8, n_groups=2, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NEMOTRON = dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48, ssm_state_size=8,
    mamba_num_heads=4, mamba_head_dim=12, n_groups=2, n_routed_experts=4, moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ROWS = {
    "lfm2": Row(tf.Lfm2Config, tf.Lfm2ForCausalLM, shape_of(full_attn_idxs=[1], block_multiple_of=16)),
    "lfm2-biases": Row(
        tf.Lfm2Config,
        tf.Lfm2ForCausalLM,
        shape_of(full_attn_idxs=[0], block_auto_adjust_ff_dim=False, conv_bias=True, conv_L_cache=4),
    ),
    "lfm2-moe": Row(
        tf.Lfm2MoeConfig,
        tf.Lfm2MoeForCausalLM,
        shape_of(
            layer_types=["conv", "full_attention", "conv"], num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, num_dense_layers=1,
        ),
    ),
    "bamba": Row(tf.BambaConfig, tf.BambaForCausalLM, dict(MAMBA, attn_layer_indices=[1], mamba_proj_bias=True)),
    "granite-hybrid": Row(
        tf.GraniteMoeHybridConfig,
        tf.GraniteMoeHybridForCausalLM,
        dict(MAMBA, **SCALES, layer_types=HYBRID, num_local_experts=4, shared_intermediate_size=24),
    ),
    "granite-hybrid-dense": Row(
        tf.GraniteMoeHybridConfig,
        tf.GraniteMoeHybridForCausalLM,
        dict(
            MAMBA, **SCALES, layer_types=HYBRID, num_local_experts=0, shared_intermediate_size=24,
            position_embedding_type="rope", tie_word_embeddings=True, mamba_conv_bias=False,
        ),
    ),
    "mamba2": Row(tf.Mamba2Config, tf.Mamba2ForCausalLM, dict(MAMBA2)),
    "mamba2-limits": Row(
        tf.Mamba2Config, tf.Mamba2ForCausalLM, dict(MAMBA2, use_bias=True, time_step_limit=(0.5, 0.9))
    ),
    "nemotron-h": Row(
        tf.NemotronHConfig,
        tf.NemotronHForCausalLM,
        dict(NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"]),
    ),
    "qwen3-next": Row(
        tf.Qwen3NextConfig,
        tf.Qwen3NextForCausalLM,
        dict(QWEN, linear_key_head_dim=64, **EXPERTS, mlp_only_layers=[2], norm_topk_prob=False),
    ),
    "qwen3.5": Row(tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM, dict(QWEN, linear_key_head_dim=64)),
    "qwen3.5-moe": Row(tf.Qwen3_5MoeTextConfig, tf.Qwen3_5MoeForCausalLM, dict(QWEN, **EXPERTS)),
    "qwen3.5-images": Row(
        with_images(tf.Qwen3_5Config, VISION, QWEN), tf.Qwen3_5ForConditionalGeneration, {}
    ),
    "qwen3.5-moe-images": Row(
        with_images(tf.Qwen3_5MoeConfig, VISION, dict(QWEN, **EXPERTS)), tf.Qwen3_5MoeForConditionalGeneration, {}
    ),
    "olmo-hybrid": Row(
        tf.OlmoHybridConfig, tf.OlmoHybridForCausalLM, dict(DELTA, rope_parameters={"rope_type": "default"})
    ),
    "olmo-hybrid-rope": Row(
        tf.OlmoHybridConfig,
        tf.OlmoHybridForCausalLM,
        dict(DELTA, rope_parameters=dict(PLAIN), linear_allow_neg_eigval=False),
    ),
}  # fmt: skip
HEADS: dict[str, tuple[str, ...]] = {
    "lfm2": (MODEL,),
    "bamba": (MODEL,),
    "qwen3-next": (MODEL, TEXT, TAG, SPAN),
    "qwen3.5": (TEXT, TAG),
    "mamba2": (MODEL,),
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, r"layer_types\[1\] is 'mamba', which should be one of conv"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "mixers is .*, which should be one for each of 3 layers"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0"),
    ("lfm2", {"conv_L_cache": 100}, "with a kernel of 1 to 63 tokens"),
    ("bamba", {"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu' is known"),
    ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads is 0"),
    ("bamba", {"mamba_d_state": "8"}, "with a whole number from 1 on as key_width"),
    ("bamba", {"mamba_d_state": 1 << 28}, "with a state of 1073741824 numbers at most"),
    ("mamba2", {"state_size": 1 << 15}, "with a key_width of 32 at most, the width, or a state of 1048576 numbers"),
    ("mamba2", {"n_groups": 3}, "with a multiple of 3 heads"),
    ("mamba2", {"time_step_limit": [2.0, 1.0]}, "with limits of steps that are not negative, the lower one first"),
    ("mamba2", {"num_hidden_layers": 2000}, "2000 layers"),
    ("nemotron-h", {"moe_latent_size": 16}, "moe_latent_size is 16: only None is known"),
    ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "MxM"}, "hybrid_override_pattern has 'x'"),
    ("qwen3-next", {"attention_bias": True}, "attention_bias is True: only False is known"),
    ("qwen3.5", {"linear_num_value_heads": 3}, "with a multiple of 2 heads"),
    ("qwen3.5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
    ("olmo-hybrid", {"linear_num_key_heads": -1}, "linear_num_key_heads is -1"),
]  # a row, changes of its config.json, and what the error says
