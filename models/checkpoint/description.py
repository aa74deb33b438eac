"""The description of a checkpoint before its weights are read, and the network built from it.

The network is built on torch's meta device, where tensors have shapes but no memory. Every shape in the files is
compared with the network's before memory is allocated (weight_reader.py), so a wrong checkpoint is refused at no cost.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from logging import getLogger
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..architectures.family import MAX_HEAD_WIDTH, MAX_LAYERS, MAX_SHARED_LAYERS
from ..chat import ChatTemplate
from ..chat.pair_prompt import PairPrompt, PairTemplate
from ..core.decision_prompt import DecisionPrompt
from ..core.errors import CheckpointError, EncodingError, UnsupportedError, show_value, truncate
from ..core.label_prompt import LabelPrompt
from ..core.late_interaction import LateInteraction
from ..network.attention import ATTENTION_CLASSES
from ..network.model_config import ExpertConfig, LatentConfig, MixerConfig, ModelConfig
from ..network.transformer import Transformer
from ..parallel import Cut
from ..seq2seq.decoding import DecodingConfig
from ..tokenizer import Text, Tokenizer
from .default_precision import DefaultPrecision, choose_precision
from .folder_files import FolderParts
from .tensor_files import TensorEntry, check_readable, file_size

RANDOM_INITIALIZERS = frozenset(("normal_", "uniform_", "kaiming_uniform_"))
SIZE_FIELDS = ("vocab_size", "width", "depth", "heads", "kv_heads", "head_width", "mlp_width", "max_positions")
COUNT_FIELDS = (
    "position_offset",
    "window",
    "segments",
    "embedding_width",
    "output_width",
    "distances",
    "farthest",
    "rotary_width",
    "convolution",
    "convolution_groups",
    "source_width",
    "bottleneck",
    "layer_embedding",
)
REAL_FIELDS = (
    "rope_base",
    "window_rope_base",
    "norm_eps",
    "embedding_scale",
    "distance_scale",
    "score_scale",
    "score_cap",
    "qkv_limit",
    "residual_scale",
    "logit_scale",
    "logit_cap",
)
MAX_REAL = 1e15  # of a factor, limit or base; rotary bases go up to 5e10, and squares of larger numbers overflow
BODY_PREFIXES = (
    "tokens.",
    "segments.",
    "position.",
    "embedding_norm.",
    "projection.",
    "output_projection.",
    "distances.",
    "layer_embedding.",
    "blocks.",
    "final_norm.",
)
MIN_DISTANCES = 4  # buckets: near and far ones, before and after
MAX_EXPERTS = 1 << 16  # of all layers; published networks have 25,000
SMALL_EXPERTS = (
    1 << 11
)  # experts of all layers that any files may describe; each takes 17 KB and 0.3 ms when it is built
EXPERT_NUMBERS = 1 << 16  # numbers in the files for each further one; experts of published networks have 1.5 million
# Each choice compares all experts, and each choice of a group all groups. Published networks choose 22 experts at most
# (of 512), and have 8 groups.
MAX_CHOSEN = 1 << 6
MAX_GROUPS = 1 << 6
OTHER_TENSORS = 1 << 13  # tensors that belong to no layer, or to networks of the same folder that are not read
LAYER_TENSORS = 1 << 7  # of a layer without experts; published ones have 30, and with parts that are not read 350
EXPERT_TENSORS = 1 << 5  # of an expert: three matrices, each in up to six tensors where they are quantised
MAX_CONVOLUTION = 63  # tokens of a convolution's kernel; each is a copy of the states
MAX_STATE = 1 << 30  # numbers of the recurrent state of a sequence; published networks have 200 million at most
SMALL_STATE = 1 << 20  # numbers of a state that any network may have, however few its weights are
MAX_BIASED_HEADS = 1 << 14  # heads with linear biases, whose rates are computed before shapes are compared
MAX_SINUSOIDS = 1 << 24  # numbers of sinusoidal positions, which are computed and not limited by a file
# With the special tokens around a text and around a pair.
PROBE_TEXTS: tuple[Text, ...] = ("", "word", ("word", "word"))
LAYER_NAME = re.compile(r"(^|\.)(blocks\.\d+|layers)\.")  # in our names; "layers" in those of recurrent networks
# Bytes that the files of a network may have: so many whatever it reads, and a multiple of what it reads. Beside a text
# network there may be towers for images, or another stack. Files are read whole to hash them.
SMALL_FILES = 1 << 30
MAX_UNREAD_SHARE = 8
MAX_NAMED = 5  # tensors named in a message; the others are counted
NamedPieces = list[tuple[str, Tensor]]
Form = Literal["tokens", "words"]  # of an output: a vector for each token, weights of words
CutFunction = Callable[[Transformer, nn.Module], Mapping[str, Cut]]
log = getLogger(__name__)


def cut_nothing(network: Transformer, head: nn.Module) -> Mapping[str, Cut]:  # noqa: ARG001
    """The default of `cut_network`: cuts nothing."""
    return {}


@dataclass(frozen=True)
class HeadDescription:
    """The head of a checkpoint: `task` is its name in requests, `build` makes the module for a network.

    `ignored_names` are our names of tensors that a file may have but that are not read, as a tied tensor's second copy.
    `prompts` are texts that may be put before the input, by name; the one with the empty name is put before every text.
    `pooling`: of an embedder. `decoder_configs` are those of further stacks inside the head; `decoding`: its default
    decoding rules. `both_orders`: a pair is scored in both orders and the scores are added. `width`: of an embedder's
    vectors; 0: that of the states. `excludes_prompt`: an embedder does not pool the tokens of a prompt. `own_entries`
    are tensors of the head beside those of the network's files, by a name for messages, each with our name.
    `pair_prompt`: how a reranker that generates gets a pair. `more_forms` are outputs of an embedder beside the
    vector of a text, each of the head's module of that name; `missing_forms` says by form what would have to be done
    for it. `has_queries`: queries are read by the head's modules `query_vector` and `query_words`, or by
    a network of their own. `skipped_tokens` are not pooled.
    """

    task: str
    build: Callable[[Transformer], nn.Module]
    labels: tuple[str, ...] = ()
    ignored_names: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    pooling: str = ""
    decoder_configs: tuple[ModelConfig, ...] = ()
    decoding: DecodingConfig | None = None
    both_orders: bool = False
    width: int = 0
    excludes_prompt: bool = False
    own_entries: Mapping[str, tuple[str, TensorEntry]] = field(default_factory=dict)
    pair_prompt: PairPrompt | PairTemplate | None = None
    more_forms: tuple[Form, ...] = ()
    missing_forms: Mapping[str, str] = field(default_factory=dict)
    has_queries: bool = False
    skipped_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything about a checkpoint except for its weights.

    `default_precision` follows from how the weights are stored, unless `preferred_precision` is set. `file` is the path
    for messages. `translate` turns a tensor under the file's name into tensors under our names ("head." for those of
    the head); it works on the meta device too. `cut_network` cuts the network and head to this process's share and
    returns the cuts by our names (models.parallel). `queries`: of a network of their own for queries; that of the
    description reads documents.
    """

    file: str
    family: str
    config: ModelConfig
    head: HeadDescription
    entries: Mapping[str, TensorEntry]
    translate: Callable[[str, Tensor], NamedPieces]
    tokenizer: Tokenizer
    max_tokens: int
    chat: ChatTemplate | None = None
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    parts: FolderParts | None = None  # of a folder: what an adapter may change
    cut_network: CutFunction = cut_nothing
    build_network: Callable[[], Any] | None = (
        None  # for a network that is no Transformer; `config` is then one of similar size
    )
    preferred_precision: DefaultPrecision | None = None
    late: LateInteraction | None = None  # of an embedder with a vector for each token
    labels: LabelPrompt | None = None  # of a model that reads labels of the request
    decisions: DecisionPrompt | None = None  # of a model that answers questions about a text
    sampling: Mapping[str, float] = field(default_factory=dict)  # options that the checkpoint suggests
    queries: "Description | None" = None

    @property
    def default_precision(self) -> DefaultPrecision:
        return self.preferred_precision or choose_precision(self.entries.values())

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, with the tags of the chat's format as text. It takes a while for many control tokens."""
        return self.tokenizer if self.chat is None else self.tokenizer.with_text_tags(self.chat.format.tags)

    @property
    def vector_width(self) -> int:
        """The width of an embedder's vectors, else that of the states."""
        return self.head.width or self.decoder_config.state_width

    @property
    def decoder_config(self) -> ModelConfig:
        """The configuration of the stack that is computed step by step: the decoder of an encoder-decoder."""
        return self.head.decoder_configs[-1] if self.head.decoder_configs else self.config


