"""What a family's module defines: how its configuration is read and how its weights are named."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import EncoderDecoderConfig, ModelConfig, RopeScaling

Json = Mapping[str, Any]
Renames = tuple[tuple[str, str], ...]  # pattern -> replacement, applied in order
NamedTensors = list[tuple[str, Tensor]]

MAX_LAYERS = 1024  # the deepest published networks have about a hundred; each layer takes 40 KB when it is built
MAX_SHARED_LAYERS = 48  # layers with one set of tensors, which take time and no bytes; published networks have 24
MAX_HEAD_WIDTH = 1 << 14  # features of a head with rotary positions; published heads have 512 at most
ACTIVATION_NAMES: dict[str, Literal["gelu", "gelu_tanh", "silu", "relu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


COPIED_EMBEDDINGS: Renames = ((r"^(encoder|decoder)\.embed_tokens\.", r"head.copied.\1."),)  # of the tokens' embeddings
SEQ2SEQ_HEAD: Renames = ((r"^lm_head\.", "head.output."), (r"^final_logits_bias$", "head.bias"))


def no_decoder(_: Json, start: int) -> EncoderDecoderConfig:
    """Raises UnsupportedError; the default of heads without a decoder."""
    raise UnsupportedError(f"this head has no decoder for start token {start}")


@dataclass(frozen=True)
class HeadSpec:
    """One `architectures` entry of a family: its task and the names of its weights (our names begin with "head.").

    `scoring` reads from a configuration how label scores are computed. `activation` is the one inside a masked-language
    head; empty: that of the network. `decoder` reads the decoder's configuration of an encoder-decoder; its second
    argument is the start token.
    """

    task: Literal["generate", "classify", "embed", "tag", "span", "fill", "translate"]
    renames: Renames = ()
    scoring: Callable[[Json], LabelScoring] = field(default=lambda _: LabelScoring())
    activation: Literal["", "gelu"] = ""
    decoder: Callable[[Json, int], EncoderDecoderConfig] = field(default=no_decoder)


LAST_TOKEN_HEAD = HeadSpec(
    "classify", ((r"^score\.", "head.out."),), lambda _: LabelScoring(pooling="last", activation="none", bias=False)
)  # of causal networks: only the last token sees all others


def keep_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Keep a weight as it is."""
    return [(name, tensor)]


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` are read. `prefix` is the base model's name in front of the weights' names.
    `drop` matches names of weights that are not used."""

    name: str
    prefix: str
    config: Callable[[Json], ModelConfig]
    renames: Renames
    heads: Mapping[str, HeadSpec]
    convert: Callable[[str, Tensor], NamedTensors] = field(default=keep_weight)
    drop: str = r"$^"


def rename_weight(family: Family, head_renames: Renames, name: str, tensor: Tensor) -> NamedTensors:
    """The checkpoint's weight under our names: an empty list if it is not used, several if it is fused."""
    name = name.removeprefix(family.prefix + ".")
    if re.search(family.drop, name) and not any(re.search(pattern, name) for pattern, _ in head_renames):
        return []
    pieces = family.convert(name, tensor)
    return [(_apply_renames(piece, (*head_renames, *family.renames)), value) for piece, value in pieces]


def _apply_renames(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, ours in renames:
        name = re.sub(pattern, ours, name)
    return name


def activation_name(name: str) -> Literal["gelu", "gelu_tanh", "silu", "relu"]:
    """Our name of an activation function. Raises UnsupportedError if it is not supported."""
    if name not in ACTIVATION_NAMES:
        raise UnsupportedError(f"activation {show_value(name)} is not one of {', '.join(sorted(ACTIVATION_NAMES))}")
    return ACTIVATION_NAMES[name]


def read_rope(hf: Json, layer_type: str = "full_attention") -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling from an old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) configuration."""
    parameters: Json = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    parameters = parameters.get(layer_type, parameters)
    base = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
    match parameters.get("rope_type", parameters.get("type", "default")):
        case "default":
            return base, None
        case "linear":
            return base, RopeScaling(kind="linear", factor=float(parameters["factor"]))
        case "llama3":
            return base, RopeScaling(
                kind="llama3",
                factor=float(parameters["factor"]),
                low_frequency_factor=float(parameters["low_freq_factor"]),
                high_frequency_factor=float(parameters["high_freq_factor"]),
                original_positions=int(parameters["original_max_position_embeddings"]),
            )
        case other:
            raise UnsupportedError(f"rope scaling {show_value(other)} is not one of default, linear, llama3")


def layer_numbers(depth: int) -> range:
    """The numbers of the layers. Raises UnsupportedError for more than MAX_LAYERS."""
    if depth > MAX_LAYERS:
        raise UnsupportedError(f"it describes {depth} layers; networks of {MAX_LAYERS} at most are known here")
    return range(depth)


def read_windowed_layers(hf: Json) -> tuple[bool, ...]:
    """Which layers use a sliding window, from `layer_types`; empty if the configuration has no such field."""
    return tuple(kind == "sliding_attention" for kind in hf.get("layer_types") or ())
