"""ALBERT: BERT with narrow embeddings and one layer that is applied repeatedly."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json

RENAMES = (
    (r"^encoder\.embedding_hidden_mapping_in\.", "projection."),
    (r"^encoder\.albert_layer_groups\.0\.albert_layers\.0\.", "blocks.0."),
    (r"\.attention\.dense\.", ".attention.output."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    (r"\.full_layer_layer_norm\.", ".mlp_norm."),
    (r"\.ffn\.", ".mlp.up."),
    (r"\.ffn_output\.", ".mlp.down."),
    *bert.RENAMES,
)
HEAD = ((r"^pooler\.", "head.dense."), (r"^classifier\.", "head.out."))


def model_config(hf: Json) -> ModelConfig:
    for count in ("num_hidden_groups", "inner_group_num"):
        if hf.get(count, 1) != 1:
            raise UnsupportedError(f"{count} {show_value(hf[count])}: only layers that are all the same are known")
    shape = bert.model_config({"hidden_act": "gelu_new", **hf})
    return replace(shape, embedding_width=hf.get("embedding_size", 128), shared=True)


ALBERT = Family(
    name="albert",
    prefix="albert",
    config=model_config,
    renames=RENAMES,
    heads={"AlbertModel": HeadSpec("embed"), "AlbertForSequenceClassification": HeadSpec("classify", HEAD)},
    drop=bert.DROP + r"|^(predictions|sop_classifier)\.",
)
