"""SqueezeBERT: BERT whose linear layers are convolutions of one token in groups, here matrices with zeros between the
groups (Iandola et al. 2020, arXiv:2006.11316)."""

import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, Json, NamedTensors, check_required_values

MAX_GROUPS = 16  # by which a matrix is larger than in the file; published networks have 4
RENAMES = (
    (r"^encoder\.layers\.", "blocks."),
    (r"\.post_attention\.conv1d\.", ".attention.output."),
    (r"\.post_attention\.layernorm\.", ".attention_norm."),
    (r"\.intermediate\.conv1d\.", ".mlp.up."),
    (r"(\d)\.output\.conv1d\.", r"\1.mlp.down."),
    (r"(\d)\.output\.layernorm\.", r"\1.mlp_norm."),
    *bert.RENAMES,
)
GROUP_FIELDS = {
    "attention.query": "q_groups",
    "attention.key": "k_groups",
    "attention.value": "v_groups",
    "post_attention.conv1d": "post_attention_groups",
    "intermediate.conv1d": "intermediate_groups",
    "output.conv1d": "output_groups",
}
LAYER = re.compile(r"\.\d+\.(" + "|".join(map(re.escape, GROUP_FIELDS)) + r")\.weight$")


def model_config(hf: Json) -> ModelConfig:
    """Norms inside layers have one eps, whatever the configuration says."""
    same = {"layer_norm_eps": 1e-12, "embedding_size": hf["hidden_size"]}
    check_required_values({"embedding_size": 768, **hf}, same)
    return bert.model_config(hf)


def convert_weight(groups: dict[str, int], name: str, tensor: Tensor) -> NamedTensors:
    """[O, I / G, 1] weights of G groups to [O, I]."""
    found = LAYER.search(name)
    if found is None:
        return [(name, tensor)]
    blocks = tensor.view(groups[found[1]], -1, tensor.size(1))  # [G, O / G, I / G]
    places = torch.eye(len(blocks), dtype=tensor.dtype, device=tensor.device)[:, None, :, None]
    return [(name, (places * blocks[:, :, None]).flatten(2).flatten(0, 1))]


def choose_variant(family: Family, hf: Json) -> Family:
    groups = {
        layer: hf.get(field, 1 if layer == "post_attention.conv1d" else 4) for layer, field in GROUP_FIELDS.items()
    }
    for layer, count in groups.items():
        if type(count) is not int or not 0 < count <= MAX_GROUPS:
            raise UnsupportedError(f"{GROUP_FIELDS[layer]} is {show_value(count)}: 1 to {MAX_GROUPS} are known")
    return replace(family, convert=partial(convert_weight, groups))


SQUEEZEBERT = Family(
    "squeezebert",
    "transformer",
    model_config,
    RENAMES,
    bert.bert_heads("SqueezeBert"),
    drop=bert.DROP,
    variant=choose_variant,
)
