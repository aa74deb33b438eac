"""Rows of decoder families since Llama: a configuration of transformers, its class, and its form as GGUF."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import transformers as tf
from torch import Tensor

from tests.families.classic_decoders import MODEL, POSITIONS, SPAN, TAG, TEXT, VOCABULARY, GgufForm, Row
from tests.support.gguf_files import permuted

Fields = Callable[[Any], Mapping[str, Any]]


def fields_of(config: Any, **more: str | float) -> dict[str, Any]:
    """The metadata that the converter writes for every family; `more` are keys of this one and fields of the
    configuration, or values."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    eps = next((key for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if hasattr(config, key)), None)
    kind = "layer_norm_rms_epsilon" if eps == "rms_norm_eps" else "layer_norm_epsilon"
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    share = parameters.get("partial_rotary_factor")
    rotated = {} if share is None else {"rope.dimension_count": int(share * width)}
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads or heads,
        "attention.key_length": width,
        "attention.value_length": width,
        f"attention.{kind}": getattr(config, eps) if eps else 1e-5,
        "rope.freq_base": float(parameters["rope_theta"]),
        **rotated,
        **{key: getattr(config, value) if isinstance(value, str) else value for key, value in more.items()},
    }


def form(architecture: str, convert: Callable[..., Tensor] | None = None, **more: str | float) -> GgufForm:
    fields = partial(fields_of, **more)
    return GgufForm(architecture, fields) if convert is None else GgufForm(architecture, fields, convert)


