"""DeBERTa: BERT whose attention also scores vectors of distances. The first version has linear distances and
projections of its own for them; the second and third share distances by their logarithm."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json, NamedTensors, activation_name, check_required_values, read_head_count

RENAMES = (
    (r"^encoder\.rel_embeddings\.", "distances.table."),
    (r"^encoder\.LayerNorm\.", "distances.norm."),
    (r"^encoder\.conv\.conv\.", "blocks.0.convolution."),
    (r"^encoder\.conv\.LayerNorm\.", "blocks.0.convolution_norm."),
    (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.\1."),
    (r"\.attention\.self\.pos_(query|key)_proj\.", r".attention.distance_\1."),
    *bert.RENAMES,
)
MASK_HEAD = (
    (r"^lm_predictions\.lm_head\.dense\.", "head.dense."),
    (r"^lm_predictions\.lm_head\.LayerNorm\.", "head.norm."),
    (r"^lm_predictions\.lm_head\.bias$", "head.output.bias"),
)
DROP = bert.DROP + r"|^(lm_predictions|mask_predictions|embeddings\.position_embeddings)\."
REQUIRED_VALUES: dict[str, Any] = {"relative_attention": True, "position_biased_input": False}
FUSED = re.compile(r"(.*\.attention\.)self\.(in_proj\.weight|q_bias|v_bias|pos_proj\.weight|pos_q_proj\..*)")
MAX_TERMS = 8  # listed in pos_att_type, repeats included; there are three
TERMS = 3  # of a score: content-content, content-position, position-content


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the second and third version."""
    check_required_values({"relative_attention": False, "position_biased_input": True, **hf}, REQUIRED_VALUES)
    buckets, norms = hf.get("position_buckets", -1), str(hf.get("norm_rel_ebd", "none")).lower()
    if norms not in ("none", "layer_norm"):
        raise UnsupportedError(f"norm_rel_ebd {show_value(hf['norm_rel_ebd'])} is not one of none, layer_norm")
    shape = distance_config(hf)
    return replace(
        shape,
        distances=2 * (buckets if buckets > 0 else shape.farthest),
        has_log_distances=buckets > 0,
        has_distance_norm=norms == "layer_norm",
        has_distance_projections=not hf.get("share_att_key", False),
        convolution=max(hf.get("conv_kernel_size") or 0, 0),
        convolution_groups=hf.get("conv_groups", 1),
        convolution_activation=choose_convolution_activation(hf.get("conv_act", "tanh")),
    )


def first_config(hf: Json) -> ModelConfig:
    """The configuration of the first version."""
    defaults = {"relative_attention": False, "position_biased_input": True, "talking_head": False}
    check_required_values({**defaults, **hf}, {**REQUIRED_VALUES, "talking_head": False})
    shape = distance_config(hf)
    farthest = shape.farthest
    return replace(
        shape,
        distances=2 * farthest,
        has_log_distances=False,
        has_distance_norm=False,
        has_distance_projections=True,
    )


def distance_config(hf: Json) -> ModelConfig:
    """What both have in common."""
    terms = hf.get("pos_att_type") or ()
    named = terms.split("|") if isinstance(terms, str) else terms
    if len(named) > MAX_TERMS or {term.strip() for term in named} != {"c2p", "p2c"}:
        raise UnsupportedError(f"pos_att_type {show_value(terms)}: only c2p and p2c together are known")
    if hf.get("embedding_size", hf["hidden_size"]) != hf["hidden_size"]:
        raise UnsupportedError(f"embedding_size {show_value(hf['embedding_size'])}: only that of hidden_size is known")
    shape = bert.model_config({"type_vocab_size": 0, "layer_norm_eps": 1e-7, **hf})
    farthest = hf.get("max_relative_positions", -1)
    return replace(
        shape,
        position="distance",
        farthest=farthest if farthest > 0 else shape.max_positions,
        score_scale=(TERMS * shape.head_width) ** -0.5,
    )


def choose_convolution_activation(name: str) -> Any:
    return "tanh" if name == "tanh" else activation_name(name)


def split_fused(heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the matrix in which a head's query, key and value rows are side by side. Keys have no bias: theirs is 0."""
    fused = FUSED.fullmatch(name)
    if fused is None:
        return [(name, tensor)]
    own, part = fused[1], fused[2]
    match part:
        case "in_proj.weight":
            parts = tensor.view(heads, 3, -1, tensor.size(1)).unbind(1)
            names = (f"{own}{kind}.weight" for kind in ("query", "key", "value"))
            return [(kind, piece.flatten(0, 1)) for kind, piece in zip(names, parts, strict=True)]
        case "q_bias":
            return [(f"{own}query.bias", tensor), (f"{own}key.bias", torch.zeros_like(tensor))]
        case "v_bias":
            return [(f"{own}value.bias", tensor)]
        case "pos_proj.weight":
            return [(f"{own}distance_key.weight", tensor), (f"{own}distance_key.bias", tensor.new_zeros(len(tensor)))]
    return [(f"{own}distance_query.{part.rpartition('.')[2]}", tensor)]


def scoring_config(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(hf.get("pooler_hidden_act", "gelu")))


def deberta_heads(name: str) -> dict[str, HeadSpec]:
    return {
        **bert.bert_heads(name),
        f"{name}ForSequenceClassification": HeadSpec("classify", bert.BERT_HEAD, scoring_config),
        f"{name}ForMultipleChoice": HeadSpec("choose", bert.BERT_HEAD, scoring_config),
    }


def choose_variant(family: Family, hf: Json) -> Family:
    """With `legacy` false, the masked-language head has other names."""
    if hf.get("legacy", True):
        return family
    masked = {name: replace(spec, renames=MASK_HEAD) for name, spec in family.heads.items() if spec.task == "fill"}
    return replace(family, heads={**family.heads, **masked})


def choose_first_variant(family: Family, hf: Json) -> Family:
    """The first version's fused matrix is split by heads."""
    return replace(choose_variant(family, hf), convert=partial(split_fused, read_head_count(hf)))


DEBERTA = Family(
    "deberta-v2", "deberta", model_config, RENAMES, deberta_heads("DebertaV2"), drop=DROP, variant=choose_variant
)
FIRST_HEADS = {name: spec for name, spec in deberta_heads("Deberta").items() if spec.task != "choose"}
DEBERTA_FIRST = Family(
    "deberta", "deberta", first_config, RENAMES, FIRST_HEADS, drop=DROP, variant=choose_first_variant
)