class SkipInitialization(TorchFunctionMode):
    """Modules made under it skip the random initialization of their parameters.

    Torch would draw random numbers for tensors without memory through its compiler, which takes seconds to import.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in RANDOM_INITIALIZERS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def build_on_meta(description: Description) -> tuple[Transformer, nn.Module]:
    """The network and the head on the meta device: shapes without memory.

    Layers that share parameters have one set of tensors, so their number is not compared with that of the tensors and
    has a bound of its own: a small file could ask for a pass of any length.
    CheckpointError if they cannot be built, or if the tokenizer's output does not fit the network.
    """
    configs = (description.config, *description.head.decoder_configs)
    for config in configs:
        check_config_fields(description.file, config)
    check_experts(description, configs)
    depth = max((config.depth for config in configs if not (config.shared or config.static)), default=0)
    check_depth(description.file, depth, count_layer_tensors(description, depth))
    if (shared := max((config.depth for config in configs if config.shared), default=0)) > MAX_SHARED_LAYERS:
        message = f"it describes {shared} layers that share their tensors; {MAX_SHARED_LAYERS} at most are known here"
        raise UnsupportedError(message, file=description.file)
    check_tokenizer_fits(description)
    try:
        with torch.device("meta"), SkipInitialization():
            network = description.build_network() if description.build_network else Transformer(description.config)
            return network, description.head.build(network)
    except (RuntimeError, OverflowError) as error:  # torch, for a tensor whose size is no 64-bit number
        reason = truncate(str(error).splitlines()[0], 200)
        message = f"the network that it describes cannot be built ({reason}); its widths are too large"
        raise CheckpointError(message, file=description.file) from None


def check_config_fields(file: str, config: ModelConfig) -> None:
    """CheckpointError for a field with an invalid value."""
    for name, wrong in invalid_fields(config):
        raise CheckpointError(f"{name} is {show_value(getattr(config, name))}, which should be {wrong}", file=file)


def check_depth(file: str, depth: int, tensor_count: int) -> None:
    """CheckpointError for more layers than `tensor_count`, the files' tensors of layers, or than MAX_LAYERS.

    A layer takes memory as soon as it is built, even on the meta device.
    """
    if depth > tensor_count:
        raise CheckpointError(
            f"it describes {depth} layers, but the files hold {tensor_count} tensors of layers", file=file
        )
    if depth > MAX_LAYERS:
        raise UnsupportedError(
            f"it describes {depth} layers; networks of {MAX_LAYERS} at most are known here", file=file
        )


def check_experts(description: Description, configs: Sequence[ModelConfig]) -> None:
    """CheckpointError for more experts than the files' numbers are enough for.

    An expert takes memory and time as soon as it is built, as a layer does. One tensor may have the matrices of all
    experts of a layer, so numbers are counted and not tensors.
    """
    mixtures = [(config.experts, config.depth) for config in configs if config.experts is not None]
    count = sum(each.count * (sum(each.layers) if each.layers else depth) for each, depth in mixtures)
    numbers = sum(math.prod(entry.shape) for entry in description.entries.values())
    if count > SMALL_EXPERTS + numbers // EXPERT_NUMBERS:
        message = f"experts: it describes {count} in all layers, and the files hold {numbers} numbers"
        raise CheckpointError(
            f"{message}; more than {SMALL_EXPERTS} need {EXPERT_NUMBERS} numbers each", file=description.file
        )


def count_layer_tensors(description: Description, most: int) -> int:
    """Count of the tensors of the files that belong to layers and hold at least one number, up to `most`."""
    filled = (pieces for _, entry, pieces in describe_pieces(description) if math.prod(entry.shape))
    layered = (1 for pieces in filled if any(LAYER_NAME.search(ours) for ours, _ in pieces))
    return sum(islice(layered, most))


def describe_pieces(description: Description) -> Iterator[tuple[str, TensorEntry, NamedPieces]]:
    """Each tensor of the files by its name there, and the tensors that it becomes, with shapes only. CheckpointError as
    by `list_pieces`, and for a tensor that does not divide."""
    most = most_tensors((description.config, *description.head.decoder_configs))
    return list_pieces(description.file, description.entries, most, partial(translate_shape, description))


def list_pieces(
    file: str,
    entries: Mapping[str, TensorEntry],
    most: int,
    translate: Callable[[str, TensorEntry], NamedPieces],
) -> Iterator[tuple[str, TensorEntry, NamedPieces]]:
    """Each tensor of the files by its name there, and the tensors that it becomes.

    CheckpointError for more of them than `most`: each name is matched with all patterns of its family, and a tensor of
    a few bytes may become thousands.
    """
    found = len(entries)
    for name, entry in entries.items():
        if found > most:
            message = f"the files hold {found} tensors or more; the network that {file} describes has {most} at most"
            raise CheckpointError(message, file=str(entry.file))
        pieces = translate(name, entry)
        found += max(len(pieces) - 1, 0)
        yield name, entry, pieces


def most_tensors(configs: Sequence[ModelConfig]) -> int:
    """The most tensors that the files of a network have, those that are not read included. Of configurations with
    invalid fields, which are refused later, nothing is counted."""
    if any(any(invalid_fields(config)) for config in configs):
        return OTHER_TENSORS
    layers = sum(
        min(config.depth, MAX_LAYERS)
        * (LAYER_TENSORS + (config.experts.count * EXPERT_TENSORS if config.experts else 0))
        for config in configs
    )
    return OTHER_TENSORS + layers


def check_tokenizer_fits(description: Description) -> None:
    """CheckpointError if the special tokens or segments around a text, or the tokens of a word, have no embedding."""
    for probe in PROBE_TEXTS:
        try:
            [encoding] = description.tokenizer.encode_batch([probe])
        except EncodingError:
            continue  # a request with such a text is refused later
        if reason := missing_embedding(description, encoding.ids, encoding.segments):
            raise CheckpointError(reason, file=description.file)


def missing_embedding(description: Description, tokens: Sequence[int], segments: Sequence[int]) -> str:
    """A sentence that names the token or segment without an embedding; empty if each has one.

    A network without segment embeddings ignores segments.
    """
    kinds = (("token", tokens, description.config.vocab_size), ("segment", segments, description.config.segments))
    for name, numbers, count in kinds:
        if (name == "token" or count) and max(numbers, default=0) >= count:
            made = f"its tokenizer makes {name} {max(numbers)} of the text"
            return f"{made}, and the network has {count} {name}s, counted from 0"
    return ""


def invalid_fields(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The fields with invalid values, each with what it should be. A file may hold any value."""
    for name, least in (*((name, 1) for name in SIZE_FIELDS), *((name, 0) for name in COUNT_FIELDS)):
        value = getattr(config, name)
        if type(value) is not int or not least <= value < 2**31:
            yield name, f"a whole number from {least} on, within reason"
    for name in REAL_FIELDS:
        value = getattr(config, name)
        if type(value) not in (int, float) or not 0 <= value < MAX_REAL:
            yield name, "a number, not negative, within reason"
    if config.kv_heads > 0 and config.heads % config.kv_heads:
        yield "heads", f"a multiple of kv_heads, which is {config.kv_heads}"
    if config.position == "rotary":
        if config.head_width % 2:
            yield "head_width", "even, for rotary positions"
        if config.rotary_width > config.head_width or config.rotary_width % 2:
            yield "rotary_width", f"even, and {config.head_width} at most, the width of a head"
        if config.head_width > MAX_HEAD_WIDTH:
            yield "head_width", f"{MAX_HEAD_WIDTH} at most, for rotary positions"
    for name in ("windowed", "rotated", "query_key_norm_layers", "mixers", "mlps", "tied_values"):
        if len(getattr(config, name)) not in (0, config.depth):
            yield name, f"one for each of {config.depth} layers"
    yield from invalid_layer_shapes(config)
    yield from invalid_key_layers(config)
    if (config.layer_embedding or config.layer_scale) and config.norm_order != "sandwich":
        yield "layer_embedding", "in layers with a norm before and after each part"
    if config.layer_embedding * config.depth >= 2**31:
        yield "layer_embedding", "a whole number from 0 on, within reason"
    if config.has_sinusoidal_positions:
        name = "embedding_width" if config.embedding_width else "width"
        if (width := getattr(config, name)) % 2:
            yield name, "even, for sinusoidal positions"
        if (config.max_positions + config.position_offset) * width > MAX_SINUSOIDS:
            most, offset = MAX_SINUSOIDS // width, config.position_offset
            yield (
                "max_positions",
                f"{most} at most, for sinusoidal positions so wide, with the {offset} before the first",
            )
    if config.position == "alibi" and config.heads > MAX_BIASED_HEADS:
        yield "heads", f"{MAX_BIASED_HEADS} at most, for linear biases, which have a computed rate for each"
    if config.convolution and (
        config.convolution % 2 == 0 or config.convolution > MAX_CONVOLUTION or config.norm_order != "post"
    ):
        yield "convolution", f"odd, {MAX_CONVOLUTION} at most, and beside post-norm layers"
    if config.convolution and (config.convolution_groups < 1 or config.width % config.convolution_groups):
        yield "convolution_groups", f"a divisor of width, which is {config.width}"
    if config.distances or config.attention_kind in ("bias", "layer_bias", "distance", "two_streams"):
        near = config.distances // (2 if config.causal else 4)
        if config.distances < MIN_DISTANCES:
            yield "distances", f"{MIN_DISTANCES} at least"
        if config.farthest <= near + 1:
            yield "farthest", f"more than {near + 1}, up to which each distance has a bucket of its own"
    if config.latent is not None:
        yield from invalid_latent_fields(config, config.latent)
    if config.experts is not None:
        yield from invalid_expert_fields(config, config.experts)
    if config.recurrent is not None:
        yield from invalid_recurrent_fields(config, config.recurrent)
    if scaling := config.rope_scaling:
        if not 0 < scaling.factor < MAX_REAL:
            yield "rope_scaling", "by a positive factor, within reason"
        if not 0 < scaling.low_frequency_factor < scaling.high_frequency_factor < MAX_REAL:
            yield "rope_scaling", "with a positive low_freq_factor and a high_freq_factor above it"
        if not 0 < scaling.original_positions < 2**31:
            yield "rope_scaling", "with original_max_position_embeddings from 1 on, within reason"
        if not 0 < scaling.slow_rotations <= scaling.fast_rotations < MAX_REAL:
            yield "rope_scaling", "with a positive beta_slow and a beta_fast that is not below it"
        if not 0 < scaling.magnitude < MAX_REAL:
            yield "rope_scaling", "with a positive attention_factor, within reason"
        if scaling.kind == "yarn" and not config.rope_base > 1:
            yield "rope_base", "above 1, for yarn"
        count = (config.rotary_width or config.head_width) // 2
        if scaling.kind == "listed" and len(scaling.divisors) != count:
            yield "rope_scaling", f"with {count} factors, half of the rotated features"
        if not 0 <= scaling.share <= 1:
            yield "rope_scaling", "with a partial_rotary_factor from 0 to 1"
        if not all(0 < divisor < MAX_REAL for divisor in scaling.divisors):
            yield "rope_scaling", "with positive factors"