def interleave(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Queries and keys as the converter permutes them for a rotation of neighbouring features."""
    if ".q_proj." in name:
        return permuted(tensor, config.num_attention_heads)
    return permuted(tensor, config.num_key_value_heads or config.num_attention_heads) if ".k_proj." in name else tensor


def shift_norm(config: Any, name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def yarn_fields(config: Any) -> dict[str, Any]:
    """OLMo 3: layers with a window, and YaRN in those without."""
    parameters = config.rope_parameters["full_attention"]
    return fields_of(config) | {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": parameters["factor"],
        "rope.scaling.original_context_length": parameters["original_max_position_embeddings"],
    }


def linear_fields(config: Any) -> dict[str, Any]:
    factor = config.rope_parameters["factor"]
    return fields_of(config) | {"rope.scaling.type": "linear", "rope.scaling.factor": factor}


def listed_windows(config: Any) -> dict[str, Any]:
    return fields_of(config) | {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
    }


def raised_base(config: Any) -> dict[str, Any]:
    """Hunyuan: the base of the rotation, raised by its alpha, and no scaling."""
    parameters, width = config.rope_parameters, config.head_dim
    base = parameters["rope_theta"] * parameters["alpha"] ** (width / (width - 2))
    return fields_of(config) | {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def shape_of(**more: Any) -> dict[str, Any]:
    return dict(SHAPE, **more)


def with_images(kind: Callable[..., Any], vision: Mapping[str, Any], text: Mapping[str, Any]) -> Callable[..., Any]:
    """The configuration of a network that also reads images, with a text part of the size of all rows."""

    def make(**more: Any) -> Any:
        return kind(text_config={"vocab_size": VOCABULARY, **text}, vision_config=dict(vision))

    return make


SHAPE = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=POSITIONS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
RAISED_BASE = {"rope_type": "dynamic", "alpha": 100.0, "rope_theta": 1e4, "factor": 1.0}
SIGLIP = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
GEMMA_VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    patch_size=4,
)  # fmt: skip
QWEN_VISION = dict(
    depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, intermediate_size=16, out_hidden_size=32,
    num_position_embeddings=16, fullatt_block_indexes=[0], deepstack_visual_indexes=[0],
)  # fmt: skip
SECTIONS = {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CAPS = dict(
    head_dim=16, query_pre_attn_scalar=16, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
)
CAP_KEYS = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
GEMMA3 = shape_of(head_dim=16, query_pre_attn_scalar=16, sliding_window=4, layer_types=WINDOWS)
GEMMA4 = shape_of(
    head_dim=8, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=8, final_logit_softcapping=3.0,
    vocab_size_per_layer_input=VOCABULARY, num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
    num_kv_shared_layers=2, use_double_wide_mlp=True,
)  # fmt: skip
GEMMA4_TIED = shape_of(
    head_dim=8, global_head_dim=16, sliding_window=4, hidden_size_per_layer_input=0, attention_k_eq_v=True,
    num_global_key_value_heads=1, layer_types=["sliding_attention", "full_attention", "full_attention"],
)  # fmt: skip
GEMMA4_EXPERTS = dict(GEMMA4_TIED, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24)
GEMMA4_UNIFIED = shape_of(
    head_dim=8, global_head_dim=16, sliding_window=4, attention_k_eq_v=True, num_global_key_value_heads=1,
    num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
)  # fmt: skip
GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0, attention_bias=True
)
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
WINDOW = {"attention.sliding_window": "sliding_window"}
LOGIT_SCALE = {"logit_scale": "logit_scale"}
QWEN_TEXT = shape_of(rope_parameters=SECTIONS)

ROWS: dict[str, Row] = {
    "llama": Row(tf.LlamaConfig, tf.LlamaForCausalLM, SHAPE, form("llama", interleave)),
    "llama-biased-tied": Row(
        tf.LlamaConfig,
        tf.LlamaForCausalLM,
        shape_of(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "llama-linear": Row(
        tf.LlamaConfig,
        tf.LlamaForCausalLM,
        shape_of(rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}),
        GgufForm("llama", linear_fields, interleave),
    ),
    "llama-3": Row(tf.LlamaConfig, tf.LlamaForCausalLM, shape_of(rope_parameters=LLAMA3)),
    "llama-yarn": Row(tf.LlamaConfig, tf.LlamaForCausalLM, shape_of(rope_parameters=YARN)),
    "mistral-window": Row(tf.MistralConfig, tf.MistralForCausalLM, shape_of(sliding_window=3)),
    "qwen2": Row(tf.Qwen2Config, tf.Qwen2ForCausalLM, SHAPE, form("qwen2")),
    "qwen2-window": Row(
        tf.Qwen2Config,
        tf.Qwen2ForCausalLM,
        shape_of(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "qwen3": Row(tf.Qwen3Config, tf.Qwen3ForCausalLM, shape_of(head_dim=16), form("qwen3")),
    "phi3": Row(tf.Phi3Config, tf.Phi3ForCausalLM, SHAPE, form("phi3")),
    "phi3-window": Row(
        tf.Phi3Config,
        tf.Phi3ForCausalLM,
        shape_of(sliding_window=3, tie_word_embeddings=True, num_key_value_heads=4),
        form("phi3", **WINDOW),
    ),
    "phi3-longrope": Row(
        tf.Phi3Config,
        tf.Phi3ForCausalLM,
        shape_of(max_position_embeddings=96, original_max_position_embeddings=48, rope_parameters=LONG_ROPE),
    ),
    "phi": Row(tf.PhiConfig, tf.PhiForCausalLM, shape_of(num_key_value_heads=4), form("phi2")),
    "phi-normed": Row(tf.PhiConfig, tf.PhiForCausalLM, shape_of(qk_layernorm=True, partial_rotary_factor=0.25)),
    "gemma": Row(tf.GemmaConfig, tf.GemmaForCausalLM, shape_of(head_dim=16), form("gemma", shift_norm)),
    "gemma-untied": Row(
        tf.GemmaConfig, tf.GemmaForCausalLM, shape_of(head_dim=8, tie_word_embeddings=False, hidden_act="gelu")
    ),
    "gemma2": Row(tf.Gemma2Config, tf.Gemma2ForCausalLM, shape_of(**CAPS), form("gemma2", shift_norm, **CAP_KEYS)),
    "gemma2-uncapped": Row(
        tf.Gemma2Config,
        tf.Gemma2ForCausalLM,
        shape_of(head_dim=8, query_pre_attn_scalar=24, attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "gemma3": Row(tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, GEMMA3),
    "gemma3-pattern": Row(
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        shape_of(num_hidden_layers=7, head_dim=8, sliding_window=4, final_logit_softcapping=3.0),
    ),
    "gemma3-images": Row(
        with_images(tf.Gemma3Config, SIGLIP, GEMMA3), tf.Gemma3ForConditionalGeneration, {}
    ),
    "gemma4": Row(tf.Gemma4TextConfig, tf.Gemma4ForCausalLM, GEMMA4),
    "gemma4-tied": Row(tf.Gemma4TextConfig, tf.Gemma4ForCausalLM, GEMMA4_TIED),
    "gemma4-images": Row(
        with_images(tf.Gemma4Config, GEMMA_VISION, GEMMA4), tf.Gemma4ForConditionalGeneration, {}
    ),
    "gemma4_unified": Row(tf.Gemma4UnifiedTextConfig, tf.Gemma4UnifiedForCausalLM, GEMMA4_UNIFIED),
    "gemma4_unified-images": Row(
        with_images(tf.Gemma4UnifiedConfig, dict(patch_size=4, model_patch_size=12, mm_embed_dim=16), GEMMA4_UNIFIED),
        tf.Gemma4UnifiedForConditionalGeneration,
        {},
    ),
    "smollm3": Row(
        tf.SmolLM3Config, tf.SmolLM3ForCausalLM, shape_of(num_hidden_layers=5), form("smollm3", interleave)
    ),
    "smollm3-window": Row(
        tf.SmolLM3Config,
        tf.SmolLM3ForCausalLM,
        shape_of(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=3, tie_word_embeddings=False),
    ),
    "granite": Row(
        tf.GraniteConfig, tf.GraniteForCausalLM, shape_of(**GRANITE), form("granite", interleave, **GRANITE_KEYS)
    ),
    "olmo": Row(tf.OlmoConfig, tf.OlmoForCausalLM, SHAPE, form("olmo", interleave)),
    "olmo2": Row(tf.Olmo2Config, tf.Olmo2ForCausalLM, SHAPE, form("olmo2")),
    "olmo3": Row(
        tf.Olmo3Config,
        tf.Olmo3ForCausalLM,
        shape_of(
            num_hidden_layers=4, sliding_window=3,
            rope_parameters={"full_attention": dict(YARN), "sliding_attention": dict(PLAIN)},
        ),
        GgufForm("olmo2", yarn_fields),
    ),
    "cohere": Row(
        tf.CohereConfig, tf.CohereForCausalLM, shape_of(logit_scale=0.3), form("command-r", **LOGIT_SCALE)
    ),
    "cohere-normed": Row(
        tf.CohereConfig,
        tf.CohereForCausalLM,
        shape_of(logit_scale=0.3, use_qk_norm=True, attention_bias=True),
        form("command-r", **LOGIT_SCALE),
    ),
    "cohere2": Row(
        tf.Cohere2Config,
        tf.Cohere2ForCausalLM,
        shape_of(num_hidden_layers=4, logit_scale=0.3, sliding_window=3),
        form("cohere2", **LOGIT_SCALE, **WINDOW),
    ),
    "stablelm": Row(
        tf.StableLmConfig,
        tf.StableLmForCausalLM,
        shape_of(use_qkv_bias=True, partial_rotary_factor=0.5),
        form("stablelm"),
    ),
    "stablelm-parallel": Row(
        tf.StableLmConfig,
        tf.StableLmForCausalLM,
        shape_of(use_parallel_residual=True, tie_word_embeddings=True),
        form("stablelm"),
    ),
    "glm": Row(tf.GlmConfig, tf.GlmForCausalLM, shape_of(head_dim=16), form("chatglm")),
    "glm4": Row(tf.Glm4Config, tf.Glm4ForCausalLM, shape_of(head_dim=16, attention_bias=False), form("glm4")),
    "exaone4": Row(
        tf.Exaone4Config,
        tf.Exaone4ForCausalLM,
        shape_of(sliding_window=3, sliding_window_pattern=2),
        GgufForm("exaone4", listed_windows),
    ),
    "exaone4-full": Row(
        tf.Exaone4Config,
        tf.Exaone4ForCausalLM,
        shape_of(sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
        form("exaone4"),
    ),
    "ministral": Row(
        tf.MinistralConfig, tf.MinistralForCausalLM, shape_of(head_dim=8, sliding_window=3, layer_types=WINDOWS)
    ),
    "ministral3": Row(
        tf.Ministral3Config,
        tf.Ministral3ForCausalLM,
        shape_of(
            head_dim=16,
            rope_parameters=dict(YARN, original_max_position_embeddings=48, factor=2.0, llama_4_scaling_beta=0.1),
        ),
    ),
    "mistral3-images": Row(
        with_images(
            tf.Mistral3Config,
            dict(SIGLIP, model_type="pixtral", head_dim=8, num_channels=3),
            shape_of(model_type="mistral", head_dim=8, sliding_window=None),
        ),
        tf.Mistral3ForConditionalGeneration,
        {},
    ),
    "internlm3": Row(
        tf.InternLM3Config, tf.LlamaForCausalLM, shape_of(head_dim=8, attention_bias=True, mlp_bias=True)
    ),
    "seed_oss": Row(tf.SeedOssConfig, tf.SeedOssForCausalLM, shape_of(head_dim=16), form("seed_oss")),
    "helium": Row(tf.HeliumConfig, tf.HeliumForCausalLM, shape_of(head_dim=8)),
    "nemotron": Row(tf.NemotronConfig, tf.NemotronForCausalLM, SHAPE, form("nemotron", shift_norm)),
    "arcee": Row(tf.ArceeConfig, tf.ArceeForCausalLM, SHAPE, form("arcee", interleave)),
    "ernie4_5": Row(
        tf.Ernie4_5Config, tf.Ernie4_5ForCausalLM, shape_of(head_dim=16, use_bias=True), form("ernie4_5")
    ),
    "hunyuan": Row(
        tf.HunYuanDenseV1Config,
        tf.HunYuanDenseV1ForCausalLM,
        shape_of(head_dim=16, rope_parameters=dict(RAISED_BASE)),
        GgufForm("hunyuan-dense", raised_base),
    ),
    "iquestcoder": Row(tf.IQuestCoderConfig, tf.LlamaForCausalLM, shape_of(head_dim=16, mlp_bias=True)),
    "cwm": Row(
        tf.CwmConfig,
        tf.CwmForCausalLM,
        shape_of(num_hidden_layers=5, head_dim=16, sliding_window=3, rope_parameters=dict(LLAMA3)),
    ),
    "jais2": Row(tf.Jais2Config, tf.Jais2ForCausalLM, SHAPE, form("jais2")),
    "vaultgemma": Row(tf.VaultGemmaConfig, tf.VaultGemmaForCausalLM, shape_of(**CAPS)),
    "hyperclovax": Row(tf.HyperCLOVAXConfig, tf.HyperCLOVAXForCausalLM, shape_of(**GRANITE)),
    "hyperclovax-plain": Row(
        tf.HyperCLOVAXConfig, tf.HyperCLOVAXForCausalLM, shape_of(use_post_norm=False, embedding_multiplier=2.0)
    ),
    "granite_swa": Row(tf.GraniteSWAConfig, tf.GraniteSWAForCausalLM, shape_of(**GRANITE, sliding_window=3)),
    "granite_swa-bases": Row(
        tf.GraniteSWAConfig,
        tf.GraniteSWAForCausalLM,
        shape_of(**GRANITE, sliding_window=3, layer_types=WINDOWS, layer_rope_theta=[1e3, 1e4, 0]),
    ),
    "gpt_neox_japanese": Row(
        tf.GPTNeoXJapaneseConfig,
        tf.GPTNeoXJapaneseForCausalLM,
        dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=POSITIONS),
    ),
    "nanochat": Row(tf.NanoChatConfig, tf.NanoChatForCausalLM, shape_of(attention_bias=True)),
    "apertus": Row(tf.ApertusConfig, tf.ApertusForCausalLM, shape_of(attention_bias=True)),
    "modernbert-decoder": Row(
        tf.ModernBertDecoderConfig,
        tf.ModernBertDecoderForCausalLM,
        shape_of(num_hidden_layers=4, local_attention=6, tie_word_embeddings=False),
    ),
    "modernbert-decoder-biased": Row(
        tf.ModernBertDecoderConfig,
        tf.ModernBertDecoderForCausalLM,
        shape_of(
            local_attention=6, norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True,
            decoder_bias=False, classifier_activation="silu",
        ),
    ),
    "cohere_compass": Row(
        tf.CohereCompassTextConfig,
        tf.CohereCompassForCausalLM,
        shape_of(
            sliding_window=3, layer_types=WINDOWS, logit_scale=0.3,
            rope_parameters={"sliding_attention": dict(PLAIN, mrope_section=[1, 1, 2]), "full_attention": None},
        ),
    ),
    "cohere_compass-images": Row(
        with_images(
            tf.CohereCompassConfig,
            QWEN_VISION,
            shape_of(
                sliding_window=3, layer_types=WINDOWS, head_dim=8,
                rope_parameters={
                    "sliding_attention": dict(PLAIN, mrope_section=[1, 1, 2]),
                    "full_attention": dict(PLAIN, rope_theta=1e3, mrope_section=[1, 1, 2]),
                },
            ),
        ),
        tf.CohereCompassForConditionalGeneration,
        {},
    ),
    "qwen2-images": Row(
        with_images(tf.Qwen2VLConfig, QWEN_VISION, QWEN_TEXT), tf.Qwen2VLForConditionalGeneration, {}
    ),
    "qwen2.5-images": Row(
        with_images(tf.Qwen2_5_VLConfig, QWEN_VISION, QWEN_TEXT), tf.Qwen2_5_VLForConditionalGeneration, {}
    ),
    "qwen3-images": Row(
        with_images(tf.Qwen3VLConfig, QWEN_VISION, dict(QWEN_TEXT, head_dim=8)), tf.Qwen3VLForConditionalGeneration, {}
    ),
}  # fmt: skip

HEADS: dict[str, tuple[str, ...]] = {
    "phi3": (MODEL, TEXT, TAG),
    "phi": (MODEL, TEXT, TAG),
    "gemma": (MODEL, TEXT, TAG),
    "gemma2": (MODEL, TEXT, TAG),
    "smollm3": (MODEL, TEXT, TAG, SPAN),
    "granite": (MODEL,),
    "olmo": (MODEL, TEXT),
    "olmo2": (MODEL, TEXT),
    "olmo3": (MODEL, TEXT),
    "cohere": (MODEL,),
    "cohere2": (MODEL,),
    "stablelm": (MODEL, TEXT, TAG),
    "glm": (MODEL, TEXT, TAG),
    "glm4": (MODEL, TEXT, TAG),
    "exaone4": (MODEL, TEXT, TAG, SPAN),
    "ministral": (MODEL, TEXT, TAG, SPAN),
    "ministral3": (MODEL, TEXT, TAG, SPAN),
    "seed_oss": (MODEL, TEXT, TAG, SPAN),
    "helium": (MODEL, TEXT, TAG),
    "nemotron": (MODEL, TEXT, TAG, SPAN),
    "arcee": (MODEL, TEXT, TAG, SPAN),
    "ernie4_5": (MODEL,),
    "hunyuan": (MODEL, TEXT),
    "cwm": (MODEL,),
    "jais2": (MODEL,),
    "vaultgemma": (MODEL,),
    "hyperclovax": (MODEL,),
    "granite_swa": (MODEL,),
    "gpt_neox_japanese": (MODEL,),
    "nanochat": (MODEL,),
    "apertus": (MODEL, TAG),
    "modernbert-decoder": (MODEL, TEXT),
    "modernbert-decoder-biased": (TEXT,),
}  # the classes beside that of a generator, by the row of the configuration
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"vocab_size": "384"}, "vocab_size is '384', which should be a whole number"),
    ("phi3", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("phi3-longrope", {"rope_parameters": dict(LONG_ROPE, short_factor=[1.0])}, "with 2 factors, half of the rotated"),
    ("phi", {"hidden_act": "mish"}, "activation 'mish'"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not known"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not known"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not known"),
    ("gemma4", {"enable_moe_block": True}, "num_experts is None, which should be a whole number"),
    (
        "gemma4",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
        "enable_moe_block: MLPs beside experts have 48, 96 inner features; known are equal ones",
    ),
    (
        "gemma4-tied",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
        "experts is .*with 4 at most chosen for a token",
    ),
    ("gemma4", {"enable_moe_block": "yes"}, "enable_moe_block is 'yes', which should be true or false"),
    ("gemma4_unified", {"enable_moe_block": True}, "enable_moe_block is .*: only .* is known"),
    ("gemma4_unified", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8: only 0 is known"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6: only fewer"),
    ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1: only fewer"),
    ("gemma4", {"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5: only 384"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": "16"}}}, "head_dim is '16', which should be a whole number"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}}}, "head_width is .*the same in all layers with the same"),
    (
        "gemma4",
        {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
        "heads is 4, .*a multiple of kv_heads, which is 3",
    ),
    ("gemma4", {"layer_types": ["full_attention"] * 7}, "layer_types has 7 layers, and num_hidden_layers is 6"),
    ("gemma4", {"per_layer_config": [3]}, "per_layer_config is .*, which should be an object"),
    ("gemma4", {"hidden_size_per_layer_input": -8}, "layer_embedding is -8, which should be a whole number"),
    ("smollm3", {"no_rope_layers": [1]}, "rotated is .*, which should be one for each of 5 layers"),
    ("cohere", {"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
    ("glm", {"partial_rotary_factor": 3.0, "rope_parameters": None}, "rotary_width is 48"),
    ("glm4", {"head_dim": -1}, "head_dim is -1"),
    ("apertus", {"hidden_act": "silu"}, "hidden_act is 'silu': only 'xielu' is known"),
    (
        "cohere_compass",
        {"rope_parameters": {"sliding_attention": YARN, "full_attention": PLAIN}},
        "a scaling that differs",
    ),
    ("iquestcoder", {"clip_qkv": 3.0}, "clip_qkv is 3.0: only None is known"),
    ("granite_swa-bases", {"layer_rope_theta": [1e3, 1e4, 1e5]}, "layer_rope_theta should have .* 3 layers: one base"),
    ("granite_swa-bases", {"layer_rope_theta": [1e3]}, "layer_rope_theta should have a number for each of 3 layers"),
    ("gpt_neox_japanese", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("mistral3-images", {"text_config": {"model_type": "qwen2"}}, "model_type 'qwen2' of text_config is not known"),
]  # a row, changes of its config.json, and what the error says
