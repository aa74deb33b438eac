"""ProphetNet: BART whose decoder has a second row for each token, which predicts the token after it (Qi et al. 2020,
arXiv:2001.04063). Rows that predict later tokens are for training only and are not computed.

The reference generates by steps of one token, and those are equal. In a step of several tokens it adds the distance
biases of other rows to those of predicting ones.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json, NamedTensors, check_required_values, read_sizes

RENAMES = (
    (r"^(encoder|decoder)\.word_embeddings\.", r"head.copied.\1."),
    (r"^word_embeddings\.", "tokens."),
    (r"^decoder\.ngram_embeddings\.weight$", "head.decoder.predicting"),
    (r"^decoder\.", "head.decoder."),
    (r"^encoder\.", ""),
    (r"(^|\.)layers\.", r"\1blocks."),
    (r"(^|\.)position_embeddings\.", r"\1position.table."),
    (r"(^|\.)embeddings_layer_norm\.", r"\1embedding_norm."),
    (r"\.self_attn\.", ".attention."),
    (r"\.cross_attn\.", ".cross."),
    (r"\.(query|key|value)_proj\.", r".\1."),
    (r"\.out_proj\.", ".output."),
    (r"\.relative_pos_embeddings\.", ".distance_bias."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"\.cross_attn_layer_norm\.", ".cross_norm."),
    (r"\.feed_forward_layer_norm\.", ".mlp_norm."),
    (r"\.feed_forward\.intermediate\.", ".mlp.up."),
    (r"\.feed_forward\.output\.", ".mlp.down."),
)
# The reference counts positions from the padding token, and distances of cached tokens are right only from 0.
REQUIRED_VALUES = {"pad_token_id": 0, "add_cross_attention": True}


def stack_config(hf: Json, name: str) -> ModelConfig:
    """The configuration of one stack, as BART's; `name` is encoder or decoder."""
    sizes = {f"{name}_{what}": hf[f"num_{name}_{what}"] for what in ("layers", "attention_heads")}
    shape = bart.stack_config({**hf, **sizes, "d_model": hf["hidden_size"], "scale_embedding": False}, name)
    return replace(shape, max_positions=shape.max_positions - 1, position_offset=1)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    check_required_values(hf, REQUIRED_VALUES)
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    shape = stack_config(hf, "decoder")
    decoder = replace(
        shape,
        max_positions=shape.max_positions - 1,  # the row that predicts is one position further
        two_streams=True,
        distances=hf.get("num_buckets", 32),
        farthest=hf.get("relative_max_distance", 128),
    )
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=decoder, start=start)


def take_last_stream(streams: int, name: str, tensor: Tensor) -> NamedTensors:
    """Of the embeddings of streams, the last one is that of the first predicting stream in the reference."""
    return [(name, tensor[streams - 1 :] if name == "decoder.ngram_embeddings.weight" else tensor)]


def choose_variant(family: Family, hf: Json) -> Family:
    [streams] = read_sizes({"ngram": 2, **hf}, "ngram")
    return replace(family, convert=partial(take_last_stream, streams))


PROPHETNET = Family(
    name="prophetnet",
    prefix="prophetnet",
    config=model_config,
    renames=RENAMES,
    heads={"ProphetNetForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config)},
    variant=choose_variant,
)
