"""XLM (Lample and Conneau 2019, arXiv:1901.07291) and FlauBERT: BERT with other names, without segments."""

from typing import Literal

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from .family import SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, check_required_values, direct_scoring

RENAMES = (
    (r"^embeddings\.", "tokens."),
    (r"^position_embeddings\.", "position.table."),
    (r"^layer_norm_emb\.", "embedding_norm."),
    (r"^attentions\.(\d+)\.q_lin\.", r"blocks.\1.attention.query."),
    (r"^attentions\.(\d+)\.k_lin\.", r"blocks.\1.attention.key."),
    (r"^attentions\.(\d+)\.v_lin\.", r"blocks.\1.attention.value."),
    (r"^attentions\.(\d+)\.out_lin\.", r"blocks.\1.attention.output."),
    (r"^layer_norm1\.(\d+)\.", r"blocks.\1.attention_norm."),
    (r"^ffns\.(\d+)\.lin1\.", r"blocks.\1.mlp.up."),
    (r"^ffns\.(\d+)\.lin2\.", r"blocks.\1.mlp.down."),
    (r"^layer_norm2\.(\d+)\.", r"blocks.\1.mlp_norm."),
)
TEXT_HEAD = ((r"^sequence_summary\.summary\.", "head.out."),)
MASK_HEAD = ((r"^pred_layer\.proj\.", "head.output."),)
KNOWN = {"causal": False, "is_encoder": True, "asm": False}
SUMMARY = {"summary_use_proj": True, "summary_activation": None, "summary_proj_to_labels": True}
POOLINGS: dict[str, Literal["cls", "mean", "last"]] = {"first": "cls", "last": "last", "mean": "mean"}


def model_config(hf: Json) -> ModelConfig:
    """FlauBERT's larger networks have pre-norm layers, and no norm after the last one."""
    check_required_values(hf, KNOWN)
    if (count := hf.get("n_langs", 1)) != 1 and hf.get("use_lang_emb", True):
        message = f"n_langs is {show_value(count)}: embeddings of languages, which the request would choose"
        raise UnsupportedError(f"{message}, are not known here")
    width, heads, before = hf["emb_dim"], hf["n_heads"], bool(hf.get("pre_norm", False))
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=4 * width,
        max_positions=hf.get("max_position_embeddings", 512),
        causal=False,
        norm_order="pre" if before else "post",
        closing_norm=False,
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        embedding_norm=True,
        activation="gelu" if hf.get("gelu_activation", True) else "relu",
    )


def text_scoring(hf: Json) -> LabelScoring:
    """Scores from one state, or from the mean of all."""
    check_required_values(hf, SUMMARY)
    kind = hf.get("summary_type", "first")
    if kind not in POOLINGS:
        raise UnsupportedError(f"summary_type {show_value(kind)} is not one of {', '.join(POOLINGS)}")
    return LabelScoring(pooling=POOLINGS[kind], activation="none")


def _family(name: str, classes: str) -> Family:
    heads = {
        f"{classes}Model": HeadSpec("embed"),
        f"{classes}ForSequenceClassification": HeadSpec("classify", TEXT_HEAD, text_scoring),
        f"{classes}ForTokenClassification": TAG_HEAD,
        f"{classes}ForQuestionAnsweringSimple": SPAN_HEAD,
        f"{classes}WithLMHeadModel": HeadSpec("fill", MASK_HEAD, direct_scoring),
    }
    return Family(name, "transformer", model_config, RENAMES, heads, drop=r"^pred_layer\.|^position_ids$")


XLM = _family("xlm", "XLM")
FLAUBERT = _family("flaubert", "Flaubert")
