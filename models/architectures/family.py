"""What a family's module defines: how its configuration is read and how its weights are named."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import EncoderDecoderConfig, GlobalTokens, MixerName, ModelConfig, RopeScaling

Json = Mapping[str, Any]
Renames = tuple[tuple[str, str], ...]  # pattern -> replacement, applied in order
NamedTensors = list[tuple[str, Tensor]]

MAX_LAYERS = 1024  # the deepest published networks have about a hundred; each layer takes 40 KB when it is built
MAX_SHARED_LAYERS = 48  # layers with one set of tensors, which take time and no bytes; published networks have 24
ORIGINAL = "original_max_position_embeddings"
SCALED_CONTEXTS = ("llama3", "yarn", "longrope")  # rotations that depend on it
MAX_SIZE = 1 << 24  # of a width or a number of heads by which a weight is split
MAX_HEAD_WIDTH = 1 << 14  # features of a head with rotary positions; published heads have 512 at most
ActivationName = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu", "relu_squared"]  # without parameters
ACTIVATION_NAMES: dict[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu_squared",
}


COPIED_EMBEDDINGS: Renames = ((r"^(encoder|decoder)\.embed_tokens\.", r"head.copied.\1."),)  # of the tokens' embeddings
SEQ2SEQ_HEAD: Renames = ((r"^lm_head\.", "head.output."), (r"^final_logits_bias$", "head.bias"))


def no_decoder(_: Json, start: int) -> EncoderDecoderConfig:
    """Raises UnsupportedError; the default of heads without a decoder."""
    raise UnsupportedError(f"this head has no decoder for start token {start}")


@dataclass(frozen=True)
class HeadSpec:
    """One `architectures` entry of a family: its task and the names of its weights (our names begin with "head.").

    `scoring` reads from a configuration how scores are computed: of a text, of a token, or of the words for a mask.
    `global_tokens`: which tokens see all others in the network that this head reads; see ModelConfig. Its second
    projections are among `renames` then.
    `decoder` reads the decoder's configuration of an encoder-decoder; its second argument is the start token. With
    `reads_decoder` a head other than one that translates reads the decoder's states.
    """

    task: Literal[
        "generate", "classify", "choose", "embed", "score", "token_vectors", "tag", "span", "fill", "translate"
    ]
    renames: Renames = ()
    scoring: Callable[[Json], LabelScoring] = field(default=lambda _: LabelScoring())
    global_tokens: GlobalTokens = ""
    decoder: Callable[[Json, int], EncoderDecoderConfig] = field(default=no_decoder)
    reads_decoder: bool = False


def direct_scoring(_: Json) -> LabelScoring:
    """Scores from states, without a layer before them."""
    return LabelScoring(activation="none")


def last_token_scoring(_: Json) -> LabelScoring:
    """Scores of the last token, the end of the text, through a dense layer."""
    return LabelScoring(pooling="last")


# `pad_token_id` where a configuration has none, by `model_type`; of all other types there is none then.
PADDING = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "cohere_compass_text"), 0),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), 0),
    **dict.fromkeys(("biogpt", "olmo", "olmo2", "olmo3", "opt", "seed_oss"), 1),
    **dict.fromkeys(("ministral3", "mistral4"), 11),
    **dict.fromkeys(("glm", "glm4"), 151_329),
    "helium": 3,
    "modernbert-decoder": 50_283,
    "phi3": 32_000,
    "smollm3": 128_004,
}


def read_padding(hf: Json) -> int | None:
    """The padding token of a causal network. A text's last token is the last one that is not this: transformers finds
    it by its number, so one that belongs to the text counts as padding too. UnsupportedError if it is no number."""
    fields: Json = hf.get("text_config") or hf
    found = fields.get("pad_token_id", PADDING.get(fields.get("model_type", hf.get("model_type", ""))))
    if found is not None and type(found) is not int:
        raise UnsupportedError(f"pad_token_id is {show_value(found)}, which should be the number of a token")
    return found


def score_last_token(hf: Json) -> LabelScoring:
    """Scores of the last token that is not padding, without a layer before them."""
    return LabelScoring(pooling="last", activation="none", bias=False, padding=read_padding(hf))


CLASSIFICATION_HEAD = (
    (r"^classification_head\.dense\.", "head.dense."),
    (r"^classification_head\.out_proj\.", "head.out."),
)
SCORE = ((r"^score\.", "head.out."),)
TAG_HEAD = HeadSpec("tag", ((r"^classifier\.", "head.out."),), direct_scoring)
SPAN_HEAD = HeadSpec("span", ((r"^qa_outputs\.", "head.out."),), direct_scoring)
LAST_TOKEN_HEAD = HeadSpec("classify", SCORE, score_last_token)  # only the last token sees all others
SCORE_TAG_HEAD = HeadSpec(
    "tag", SCORE, lambda hf: LabelScoring(activation="none", bias=bool(hf.get("token_classification_bias", True)))
)
CAUSAL_SPAN_HEAD = HeadSpec("span", ((r"^transformer\.", ""), *SPAN_HEAD.renames), direct_scoring)


CAUSAL_HEADS: Mapping[str, HeadSpec] = {
    "ForSequenceClassification": LAST_TOKEN_HEAD,
    "ForTokenClassification": SCORE_TAG_HEAD,
    "ForQuestionAnswering": CAUSAL_SPAN_HEAD,
}  # on the states of a causal network, by the end of the class name


def keep_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Keep a weight as it is."""
    return [(name, tensor)]


