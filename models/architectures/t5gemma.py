"""T5Gemma: an encoder-decoder of two Gemma 2, with embeddings of their own (Zhang et al. 2025, arXiv:2504.06225)."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import gemma
from .family import Family, HeadSpec, Json

RENAMES = (
    (r"^decoder\.embed_tokens\.", "head.decoder.tokens."),
    (r"^decoder\.norm\.", "head.decoder.final_norm."),
    (r"^decoder\.layers\.", "head.decoder.blocks."),
    (r"^encoder\.(model\.)?", ""),
    (r"\.(pre_self_attn)_layernorm\.", ".attention_norm."),
    (r"\.(post_self_attn)_layernorm\.", ".attention_post_norm."),
    (r"\.pre_cross_attn_layernorm\.", ".cross_norm."),
    (r"\.post_cross_attn_layernorm\.", ".cross_post_norm."),
    (r"\.cross_attn\.q_proj\.", ".cross.query."),
    (r"\.cross_attn\.k_proj\.", ".cross.key."),
    (r"\.cross_attn\.v_proj\.", ".cross.value."),
    (r"\.cross_attn\.o_proj\.", ".cross.output."),
    *gemma.RENAMES,
)
LANGUAGE_HEAD = ((r"^lm_head\.out_proj\.", "head.output."),)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder. A window counts the tokens that a row sees on each side."""
    side = hf["encoder"]
    shape = gemma.gemma2_config({"vocab_size": hf.get("vocab_size"), **side})
    radius = side.get("sliding_window", 4096)
    return replace(shape, causal=False, window=0 if radius is None else radius + 1)


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    encoder = model_config(hf)
    decoder = gemma.gemma2_config({"vocab_size": hf.get("vocab_size"), **hf["decoder"]})
    decoder = replace(decoder, source_width=encoder.width)
    return EncoderDecoderConfig(encoder=encoder, decoder=decoder, start=start, shared=False)


T5GEMMA = Family(
    name="t5gemma",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "T5GemmaForConditionalGeneration": HeadSpec("translate", LANGUAGE_HEAD, decoder=seq2seq_config),
        "T5GemmaEncoderModel": HeadSpec("embed"),
    },
    convert=gemma.convert_weight,
    drop=r"^lm_head\.|rotary_emb\.",
)
