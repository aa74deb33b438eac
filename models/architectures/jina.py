"""Jina's encoders. The second embeddings are a BERT with linear biases by distance (ALiBi) and a gated MLP; the third
an XLM-R with rotary positions, whose published code is also used with learned positions."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import bert, rotary_bert
from .family import Family, HeadSpec, Json, NamedTensors, activation_name, check_required_values

BASE = 20_000.0  # of rotary positions of the third embeddings
GATES = {"geglu": "gelu", "reglu": "relu"}
RENAMES = (
    (r"\.mlp\.wo\.", ".mlp.down."),
    (r"\.mlp\.layernorm\.", ".mlp_norm."),
    *bert.RENAMES,
)


def convert_weight(name: str, tensor: Any) -> NamedTensors:
    """Split the gate from the MLP's other matrix; neither has a bias in the file, the last matrix has one."""
    if ".mlp.gated_layers." not in name:
        return [(name, tensor)]
    kinds = zip(("gate", "up"), tensor.chunk(2), strict=True)
    pieces = [(name.replace("gated_layers", kind), piece) for kind, piece in kinds]
    return pieces + [(ours.removesuffix("weight") + "bias", piece.new_zeros(len(piece))) for ours, piece in pieces]


def alibi_config(hf: Json) -> ModelConfig:
    gate = hf.get("feed_forward_type", "original")
    check_required_values({"feed_forward_type": gate}, {"feed_forward_type": "reglu" if gate == "reglu" else "geglu"})
    shape = bert.model_config({**hf, "position_embedding_type": "absolute"})
    return replace(shape, position="alibi", gated_mlp=True, activation=activation_name(GATES[gate]))


def flash_config(hf: Json) -> ModelConfig:
    """The published code of the third embeddings, with rotary or learned positions."""
    if hf.get("position_embedding_type") != "rotary":
        return bert.roberta_config(hf)
    return rotary_config({"rope_theta": hf.get("rotary_emb_base", BASE), **hf})


def rotary_config(hf: Json) -> ModelConfig:
    return rotary_bert.model_config({"layer_norm_eps": 1e-5, "type_vocab_size": 1, **hf}, BASE)


JINA_BERT = Family(
    "bert",
    "bert",
    alibi_config,
    RENAMES,
    {**bert.bert_heads("JinaBert"), **bert.bert_heads("Bert")},
    convert=convert_weight,
    drop=bert.DROP,
)
JINA_EMBEDDINGS_V3 = Family(
    "jina_embeddings_v3",
    "roberta",
    rotary_config,
    rotary_bert.RENAMES,
    {name: spec for name, spec in bert.roberta_heads("JinaEmbeddingsV3").items() if spec.task != "choose"},
    convert=rotary_bert.convert_weight,
    drop=rotary_bert.DROP,
)
FLASH = replace(
    JINA_EMBEDDINGS_V3,
    name="xlm-roberta",
    config=flash_config,
    heads={**bert.roberta_heads("XLMRoberta"), "XLMRobertaLoRA": HeadSpec("embed")},
)


def choose_bert_variant(family: Family, hf: Json) -> Family:
    """A BERT with `alibi` is one of Jina's."""
    if hf.get("position_embedding_type") != "alibi":
        return family
    if "qk-post-norm" in f"{hf.get('_name_or_path')} {hf.get('auto_map')}":
        raise UnsupportedError("the variant qk-post-norm, which norms queries, keys and sums twice, is not known")
    return JINA_BERT


def choose_roberta_variant(family: Family, hf: Json) -> Family:
    """An XLM-R of the published code of Jina, which has other names of weights."""
    return FLASH if "use_flash_attn" in hf or hf.get("position_embedding_type") == "rotary" else family


BERT = replace(bert.BERT, variant=choose_bert_variant)
XLM_ROBERTA = replace(bert.XLM_ROBERTA, variant=choose_roberta_variant)
