"""BERT, RoBERTa, XLM-R and DistilBERT: bidirectional, norm after, learned positions."""

from ..core.errors import UnsupportedError
from ..network.heads import Scoring
from ..network.model_config import ModelConfig
from .family import Family, HeadSpec, Json, activation

RENAMES = (
    (r"^embeddings\.word_embeddings\.", "tokens."),
    (r"^embeddings\.position_embeddings\.", "position.table."),
    (r"^embeddings\.token_type_embeddings\.", "segments."),
    (r"^embeddings\.LayerNorm\.", "embedding_norm."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.attention\.self\.(query|key|value)\.", r".attention.\1."),
    (r"\.attention\.output\.dense\.", ".attention.output."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up."),
    (r"(\d)\.output\.dense\.", r"\1.mlp.down."),
    (r"(\d)\.output\.LayerNorm\.", r"\1.mlp_norm."),
    (r"(embedding_norm|attention_norm|mlp_norm)\.gamma$", r"\1.weight"),
    (r"(embedding_norm|attention_norm|mlp_norm)\.beta$", r"\1.bias"),
)
DISTIL_RENAMES = (
    *RENAMES[:4],
    (r"^transformer\.layer\.", "blocks."),
    (r"\.attention\.q_lin\.", ".attention.query."),
    (r"\.attention\.k_lin\.", ".attention.key."),
    (r"\.attention\.v_lin\.", ".attention.value."),
    (r"\.attention\.out_lin\.", ".attention.output."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.output_layer_norm\.", ".mlp_norm."),
    (r"\.ffn\.lin1\.", ".mlp.up."),
    (r"\.ffn\.lin2\.", ".mlp.down."),
)
DROP = r"^(pooler|cls|lm_head|vocab_transform|vocab_layer_norm|vocab_projector)\.|position_ids$|token_type_ids$"


def config(hf: Json) -> ModelConfig:
    """BERT's configuration; `pad_token_id` shifts the positions of RoBERTa."""
    return _config(hf, position_offset=0)


def roberta_config(hf: Json) -> ModelConfig:
    return _config(hf, position_offset=int(hf.get("pad_token_id", 1)) + 1)


def _config(hf: Json, position_offset: int) -> ModelConfig:
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedError(f"position_embedding_type {hf['position_embedding_type']!r}: only absolute is known")
    if hf.get("is_decoder"):
        raise UnsupportedError("is_decoder: only the bidirectional form of this family is known")
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"] - position_offset,
        position_offset=position_offset,
        causal=False,
        norm_order="post",
        norm_eps=hf.get("layer_norm_eps", 1e-12),
        embedding_norm=True,
        activation=activation(hf.get("hidden_act", "gelu")),
        segments=hf.get("type_vocab_size", 2),
    )


def distil_config(hf: Json) -> ModelConfig:
    width, heads = hf["dim"], hf["n_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["hidden_dim"],
        max_positions=hf["max_position_embeddings"],
        causal=False,
        norm_order="post",
        norm_eps=1e-12,
        embedding_norm=True,
        activation=activation(hf.get("activation", "gelu")),
    )


POOLED = ((r"^pooler\.dense\.", "head.dense."), (r"^classifier\.", "head.out."))
ROBERTA_HEAD = ((r"^classifier\.dense\.", "head.dense."), (r"^classifier\.out_proj\.", "head.out."))
DISTIL_HEAD = ((r"^pre_classifier\.", "head.dense."), (r"^classifier\.", "head.out."))
NEXT_SENTENCE = ((r"^pooler\.dense\.", "head.dense."), (r"^cls\.seq_relationship\.", "head.out."))
TAGS = ((r"^classifier\.", "head.out."),)
SPANS = ((r"^qa_outputs\.", "head.out."),)
MASKED = (
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.(weight|gamma)$", "head.norm.weight"),
    (r"^cls\.predictions\.transform\.LayerNorm\.(bias|beta)$", "head.norm.bias"),
    (r"^cls\.predictions\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)
ROBERTA_MASKED = (
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.layer_norm\.", "head.norm."),
    (r"^lm_head\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)
DISTIL_MASKED = (
    (r"^vocab_transform\.", "head.dense."),
    (r"^vocab_layer_norm\.", "head.norm."),
    (r"^vocab_projector\.", "head.output."),
)


def _roberta_heads(name: str) -> dict[str, HeadSpec]:
    return {
        f"{name}Model": HeadSpec("embed"),
        f"{name}ForSequenceClassification": HeadSpec("classify", ROBERTA_HEAD),
        f"{name}ForTokenClassification": HeadSpec("tag", TAGS),
        f"{name}ForQuestionAnswering": HeadSpec("span", SPANS),
        f"{name}ForMaskedLM": HeadSpec("fill", ROBERTA_MASKED, activation="gelu"),
    }


BERT = Family(
    name="bert",
    prefix="bert",
    config=config,
    renames=RENAMES,
    heads={
        "BertModel": HeadSpec("embed"),
        "BertForSequenceClassification": HeadSpec("classify", POOLED),
        "BertForNextSentencePrediction": HeadSpec("classify", NEXT_SENTENCE),
        "BertForTokenClassification": HeadSpec("tag", TAGS),
        "BertForQuestionAnswering": HeadSpec("span", SPANS),
        "BertForMaskedLM": HeadSpec("fill", MASKED),
        "BertForPreTraining": HeadSpec("fill", MASKED),
    },
    drop=DROP,
)
ROBERTA = Family("roberta", "roberta", roberta_config, RENAMES, _roberta_heads("Roberta"), drop=DROP)
XLM_ROBERTA = Family("xlm-roberta", "roberta", roberta_config, RENAMES, _roberta_heads("XLMRoberta"), drop=DROP)
DISTILBERT = Family(
    name="distilbert",
    prefix="distilbert",
    config=distil_config,
    renames=DISTIL_RENAMES,
    heads={
        "DistilBertModel": HeadSpec("embed"),
        "DistilBertForSequenceClassification": HeadSpec("classify", DISTIL_HEAD, lambda _: Scoring(activation="relu")),
        "DistilBertForTokenClassification": HeadSpec("tag", TAGS),
        "DistilBertForQuestionAnswering": HeadSpec("span", SPANS),
        "DistilBertForMaskedLM": HeadSpec("fill", DISTIL_MASKED),
    },
    drop=DROP,
)