def keep_family(family: "Family", hf: Json) -> "Family":  # noqa: ARG001
    """The default of families whose checkpoints are all of one kind."""
    return family


@dataclass(frozen=True)
class Family:
    """How checkpoints of one `model_type` are read. `prefix` is the base model's name in front of the weights' names.
    `drop` matches names of weights that are not used, `transposed` those of matrices that are stored [in, out].
    `variant` returns the family as a configuration needs it: with other names of weights, or another conversion.
    `published_classes` are classes that checkpoints name in `auto_map` and that compute what this family does, beside
    those of `heads`. `rotates_share`: the share of a head's features that `partial_rotary_factor` names is rotated;
    `rope_by_layer`: `rope_parameters` has an object for each type of layers. See models.checkpoint.rotation_fields."""

    name: str
    prefix: str
    config: Callable[[Json], ModelConfig]
    renames: Renames
    heads: Mapping[str, HeadSpec]
    convert: Callable[[str, Tensor], NamedTensors] = field(default=keep_weight)
    drop: str = r"$^"
    transposed: str = r"$^"
    variant: Callable[["Family", Json], "Family"] = field(default=keep_family)
    published_classes: frozenset[str] = frozenset()
    rotates_share: bool = False
    rope_by_layer: bool = False


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


def deinterleave_heads(tensor: Tensor, heads: int, rotary_width: int = 0) -> Tensor:
    """Reorder the first R rows of each head [H * D, ...] from (pairs, 2) to (2, pairs), so that features d and
    d + R / 2 form a pair. R is `rotary_width`; 0: all rows."""
    rows = tensor.reshape(heads, -1, *tensor.shape[1:])  # [H, D, ...]
    if tensor.is_meta:  # only shape and storage are asked for; index_select would import torch's compiler: 70 MB
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    order = torch.arange(len(tensor), device=tensor.device).view(heads, -1)  # [H, D]
    width = rotary_width or rows.size(1)
    paired = order[:, :width].reshape(heads, -1, 2).transpose(1, 2).reshape(heads, width)
    return tensor.index_select(0, torch.cat((paired, order[:, width:]), dim=1).flatten())


