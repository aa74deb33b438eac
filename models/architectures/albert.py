"""ALBERT: BERT with narrow embeddings and one layer that is applied repeatedly."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
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
MASK_HEAD = (
    (r"^predictions\.dense\.", "head.dense."),
    (r"^predictions\.LayerNorm\.", "head.norm."),
    (r"^predictions\.(decoder\.)?(weight|bias)$", r"head.output.\2"),
)
ACTIVATION = "gelu_new"  # the default of this family


def model_config(hf: Json) -> ModelConfig:
    for count in ("num_hidden_groups", "inner_group_num"):
        if hf.get(count, 1) != 1:
            raise UnsupportedError(f"{count} {show_value(hf[count])}: only layers that are all the same are known")
    shape = bert.model_config({"hidden_act": ACTIVATION, **hf})
    return replace(shape, embedding_width=hf.get("embedding_size", 128), shared=True)


def mask_scoring(hf: Json) -> LabelScoring:
    return replace(bert.mask_scoring({"hidden_act": ACTIVATION, **hf}), width=hf.get("embedding_size", 128))


ALBERT = Family(
    name="albert",
    prefix="albert",
    config=model_config,
    renames=RENAMES,
    heads={
        **bert.bert_heads("Albert"),
        "AlbertForSequenceClassification": HeadSpec("classify", HEAD),
        "AlbertForMultipleChoice": HeadSpec("choose", HEAD),
        "AlbertForMaskedLM": HeadSpec("fill", MASK_HEAD, mask_scoring),
        "AlbertForPreTraining": HeadSpec("fill", MASK_HEAD, mask_scoring),
    },
    drop=bert.DROP + r"|^(predictions|sop_classifier)\.",
)
