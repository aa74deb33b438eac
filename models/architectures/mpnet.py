"""MPNet: RoBERTa without segments, with a distance bias that all layers share."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, Json

KINDS = 32  # distance buckets; the reference uses as many whatever the table's size is
RENAMES = (
    (r"^encoder\.relative_attention_bias\.", "distances.table."),
    (r"\.attention\.attn\.q\.", ".attention.query."),
    (r"\.attention\.attn\.k\.", ".attention.key."),
    (r"\.attention\.attn\.v\.", ".attention.value."),
    (r"\.attention\.attn\.o\.", ".attention.output."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    *bert.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    """Positions start at 2, whatever the padding token's id is."""
    kinds = hf.get("relative_attention_num_buckets", KINDS)
    if kinds != KINDS:
        raise UnsupportedError(f"relative_attention_num_buckets {show_value(kinds)}: only {KINDS} are known")
    return replace(bert.roberta_config({**hf, "pad_token_id": 1, "type_vocab_size": 0}), distances=kinds)


MPNET = Family(
    name="mpnet",
    prefix="mpnet",
    config=model_config,
    renames=RENAMES,
    heads=bert.roberta_heads("MPNet"),
    drop=bert.DROP,
)