def read_sizes(hf: Json, *keys: str) -> list[int]:
    """The values of sizes by which a weight is split. UnsupportedError for a value that is no positive number."""
    for key in keys:
        if type(hf[key]) is not int or not 0 < hf[key] <= MAX_SIZE:
            raise UnsupportedError(
                f"{key} is {show_value(hf[key])}, which should be a whole number from 1 to {MAX_SIZE}"
            )
    return [hf[key] for key in keys]


def read_positive(hf: Json, key: str) -> float:
    """A factor or limit. UnsupportedError for a value that is no positive number: with 0 the reference would make all
    numbers the same, which no published network does."""
    value = hf[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UnsupportedError(f"{key} is {show_value(value)}, which should be a positive number")
    return float(value)


def read_limit(hf: Json, key: str) -> float:
    """As `read_positive`; 0 if the configuration has no such limit."""
    return 0.0 if hf.get(key) is None else read_positive(hf, key)


def activation_name(name: str) -> ActivationName:
    """Our name of an activation function. Raises UnsupportedError if it is not supported."""
    if name not in ACTIVATION_NAMES:
        raise UnsupportedError(f"activation {show_value(name)} is not one of {', '.join(sorted(ACTIVATION_NAMES))}")
    return ACTIVATION_NAMES[name]


def read_rope(hf: Json, layer_type: str = "full_attention") -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling from an old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`) configuration."""
    parameters = rope_parameters(hf, layer_type)
    given = next((each for each in (parameters, hf) if each.get("rope_theta") is not None), {"rope_theta": 10_000.0})
    base = read_positive(given, "rope_theta")
    match rope_type(parameters):
        case "default" | "dynamic":  # dynamic: as the default up to max_position_embeddings
            return base, None
        case "linear":
            return base, RopeScaling(kind="linear", factor=float(parameters["factor"]))
        case "proportional":
            share = rotated_share(hf, parameters)
            factor = float(parameters.get("factor", 1.0))
            return base, RopeScaling(kind="share", factor=factor, share=1.0 if share is None else float(share))
        case "llama3":
            return base, RopeScaling(
                kind="llama3",
                factor=float(parameters["factor"]),
                low_frequency_factor=float(parameters["low_freq_factor"]),
                high_frequency_factor=float(parameters["high_freq_factor"]),
                original_positions=int(parameters[ORIGINAL]),
            )
        case "yarn":
            return base, read_yarn(hf, parameters)
        case "longrope" | "su":
            return base, read_longrope(hf, parameters)
        case other:
            known = "default, linear, dynamic, llama3, yarn, longrope, proportional"
            raise UnsupportedError(f"rope scaling {show_value(other)} is not one of {known}")


def rope_parameters(hf: Json, layer_type: str = "full_attention") -> Json:
    """The fields of rotary positions for layers of one type; the newer form has an object for each type. As in
    transformers, the original context beside a rotation for all layers goes before the one inside it."""
    parameters: Json = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    found: Json = parameters.get(layer_type, parameters)
    if found is parameters and rope_type(found) in SCALED_CONTEXTS and hf.get(ORIGINAL) is not None:
        return {**found, ORIGINAL: hf[ORIGINAL]}
    return found


def has_rotation(hf: Json) -> bool:
    """Whether the configuration has fields of the rotation beside the base, be it none of them."""
    return any(hf.get(key) is not None for key in ("rope_parameters", "rope_scaling"))


def rope_type(parameters: Json) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def read_yarn(hf: Json, parameters: Json) -> RopeScaling:
    """As transformers reads YaRN's fields: the magnitude follows from the factor unless it is given."""
    original = int(parameters.get(ORIGINAL) or hf["max_position_embeddings"])
    factor = float(parameters.get("factor") or hf["max_position_embeddings"] / original)
    magnitude, one, all_features = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if magnitude is None:
        magnitude = yarn_magnitude(factor, one or 1.0)
        if one and all_features:
            magnitude /= yarn_magnitude(factor, all_features)
        elif one:
            magnitude = yarn_magnitude(factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        fast_rotations=float(parameters.get("beta_fast") or 32),
        slow_rotations=float(parameters.get("beta_slow") or 1),
        whole_bounds=bool(parameters.get("truncate", True)),
        magnitude=float(magnitude),
    )


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's attention factor for a context longer by `factor`."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_longrope(hf: Json, parameters: Json) -> RopeScaling:
    """LongRoPE within the pretrained context: the short factors. The magnitude follows from the longest context unless
    it is given. `context_length` is the limit."""
    original = context_length(hf)
    factor = float(parameters.get("factor") or hf["max_position_embeddings"] / original)
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    divisors = tuple(float(each) for each in parameters["short_factor"])
    return RopeScaling(kind="listed", factor=factor, divisors=divisors, magnitude=float(magnitude))


def context_length(hf: Json) -> int:
    """The longest context in tokens. With LongRoPE it is the pretrained one: a longer sequence would need the other
    list of factors from its first token on."""
    parameters = rope_parameters(hf)
    if rope_type(parameters) in ("longrope", "su"):
        keys = (parameters, hf)
        original = next((each[ORIGINAL] for each in keys if each.get(ORIGINAL)), hf["max_position_embeddings"])
        return int(original)
    return int(hf["max_position_embeddings"])


def rotated_share(hf: Json, parameters: Json) -> Any:
    """`partial_rotary_factor` of a rotation, or else of the whole network; None: neither has it."""
    return parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor"))


def read_rotary_width(hf: Json, head_width: int) -> int:
    """The number of rotated features of a head, from `partial_rotary_factor`; 0: all. Proportional rotations turn all,
    a share of them by the angle 0 (`read_rope`)."""
    parameters = rope_parameters(hf)
    if rope_type(parameters) == "proportional":
        return 0
    share = rotated_share(hf, parameters)
    width = head_width if share is None else int(head_width * float(share))
    if width < 1:
        raise UnsupportedError(f"partial_rotary_factor is {show_value(share)}: no feature of {head_width} is rotated")
    return 0 if width == head_width else width


def check_required_values(hf: Json, known: Mapping[str, Any]) -> None:
    """UnsupportedError for a field with another value than the one in `known`. Such fields belong to related networks;
    the reference implementation ignores them."""
    for key, value in known.items():
        if hf.get(key, value) != value:
            raise UnsupportedError(f"{key} is {show_value(hf[key])}: only {show_value(value)} is known")


def layer_numbers(depth: int) -> range:
    """The numbers of the layers. Raises UnsupportedError for more than MAX_LAYERS."""
    if depth > MAX_LAYERS:
        raise UnsupportedError(f"it describes {depth} layers; networks of {MAX_LAYERS} at most are known here")
    return range(depth)


def read_head_count(hf: Json) -> int:
    """The heads of a layer, by which a fused or paired matrix is split."""
    return read_sizes(hf, "num_attention_heads")[0]


def read_head_counts(hf: Json) -> tuple[int, int]:
    """The query heads and key heads of a layer, by which a fused or paired matrix is split."""
    keys = "num_attention_heads", "num_key_value_heads"
    heads, kv_heads = read_sizes({**hf, keys[1]: hf.get(keys[1]) or hf[keys[0]]}, *keys)
    return heads, kv_heads


def read_windowed_layers(hf: Json) -> tuple[bool, ...]:
    """Which layers use a sliding window, from `layer_types`; empty if the configuration has no such field."""
    return tuple(kind == "sliding_attention" for kind in hf.get("layer_types") or ())


def read_mixers(hf: Json, known: Mapping[str, MixerName], key: str = "layer_types") -> tuple[MixerName, ...]:
    """What mixes the tokens of each layer, from the list of kinds at `key`; `known` has their names in such files.
    UnsupportedError for another kind."""
    kinds = hf[key]
    for number, kind in enumerate(kinds):
        if kind not in known:
            raise UnsupportedError(f"{key}[{number}] is {show_value(kind)}, which should be one of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
