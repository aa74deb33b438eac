"""UltraBERT: EuroBERT with windows in most layers (https://huggingface.co/dmis-lab/UltraBERT-150M)."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import llama
from .family import (
    SPAN_HEAD,
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    layer_numbers,
    read_rope,
    read_windowed_layers,
)

RENAMES = ((r"^model\.", ""), *llama.RENAMES)  # the newer prefix; published files have that of the family
TEXT_HEAD = ((r"^classifier\.", "head.out."),)
MASK_HEAD = (
    (r"^head\.linear1\.", "head.dense."),
    (r"^head\.linear2\.", "head.second."),
    (r"^(head\.decoder|cls)\.", "head.output."),
)
LOCAL = "sliding_attention"


def model_config(hf: Json) -> ModelConfig:
    """A token sees `sliding_window` tokens on each side. Published configurations list the window of each layer, 0 for
    none, and its rotary base."""
    listed, bases = hf.get("attention_windows"), hf.get("rope_theta")
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    by_depth = tuple(bool((layer + 1) % 3) for layer in range(depth))
    windowed = read_windowed_layers(hf) or (tuple(map(bool, listed)) if listed else by_depth)
    radius = next((each for each in listed or () if each), hf.get("sliding_window", 128))
    if isinstance(bases, list):
        kinds = ("full_attention", LOCAL)
        found = {kinds[is_windowed]: base for base, is_windowed in zip(bases, windowed, strict=False)}
        parameters = {kind: {"rope_theta": base} for kind, base in found.items()}
        hf = {**hf, "rope_theta": None, "rope_parameters": parameters}
    base, scaling = read_rope({"rope_theta": 10_000.0 if hf.get("rope_parameters") else 2_560_000.0, **hf})
    local_base, local_scaling = read_rope({"rope_theta": 10_000.0, **hf}, LOCAL)
    if local_scaling is not None:
        raise UnsupportedError(f"rope_parameters: a scaling of {LOCAL} is not known here")
    return replace(
        llama.llama_config({**hf, "rope_parameters": None, "rope_theta": base}),
        causal=False,
        window=radius + 1,
        windowed=windowed,
        rope_base=base,
        rope_scaling=scaling,
        window_rope_base=local_base,
    )


def text_scoring(hf: Json) -> LabelScoring:
    pooling = hf.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedError(f"classifier_pooling {show_value(pooling)} is not one of cls, mean")
    return LabelScoring(pooling=pooling, activation="none")


def mask_scoring(hf: Json) -> LabelScoring:
    """Two dense layers before the output matrix, none of which has a bias."""
    width = hf.get("prediction_head_size", 768)
    return LabelScoring(activation="gelu_tanh", dense_bias=False, bias=False, width=width, returns=True)


ULTRABERT = Family(
    name="ultrabert",
    prefix="ultrabert",
    config=model_config,
    renames=RENAMES,
    heads={
        "UltrabertModel": HeadSpec("embed"),
        "UltrabertForSequenceClassification": HeadSpec("classify", TEXT_HEAD, text_scoring),
        "UltrabertForTokenClassification": TAG_HEAD,
        "UltrabertForQuestionAnswering": SPAN_HEAD,
        "UltrabertForMaskedLM": HeadSpec("fill", MASK_HEAD, mask_scoring),
    },
    drop=r"^(head|cls)\.|rotary_emb\.",
    rope_by_layer=True,
)
