"""Switch Transformers: T5 with experts in some layers, of which a token uses one (Fedus et al. 2021,
arXiv:2101.03961)."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import EncoderDecoderConfig, ExpertConfig, ModelConfig
from . import t5
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json, layer_numbers

RENAMES = (
    (r"\.layer\.[12]\.mlp\.router\.classifier\.", ".mlp.router."),
    (r"\.layer\.[12]\.mlp\.experts\.expert_(\d+)\.wi\.", r".mlp.experts.\1.up."),
    (r"\.layer\.[12]\.mlp\.experts\.expert_(\d+)\.wo\.", r".mlp.experts.\1.down."),
    (r"\.layer\.[12]\.mlp\.", ".mlp."),
    *t5.RENAMES,
)


def read_stack(hf: Json, name: str, depth: int) -> ModelConfig:
    """One stack; every n-th layer has experts, from the second one on. An expert computes `expert_capacity` tokens of a
    text, and the reference leaves out further ones: no longer text is read."""
    capacity = hf.get("expert_capacity", 64)
    if type(capacity) is not int or capacity < 1:
        raise UnsupportedError(f"expert_capacity is {show_value(capacity)}, which should be a whole number from 1 on")
    count = hf.get(f"num_sparse_{name}_layers", 3)
    every = depth // count if count > 0 else depth
    layers = tuple(every == 1 or (every > 0 and layer % every == 1) for layer in layer_numbers(depth))
    activation = hf.get("dense_act_fn", "relu")
    shape = t5.model_config({**hf, "num_layers": depth, "feed_forward_proj": activation, "is_gated_act": None})
    mixture = ExpertConfig(
        count=hf.get("num_experts", 8),
        chosen=1,
        width=hf["d_ff"],
        layers=layers,
        normalised=False,
        router_bias=bool(hf.get("router_bias", False)),
    )
    return replace(shape, max_positions=min(shape.max_positions, capacity), experts=mixture if any(layers) else None)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return read_stack(hf, "encoder", hf["num_layers"])


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    """States are scaled if the output matrix is that of the embeddings. The decoder gets a token a step, which no
    expert leaves out."""
    encoder = model_config(hf)
    decoder = read_stack(hf, "decoder", hf.get("num_decoder_layers") or hf["num_layers"])
    return EncoderDecoderConfig(
        encoder=encoder,
        decoder=replace(decoder, causal=True, max_positions=t5.MAX_OUTPUT_POSITIONS),
        start=start,
        output_scale=encoder.width**-0.5 if hf.get("tie_word_embeddings") is not False else 1.0,
    )


SWITCH = Family(
    name="switch_transformers",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "SwitchTransformersForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config),
        "SwitchTransformersEncoderModel": HeadSpec("embed"),
    },
    drop=t5.DROP,
)
