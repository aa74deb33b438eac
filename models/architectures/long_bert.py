"""Encoders for long texts: Longformer, whose tokens see a window around them and, below some heads, global tokens;
BigBird as far as its attention is full; and XLM-R-XL, the pre-norm form of XLM-R."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, NamedTensors, activation_name

BLOCKS: dict[str, Any] = {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3}  # of BigBird

XL_RENAMES = (
    (r"\.attention\.self_attn_layer_norm\.", ".attention_norm."),
    (r"^encoder\.LayerNorm\.", "final_norm."),
    (r"^(encoder\.layer\.\d+)\.LayerNorm\.", r"\1.mlp_norm."),
    *bert.RENAMES,
)
POOLED = ((r"^pooler\.", "head.dense."), (r"^classifier\.", "head.out."))
# The second projections of Longformer, which only heads with global tokens read. Of a pair transformers demands exactly
# three separators and uses the first; here a pair with another number of them is read too.
GLOBAL = ((r"\.attention\.self\.(query|key|value)_global\.", r".attention.global_\1."),)
BIG_BIRD_SPAN_HEAD = (
    (r"^qa_classifier\.intermediate\.dense\.", "head.dense."),
    (r"^qa_classifier\.output\.dense\.", "head.second."),
    (r"^qa_classifier\.output\.LayerNorm\.", "head.norm."),
    (r"^qa_classifier\.qa_outputs\.", "head.out."),
)


def xl_config(hf: Json) -> ModelConfig:
    hf = {"layer_norm_eps": 1e-5, "type_vocab_size": 1, **hf}
    return replace(bert.roberta_config(hf), norm_order="pre", embedding_norm=False)


def longformer_config(hf: Json) -> ModelConfig:
    """A token sees half of `attention_window` on each side."""
    given = hf.get("attention_window", 512)
    windows = set(given) if isinstance(given, list) else {given}
    if len(windows) != 1 or any(type(each) is not int or each < 2 or each % 2 for each in windows):
        raise UnsupportedError(f"attention_window {show_value(given)}: only one even window for all layers is known")
    separator = hf.get("sep_token_id", 2)
    if type(separator) is not int or not 0 <= separator < hf["vocab_size"]:
        raise UnsupportedError(f"sep_token_id is {show_value(separator)}, which should be the number of a token")
    return replace(bert.roberta_config(hf), window=windows.pop() // 2 + 1, separator=separator)


def big_bird_config(hf: Json) -> ModelConfig:
    """With sparse attention, only the texts that are short enough for full attention are read."""
    shape = bert.model_config({"hidden_act": "gelu_new", "max_position_embeddings": 4096, **hf})
    scale = hf["hidden_size"] ** 0.5 if hf.get("rescale_embeddings") else 1.0
    most = min(shape.max_positions, full_attention_length(hf))
    return replace(shape, max_positions=most, embedding_scale=scale, qkv_bias=bool(hf.get("use_bias", True)))


def full_attention_length(hf: Json) -> int:
    """The longest text, in tokens, whose attention is full."""
    kind, block, count = (hf.get(key, value) for key, value in BLOCKS.items())
    if kind not in ("block_sparse", "original_full"):
        raise UnsupportedError(f"attention_type {show_value(kind)} is not one of block_sparse, original_full")
    if type(block) is not int or type(count) is not int or min(block, count + 1) < 1:
        raise UnsupportedError(
            f"block_size {show_value(block)} and num_random_blocks {show_value(count)} are no numbers"
        )
    return int(hf.get("max_position_embeddings", 4096)) if kind == "original_full" else (5 + 2 * count) * block


def cut_positions(most: int, name: str, tensor: Tensor) -> NamedTensors:
    return [(name, tensor[:most] if name == "embeddings.position_embeddings.weight" else tensor)]


def choose_big_bird_variant(family: Family, hf: Json) -> Family:
    """Vectors of positions that no text has are not read."""
    return replace(family, convert=partial(cut_positions, full_attention_length(hf)))


def big_bird_scoring(hf: Json) -> LabelScoring:
    return LabelScoring(activation=activation_name(hf.get("hidden_act", "gelu_new")))


def big_bird_span_scoring(hf: Json) -> LabelScoring:
    """An MLP as those of the layers, with a norm after its sum with the state. transformers lowers the scores of the
    question, which no answer is read from."""
    activation, width = activation_name(hf.get("hidden_act", "gelu_new")), int(hf["intermediate_size"])
    return LabelScoring(activation=activation, norm=True, width=width, returns=True, adds=True)


def big_bird_decoder_config(hf: Json) -> ModelConfig:
    return bert.read_decoder_config(big_bird_config, "", {"hidden_act": "gelu_new", **hf})


def big_bird_mask_scoring(hf: Json) -> LabelScoring:
    return bert.mask_scoring({"hidden_act": "gelu_new", **hf})


XLM_ROBERTA_XL = replace(
    bert.roberta_family("xlm-roberta-xl", "roberta", "XLMRobertaXL"),
    config=partial(bert.read_decoder_config, xl_config, "gelu"),
    renames=XL_RENAMES,
)
LONGFORMER = Family(
    "longformer",
    "longformer",
    longformer_config,
    bert.RENAMES,
    {
        "LongformerModel": HeadSpec("embed"),
        "LongformerForSequenceClassification": HeadSpec(
            "classify", (*bert.ROBERTA_HEAD, *GLOBAL), global_tokens="first"
        ),
        "LongformerForMultipleChoice": HeadSpec("choose", (*bert.BERT_HEAD, *GLOBAL), global_tokens="after_separator"),
        "LongformerForTokenClassification": TAG_HEAD,
        "LongformerForQuestionAnswering": replace(
            SPAN_HEAD, renames=(*SPAN_HEAD.renames, *GLOBAL), global_tokens="before_separator"
        ),
        "LongformerForMaskedLM": HeadSpec("fill", bert.ROBERTA_MASK_HEAD, bert.gelu_mask_scoring),
    },
    drop=bert.DROP + r"|\.(query|key|value)_global\.",
)
BIG_BIRD = Family(
    "big_bird",
    "bert",
    big_bird_decoder_config,
    bert.RENAMES,
    {
        "BigBirdModel": HeadSpec("embed"),
        "BigBirdForSequenceClassification": HeadSpec("classify", bert.ROBERTA_HEAD, big_bird_scoring),
        "BigBirdForMultipleChoice": HeadSpec("choose", POOLED),
        "BigBirdForTokenClassification": TAG_HEAD,
        "BigBirdForQuestionAnswering": HeadSpec("span", BIG_BIRD_SPAN_HEAD, big_bird_span_scoring),
        "BigBirdForMaskedLM": HeadSpec("fill", bert.MASK_HEAD, big_bird_mask_scoring),
        "BigBirdForPreTraining": HeadSpec("fill", bert.MASK_HEAD, big_bird_mask_scoring),
        "BigBirdForCausalLM": HeadSpec("generate", bert.MASK_HEAD),
    },
    drop=bert.DROP,
    variant=choose_big_bird_variant,
)
