"""BERT, RoBERTa, XLM-R, CamemBERT and DistilBERT: bidirectional, post-norm, learned positions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from .family import SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, activation_name

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


def model_config(hf: Json) -> ModelConfig:
    """BERT's configuration. RoBERTa's positions are shifted by `pad_token_id`; see `roberta_config`."""
    return _bert_config(hf, position_offset=0)


def roberta_config(hf: Json) -> ModelConfig:
    return _bert_config(hf, position_offset=int(hf.get("pad_token_id", 1)) + 1)


def _bert_config(hf: Json, position_offset: int) -> ModelConfig:
    if hf.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedError(
            f"position_embedding_type {show_value(hf['position_embedding_type'])}: only absolute is known"
        )
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
        activation=activation_name(hf.get("hidden_act", "gelu")),
        segments=hf.get("type_vocab_size", 2),
    )


def read_decoder_config(read: Callable[[Json], ModelConfig], activation: str, hf: Json) -> ModelConfig:
    """As `read`, for families whose causal form is known. `activation` is that of the language head; empty: that of the
    network."""
    if not hf.get("is_decoder"):
        return read(hf)
    if hf.get("add_cross_attention"):
        raise UnsupportedError("add_cross_attention is not known here")
    return replace(
        read({**hf, "is_decoder": False}),
        causal=True,
        logit_dense=activation_name(activation or hf.get("hidden_act", "gelu")),
        logit_dense_bias=True,
        logit_bias=True,
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
        activation=activation_name(hf.get("activation", "gelu")),
    )


BERT_HEAD = ((r"^pooler\.dense\.", "head.dense."), (r"^classifier\.", "head.out."))
ROBERTA_HEAD = ((r"^classifier\.dense\.", "head.dense."), (r"^classifier\.out_proj\.", "head.out."))
DISTIL_HEAD = ((r"^pre_classifier\.", "head.dense."), (r"^classifier\.", "head.out."))
NEXT_SENTENCE = ((r"^pooler\.dense\.", "head.dense."), (r"^cls\.seq_relationship\.", "head.out."))
MASK_HEAD = (
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.(weight|gamma)$", "head.norm.weight"),
    (r"^cls\.predictions\.transform\.LayerNorm\.(bias|beta)$", "head.norm.bias"),
    (r"^cls\.predictions\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)
ROBERTA_MASK_HEAD = (
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.layer_norm\.", "head.norm."),
    (r"^lm_head\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)
DISTIL_MASK_HEAD = (
    (r"^vocab_transform\.", "head.dense."),
    (r"^vocab_layer_norm\.", "head.norm."),
    (r"^vocab_projector\.", "head.output."),
)


def mask_scoring(hf: Json) -> LabelScoring:
    """A dense layer with the network's activation, and a norm, before the output matrix."""
    return LabelScoring(activation=activation_name(hf.get("hidden_act", "gelu")), norm=True)


def gelu_mask_scoring(_: Json) -> LabelScoring:
    return LabelScoring(activation="gelu", norm=True)


def distil_scoring(_: Json) -> LabelScoring:
    return LabelScoring(activation="relu")


def distil_mask_scoring(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(hf.get("activation", "gelu")), norm=True)


def bert_heads(name: str) -> dict[str, HeadSpec]:
    """The heads with the weight names of BERT; `name` is the prefix of the class names."""
    return {
        f"{name}Model": HeadSpec("embed"),
        f"{name}ForSequenceClassification": HeadSpec("classify", BERT_HEAD),
        f"{name}ForMultipleChoice": HeadSpec("choose", BERT_HEAD),
        f"{name}ForTokenClassification": TAG_HEAD,
        f"{name}ForQuestionAnswering": SPAN_HEAD,
        f"{name}ForMaskedLM": HeadSpec("fill", MASK_HEAD, mask_scoring),
    }


def pair_heads(name: str) -> dict[str, HeadSpec]:
    """The heads that BERT was pretrained with: whether a text follows another, and words for masks, alone or both."""
    return {
        f"{name}ForNextSentencePrediction": HeadSpec("classify", NEXT_SENTENCE),
        f"{name}ForPreTraining": HeadSpec("fill", MASK_HEAD, mask_scoring),
    }


def roberta_heads(name: str) -> dict[str, HeadSpec]:
    """The heads with the weight names of RoBERTa."""
    return {
        **bert_heads(name),
        f"{name}ForSequenceClassification": HeadSpec("classify", ROBERTA_HEAD),
        f"{name}ForMaskedLM": HeadSpec("fill", ROBERTA_MASK_HEAD, gelu_mask_scoring),
    }


def roberta_family(name: str, prefix: str, classes: str) -> Family:
    heads = roberta_heads(classes) | {f"{classes}ForCausalLM": HeadSpec("generate", ROBERTA_MASK_HEAD)}
    return Family(name, prefix, partial(read_decoder_config, roberta_config, "gelu"), RENAMES, heads, drop=DROP)


BERT = Family(
    name="bert",
    prefix="bert",
    config=partial(read_decoder_config, model_config, ""),
    renames=RENAMES,
    heads={
        **bert_heads("Bert"),
        **pair_heads("Bert"),
        "BertLMHeadModel": HeadSpec("generate", MASK_HEAD),
    },
    drop=DROP,
)
ROBERTA = roberta_family("roberta", "roberta", "Roberta")
XLM_ROBERTA = roberta_family("xlm-roberta", "roberta", "XLMRoberta")
CAMEMBERT = roberta_family("camembert", "roberta", "Camembert")
DISTILBERT = Family(
    name="distilbert",
    prefix="distilbert",
    config=distil_config,
    renames=DISTIL_RENAMES,
    heads={
        "DistilBertModel": HeadSpec("embed"),
        "DistilBertForSequenceClassification": HeadSpec("classify", DISTIL_HEAD, distil_scoring),
        "DistilBertForMultipleChoice": HeadSpec("choose", DISTIL_HEAD, distil_scoring),
        "DistilBertForTokenClassification": TAG_HEAD,
        "DistilBertForQuestionAnswering": SPAN_HEAD,
        "DistilBertForMaskedLM": HeadSpec("fill", DISTIL_MASK_HEAD, distil_mask_scoring),
    },
    drop=DROP,
)
