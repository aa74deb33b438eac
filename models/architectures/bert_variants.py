"""Encoders that differ from BERT or RoBERTa in few points: Data2Vec (text), ERNIE, Megatron-BERT, RemBERT and RoBERTa
with pre-norm layers."""

from dataclasses import replace
from functools import partial

from ..core.errors import UnsupportedError
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json, activation_name

MEGATRON_RENAMES = (
    (r"^encoder\.ln\.", "final_norm."),
    (r"\.attention\.ln\.", ".attention_norm."),
    (r"(\d)\.ln\.", r"\1.mlp_norm."),
    *bert.RENAMES,
)
REMBERT_RENAMES = ((r"^encoder\.embedding_hidden_mapping_in\.", "projection."), *bert.RENAMES)
PRE_NORM_RENAMES = (
    (r"^LayerNorm\.", "final_norm."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.LayerNorm\.", ".mlp_norm."),
    *bert.RENAMES,
)


REMBERT_MASK_HEAD = (
    (r"^cls\.predictions\.dense\.", "head.dense."),
    (r"^cls\.predictions\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.decoder\.", "head.output."),
)


def ernie_config(hf: Json) -> ModelConfig:
    if hf.get("use_task_id"):
        raise UnsupportedError("use_task_id true: embeddings of a task are not known here")
    return bert.model_config(hf)


def megatron_config(hf: Json) -> ModelConfig:
    return replace(bert.model_config(hf), norm_order="pre", embedding_norm=False)


def rembert_config(hf: Json) -> ModelConfig:
    width = hf.get("input_embedding_size", 256)
    return replace(bert.model_config(hf), embedding_width=0 if width == hf["hidden_size"] else width)


def rembert_mask_scoring(hf: Json) -> LabelScoring:
    width = hf.get("output_embedding_size", 1664)
    return LabelScoring(activation=activation_name(hf.get("hidden_act", "gelu")), norm=True, width=width)


def pre_norm_config(hf: Json) -> ModelConfig:
    return replace(bert.roberta_config(hf), norm_order="pre")


def causal_head(name: str) -> dict[str, HeadSpec]:
    return {f"{name}ForCausalLM": HeadSpec("generate", bert.MASK_HEAD)}


DATA2VEC = bert.roberta_family("data2vec-text", "data2vec_text", "Data2VecText")
ERNIE_BERT = Family(
    name="ernie",
    prefix="ernie",
    config=partial(bert.read_decoder_config, ernie_config, ""),
    renames=bert.RENAMES,
    heads=bert.bert_heads("Ernie") | bert.pair_heads("Ernie") | causal_head("Ernie"),
    drop=bert.DROP,
)
MEGATRON_BERT = Family(
    name="megatron-bert",
    prefix="bert",
    config=partial(bert.read_decoder_config, megatron_config, ""),
    renames=MEGATRON_RENAMES,
    heads=bert.bert_heads("MegatronBert") | bert.pair_heads("MegatronBert") | causal_head("MegatronBert"),
    drop=bert.DROP,
)
REMBERT = Family(
    name="rembert",
    prefix="rembert",
    config=rembert_config,
    renames=REMBERT_RENAMES,
    heads={
        **bert.bert_heads("RemBert"),
        "RemBertForMaskedLM": HeadSpec("fill", REMBERT_MASK_HEAD, rembert_mask_scoring),
    },
    drop=bert.DROP,
)
PRE_NORM_ROBERTA = replace(
    bert.roberta_family("roberta-prelayernorm", "roberta_prelayernorm", "RobertaPreLayerNorm"),
    config=partial(bert.read_decoder_config, pre_norm_config, "gelu"),
    renames=PRE_NORM_RENAMES,
)