def invalid_layer_shapes(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """As `invalid_fields`, for sizes that differ from layer to layer."""
    if not config.layer_shapes:
        return
    if len(config.layer_shapes) != config.depth:
        yield "layer_shapes", f"one for each of {config.depth} layers"
        return
    for shape in config.layer_shapes:
        for name in ("kv_heads", "head_width", "mlp_width"):
            value = getattr(shape, name)
            if type(value) is not int or not 1 <= value <= getattr(config, name):
                yield name, f"a whole number from 1 to {getattr(config, name)} in each layer"
                return
        if config.heads % shape.kv_heads:
            yield "heads", f"a multiple of kv_heads, which is {shape.kv_heads} in some layers"
        if config.position == "rotary" and (shape.head_width % 2 or shape.head_width < config.rotary_width):
            yield "head_width", f"even, and {config.rotary_width} at least, for rotary positions"
    kinds = {bool(config.window_rope_base) and config.is_windowed(layer) for layer in range(config.depth)}
    widths = {
        (bool(config.window_rope_base) and config.is_windowed(layer), shape.head_width)
        for layer, shape in enumerate(config.layer_shapes)
    }
    if config.position == "rotary" and len(widths) > len(kinds):
        yield "head_width", "the same in all layers with the same rotary positions"


def invalid_key_layers(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """As `invalid_fields`, for layers that read the keys and values of others."""
    if config.attention_kind in ATTENTION_CLASSES and (config.key_layers or any(config.tied_values)):
        yield "key_layers", "empty, for attention of this kind"
    if config.shared and (config.key_layers or config.layer_shapes or config.layer_scale or config.layer_embedding):
        yield "shared", "false, for layers that differ"
    if not config.key_layers:
        return
    if len(config.key_layers) != config.depth:
        yield "key_layers", f"one for each of {config.depth} layers"
        return
    for layer, source in enumerate(config.key_layers):
        if type(source) is not int or not 0 <= source <= layer or config.key_layers[source] != source:
            yield "key_layers", "for each layer itself, or an earlier one that reads its own keys"
            return
        if config.mixer(source) != config.mixer(layer):
            yield "key_layers", "of layers with attention"
        ours, theirs = config.of_layer(layer), config.of_layer(source)
        if (ours.kv_heads, ours.head_width) != (theirs.kv_heads, theirs.head_width):
            yield "key_layers", "of layers with the same heads"


def invalid_latent_fields(config: ModelConfig, latent: LatentConfig) -> Iterator[tuple[str, str]]:
    """As `invalid_fields`, for latent attention."""
    for name, least in (("rank", 1), ("value_width", 1), ("query_rank", 0)):
        value = getattr(latent, name)
        if type(value) is not int or not least <= value < 2**31:
            yield "latent", f"with a whole number from {least} on as {name}, within reason"
            return
    if latent.value_width > config.head_width:
        yield "latent", f"with values of {config.head_width} features at most, the width of a key"
    if config.position != "rotary" or not 0 < config.rotary_width < config.head_width:
        yield "rotary_width", f"from 2 to less than {config.head_width}, the width of a key, for latent attention"
    if config.kv_heads != config.heads:
        yield "kv_heads", f"{config.heads}, the number of heads, for latent attention"


def invalid_recurrent_fields(config: ModelConfig, recurrent: MixerConfig) -> Iterator[tuple[str, str]]:
    """As `invalid_fields`, for recurrent layers."""
    kinds = {config.mixers[layer] for layer in config.recurrent_layers}
    if not config.causal or config.norm_order not in ("pre", "inner") or config.shared:
        yield "recurrent", "in causal networks whose layers have norms of their own"
    if type(recurrent.kernel) is not int or not 1 <= recurrent.kernel <= MAX_CONVOLUTION:
        yield "recurrent", f"with a kernel of 1 to {MAX_CONVOLUTION} tokens"
        return
    if not 0 <= recurrent.norm_eps < MAX_REAL or not 0 <= recurrent.update_scale < MAX_REAL:
        yield "recurrent", "with numbers as norm_eps and update_scale, not negative"
    low, high = recurrent.step_limits
    if not 0 <= low <= high:
        yield "recurrent", "with limits of steps that are not negative, the lower one first"
    if kinds <= {"convolution"}:
        return
    for name in ("heads", "head_width", "key_heads", "key_width", "norm_groups"):
        value = getattr(recurrent, name)
        if type(value) is not int or not 1 <= value < 2**31:
            yield "recurrent", f"with a whole number from 1 on as {name}, within reason"
            return
    if recurrent.heads % recurrent.key_heads:
        yield "recurrent", f"with a multiple of {recurrent.key_heads} heads, the number of key heads or groups"
    if recurrent.heads * recurrent.head_width % recurrent.norm_groups:
        yield "recurrent", f"with {recurrent.norm_groups} groups of the norm that divide its features"
    numbers = sum(recurrent.state_numbers(config.mixers[layer], config.width) for layer in config.recurrent_layers)
    if numbers > MAX_STATE:
        yield "recurrent", f"with a state of {MAX_STATE} numbers at most"
    # Each token reads and writes the state. A layer has 2 or 3 matrices of its features by the width, and a state of
    # these features by key_width. Published networks have a key_width of a sixth of the width at most.
    if recurrent.key_width > config.width and numbers > SMALL_STATE:
        yield "recurrent", f"with a key_width of {config.width} at most, the width, or a state of {SMALL_STATE} numbers"


def invalid_expert_fields(config: ModelConfig, experts: ExpertConfig) -> Iterator[tuple[str, str]]:
    """As `invalid_fields`, for the mixture of experts."""
    for name in ("count", "chosen", "width"):
        value = getattr(experts, name)
        if type(value) is not int or not 1 <= value < 2**31:
            yield "experts", f"with a whole number from 1 on as {name}, within reason"
            return
    for name in ("groups", "chosen_groups", "shared_width"):
        value = getattr(experts, name)
        if type(value) is not int or not 0 <= value < 2**31:
            yield "experts", f"with a whole number from 0 on as {name}, within reason"
            return
    if experts.count * config.depth > MAX_EXPERTS:
        yield "experts", f"{MAX_EXPERTS // config.depth} at most in each of {config.depth} layers"
    if experts.groups > MAX_GROUPS:
        yield "experts", f"in {MAX_GROUPS} groups at most"
    room = min(experts.count, MAX_CHOSEN)
    if experts.groups:
        if experts.count % experts.groups or not 1 <= experts.chosen_groups <= experts.groups:
            yield "experts", f"in groups of equal size, of which 1 to {experts.groups} are chosen"
            return
        room = min(room, experts.count // experts.groups * experts.chosen_groups)
        if experts.choice_bias and experts.count // experts.groups < 2:
            yield "experts", "in groups of two at least"
    if experts.chosen > room:
        yield "experts", f"with {room} at most chosen for a token"
    if len(experts.layers) not in (0, config.depth):
        yield "experts", f"said for each of {config.depth} layers"
    if not all(0 <= number < MAX_REAL for number in (experts.scale, experts.clamp, experts.shared_scale)):
        yield "experts", "with numbers as scale and limit, not negative"
    shares = experts.shared_width and not experts.shared_gate
    if experts.own_norms and not (shares and config.norm == "rms" and config.norm_order == "sandwich"):
        yield "experts", "with norms of their own only beside a shared one, in layers with RMS norms around each part"
    if not 0 <= experts.margin < MAX_REAL:
        yield "experts", "with a margin that is not negative"


def parameter_shapes(network: Transformer, head: nn.Module) -> dict[str, tuple[int, ...]]:
    """Our names and shapes of all parameters; a parameter tied to another is left out."""
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    known = {id(parameter) for parameter in network.parameters()}
    for name, parameter in head.named_parameters():
        if id(parameter) not in known:
            shapes[f"head.{name}"] = tuple(parameter.shape)
    return shapes


def match_entries(description: Description, network: Transformer, head: nn.Module) -> dict[str, TensorEntry]:
    """The entries to read, in the order of the files. CheckpointError unless they are exactly the network's
    parameters."""
    shapes, sources = parameter_shapes(network, head), dict[str, str]()
    entries, unknown = {}, []
    for name, entry, pieces in describe_pieces(description):
        for ours, piece in pieces:
            if ours in description.head.ignored_names:
                continue
            if ours not in shapes:
                if not entry.is_optional:
                    unknown.append((name, ours))
                continue
            if tuple(piece.shape) != shapes[ours]:
                raise CheckpointError(
                    f"its shape is {list(piece.shape)}, but {description.file} asks for {list(shapes[ours])}",
                    file=str(entry.file),
                    tensor=name,
                )
            sources[ours] = name
            entries[name] = entry
            check_readable(entry)
    check_missing(description, [name for name in shapes if name not in sources], sources)
    check_unknown(description, unknown, entries)
    check_file_sizes(description, entries)
    return dict(sorted(entries.items(), key=lambda item: (str(item[1].file), item[1].start)))


def translate_shape(
    description: Description, name: str, entry: TensorEntry, whole: Tensor | None = None
) -> NamedPieces:
    """The tensors that an entry becomes, with shapes only; `whole`: a tensor of its shape without memory."""
    try:
        return description.translate(name, torch.empty(entry.shape, device="meta") if whole is None else whole)
    except (RuntimeError, ValueError, IndexError) as error:  # wrong number of sides, or one that does not divide
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"its shape {list(entry.shape)} is not that of such a tensor ({reason})", file=str(entry.file), tensor=name
        ) from None


def check_missing(description: Description, missing: list[str], sources: Mapping[str, str]) -> None:
    if missing:
        named = [checkpoint_name(name, sources) for name in missing[:MAX_NAMED]]  # each is compared with all sources
        names = [*named, *missing[MAX_NAMED:]]
        files = sorted({str(entry.file) for entry in description.entries.values()}) or [description.file]
        message = f"{len(names)} tensors are missing: {join_names(names)}; {description.file} asks for them"
        raise CheckpointError(message, file=", ".join(files[:MAX_NAMED]), tensor=names[0])


def check_file_sizes(description: Description, entries: Mapping[str, TensorEntry]) -> None:
    """CheckpointError for files that are much longer than `entries`, the tensors that the network reads from them."""
    sizes = {path: file_size(path) for path in {path for each in description.entries.values() for path in each.files}}
    read, held = sum(entry.read_size for entry in entries.values()), sum(sizes.values())
    if held > (most := SMALL_FILES + MAX_UNREAD_SHARE * read):
        message = f"the files of this network have {held} bytes, and it reads {read} of them; {most} are the most"
        longest = max(sizes, key=sizes.__getitem__)
        raise CheckpointError(f"{message}; save the network's tensors alone", file=str(longest))


def check_unknown(description: Description, unknown: list[tuple[str, str]], entries: Mapping[str, TensorEntry]) -> None:
    """CheckpointError for a tensor of the body that the network has no place for. A tensor that belongs to another head
    is ignored if the task is to embed."""
    strays = [name for name, ours in unknown if description.head.task != "embed" or is_body(ours)]
    if strays:
        message = (
            f"{len(strays)} tensors have no place in the network {description.file} describes: {join_names(strays)}"
        )
        raise CheckpointError(message, file=str(description.entries[strays[0]].file), tensor=strays[0])
    ignored = [name for name, _ in unknown if name not in entries]
    if ignored:
        log.info(
            "%s: %d tensors of a head that is not used are ignored: %s",
            description.file,
            len(ignored),
            join_names(ignored),
        )


def is_body(ours: str) -> bool:
    return ours.startswith(BODY_PREFIXES)


def checkpoint_name(ours: str, sources: Mapping[str, str]) -> str:
    """The checkpoint's name of a missing tensor, guessed from the same tensor of another layer or from its bias."""
    layer = re.match(r"(head\.decoder\.)?blocks\.(\d+)\.", ours)
    for known, name in sources.items():
        if layer and re.sub(r"^(head\.decoder\.)?blocks\.\d+", layer[0][:-1], known) == ours:
            return re.sub(r"\.\d+\.", f".{layer[2]}.", name, count=1)
        if known.rpartition(".")[0] == ours.rpartition(".")[0]:
            return f"{name.rpartition('.')[0]}.{ours.rpartition('.')[2]}"
    return ours


def join_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
