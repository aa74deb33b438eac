"""The configuration of a network, the only description of an architecture. No other module depends on a family's
name."""

import math
from dataclasses import dataclass, replace
from typing import Literal

# What mixes the tokens of a layer: attention, one of models.network.recurrent_mixers, or nothing.
MixerName = Literal["attention", "convolution", "state_space", "delta", "none"]
# Which tokens of a sequence see all others: none, the first, those before the first separator, or those from the second
# token after it on, as a pair has two separators between its texts.
GlobalTokens = Literal["", "first", "before_separator", "after_separator"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled to contexts longer than the pretrained one.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` keeps the high
    frequencies, divides the low ones and blends between (Llama 3.1 model card). `yarn` does so by the number of
    rotations over `original_positions`: frequencies with more than `fast_rotations` are kept, those with fewer than
    `slow_rotations` divided (Peng et al. 2023, arXiv:2309.00071). `listed` divides each frequency by its own number of
    `divisors` (LongRoPE: Ding et al. 2024, arXiv:2402.13753). `share` divides by `factor`, too, and rotates only that
    share of the pairs of features, those with the highest frequencies (Gemma 4).
    """

    kind: Literal["linear", "llama3", "yarn", "listed", "share"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    whole_bounds: bool = True  # of yarn: the two bounds between kept and divided frequencies are rounded outwards
    divisors: tuple[float, ...] = ()  # [R / 2], of listed
    share: float = 1.0  # of the pairs of features, of share
    magnitude: float = 1.0  # by which rotated queries and keys are multiplied


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one layer, where layers differ in them; see ModelConfig.layer_shapes."""

    kv_heads: int
    head_width: int
    mlp_width: int


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The mixture of experts in the MLPs of some layers; see models.network.experts. A token uses `chosen` of `count`
    experts, each with `width` inner features.

    Weights are the chosen experts' scores, which are divided by their sum plus `normalised_eps` if `normalised`, and
    multiplied by `scale`. With `groups`, experts are chosen from the best `chosen_groups` groups only. With the scoring
    "sparse_mixer" the weight of a chosen expert is its share among the experts whose scores are within `margin` of it.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...] = ()  # which layers have experts; empty: all
    scoring: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    margin: float = 0.0  # of "sparse_mixer"
    normalised: bool = True
    normalised_eps: float = 0.0
    scale: float = 1.0
    groups: int = 0
    chosen_groups: int = 0
    choice_bias: bool = False  # a bias for each expert that is added to scores for the choice only
    chosen_by_logits: bool = False  # experts are chosen by their logits, not by their scores
    router_bias: bool = False
    bias: bool = False  # of the experts' linear layers
    weighs_input: bool = False  # the weight of an expert multiplies its input, not its output
    clamp: float = 0.0  # the limit of inner features, which are shifted by one (gpt-oss); 0: neither
    shared_width: int = 0  # inner features of an expert that all tokens use
    shared_gate: bool = False  # the shared expert's output is multiplied by a gate
    shared_scale: float = 1.0  # by which the shared expert's output is multiplied
    output_norm: bool = False  # the sum of all experts' outputs is normed
    output_scales: bool = False  # each expert has a number by which its weight is multiplied
    # The router, the chosen experts and the shared one weigh the features of their input on their own, and the last two
    # have norms of their outputs (Gemma 4).
    own_norms: bool = False

    def is_in(self, layer: int) -> bool:
        return not self.layers or self.layers[layer]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention: keys and values are computed from one narrow vector for each token (DeepSeek-V2,
    arXiv:2405.04434). See models.network.latent_attention.

    The rotated features of a key, `rotary_width` of ModelConfig, are the same for all heads and do not go through the
    narrow vector. Widths count features.
    """

    rank: int  # of the vector of keys and values
    query_rank: int = 0  # of the vector of queries; 0: queries are computed from the state
    value_width: int  # of a head
    norm_eps: float = 1e-6  # of the norms of the narrow vectors


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """The recurrent layers of a network, which mix tokens through a state of fixed size; see
    models.network.recurrent_mixers.

    Letters are those of the papers: H `heads` of P `head_width` features, G `key_heads` of N `key_width` features.
    "convolution" has none of them.
    """

    kernel: int  # tokens of the causal convolution of each channel, the token's own included
    kernel_bias: bool = False
    heads: int = 0  # heads of values
    head_width: int = 0  # features of a value head
    key_heads: int = 0  # of "state_space": groups of heads with the same B and C; of "delta": heads of queries and keys
    key_width: int = 0  # of "state_space": the width of the state; of "delta": features of a key
    input_bias: bool = False
    output_bias: bool = False
    norm_groups: int = 1  # of "state_space": groups of features that are normed apart; "delta" norms each head
    gate_first: bool = True  # of "state_space": norm(x * silu(gate)); otherwise norm(x) * silu(gate)
    gated_norm: bool = True  # of "state_space"; without it: x * silu(gate)
    norm_eps: float = 1e-5  # of that norm
    step_limits: tuple[float, float] = (0.0, math.inf)  # of "state_space": steps are clamped to them
    update_scale: float = 1.0  # of "delta": by which the rates of updates, between 0 and 1, are multiplied
    is_pre_norm: bool = False  # recurrent layers have norms before their parts, whatever `norm_order` is

    def convolved(self, mixer: MixerName, width: int) -> int:
        """Channels of the convolution in a layer of this kind, of a network of `width` features."""
        inner, keys = self.heads * self.head_width, self.key_heads * self.key_width
        return {"convolution": width, "state_space": inner + 2 * keys, "delta": inner + 2 * keys}.get(mixer, 0)

    def state_numbers(self, mixer: MixerName, width: int) -> int:
        """Numbers of the state of a sequence in a layer of this kind: the last rows of the convolution's input, and a
        matrix for each head."""
        matrices = self.heads * self.head_width * self.key_width if mixer in ("state_space", "delta") else 0
        return self.convolved(mixer, width) * (self.kernel - 1) + matrices


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One transformer stack. Widths count features, positions and windows count tokens."""

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    max_positions: int
    causal: bool
    # Sizes of each layer; empty: all have those above. Those above are the largest of all layers.
    layer_shapes: tuple[LayerShape, ...] = ()
    # Sinusoidal: sine and cosine alternate; sines-cosines: all sines first; closed-sines-cosines: so, and the last
    # frequency is exactly a ten-thousandth of the first; bias: only that of `distances`; layer_bias: each layer has its
    # own.
    position: Literal[
        "learned",
        "sinusoidal",
        "sines-cosines",
        "closed-sines-cosines",
        "rotary",
        "bias",
        "layer_bias",
        "distance",
        "relative",
        "alibi",
        "none",
    ] = "learned"
    position_offset: int = 0  # the number of the first position, if positions are embedded
    position_last: bool = False  # positions are added after the norm and the projection of the embeddings
    # Number of distance buckets, each with a bias (with a vector if `position` is "distance"); 0: none.
    distances: int = 0
    distance_scale: float = 1.0  # of "alibi": by which the rates are multiplied
    farthest: int = 128  # tokens; larger distances share a bucket (approximately so, if there are `distances`)
    # Of "distance": far distances share buckets by their logarithm; otherwise each one has a bucket of its own. Vectors
    # are normed. Their projections to queries and keys are those of tokens, or others.
    has_log_distances: bool = True
    has_distance_norm: bool = True
    has_distance_projections: bool = False
    # Inner features of a narrow MLP without a gate behind the MLP of each layer, which reads the norm of the residual
    # sum (X-MOD, arXiv:2205.06266); 0: there is none. Its output is added to what it reads, or to that sum itself.
    bottleneck: int = 0
    bottleneck_adds_to_norm: bool = True
    convolution: int = 0  # tokens of the kernel of a convolution beside the first layer; odd; 0: there is none
    convolution_groups: int = 1
    convolution_activation: Literal["tanh", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu", "relu_squared"] = (
        "tanh"
    )
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_width: int = 0  # features of a head that are rotated, the first ones; 0: all
    rotated: tuple[bool, ...] = ()  # which layers rotate queries and keys; empty: all, if `position` is "rotary"
    window: int = 0  # tokens that a windowed layer sees, including the row's own; 0: no layer is windowed
    windowed: tuple[bool, ...] = ()  # which layers are windowed; empty: all, if `window` is set
    window_rope_base: float = 0.0  # rotary base of the windowed layers if it differs; 0: the same
    # Tokens that see the whole text and that all of it sees, through projections of their own; see GlobalAttention.
    # `separator` is the token at the end of each text of a pair.
    global_tokens: GlobalTokens = ""
    separator: int = 0
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # of "layer"
    norm_weight: bool = True  # without it there is no bias either
    # Inner: after each part, before the sum; parallel: attention and MLP have the same input, and both are added to it.
    norm_order: Literal["pre", "post", "sandwich", "inner", "parallel"] = "pre"
    opening_norm: bool = True  # a norm before the first attention, in "pre" and "sandwich"
    closing_norm: bool = True  # a norm after the last layer, in all orders but "post", which has none
    embedding_norm: bool = False
    embedding_width: int = 0  # width of the embeddings if they are projected to `width`; 0: `width`
    embedding_scale: float = 1.0
    output_width: int = 0  # width of the states if they are projected after the last layer; 0: `width`
    # Of queries and keys, of the kind `norm`: with one weight for all heads [D], a weight for each head [H, D], or over
    # all heads together [H * D].
    query_key_norm: Literal["", "shared", "per_head", "joint"] = ""
    query_key_norm_bias: bool = False  # of "layer"
    query_key_norm_weight: bool = True
    query_key_norm_layers: tuple[bool, ...] = ()  # which layers norm them; empty: all, if there is such a norm
    norm_after_rotation: bool = False  # queries and keys are normed after their rotation, not before
    score_scale: float = 0.0  # 0: 1 / sqrt(head_width)
    score_cap: float = 0.0  # scores s become cap * tanh(s / cap); 0: no cap
    qkv_limit: float = 0.0  # queries, keys and values are clamped to it before they are rotated; 0: they are not
    attention_gate: bool = False  # mixed values are multiplied by a gate that is computed from the layer's input
    value_norm: bool = False  # values are normed head by head, by RMS and without weights
    tied_values: tuple[bool, ...] = ()  # in which layers values are the keys before their norm; empty: none
    key_layers: tuple[int, ...] = ()  # the layer whose keys and values each layer reads; empty: its own
    latent: LatentConfig | None = None
    sinks: bool = False  # each head has a learned score for no key, which takes a share of the softmax
    residual_scale: float = 1.0  # by which the output of each part is multiplied before it is added
    logit_scale: float = 1.0  # by which logits are multiplied
    logit_cap: float = 0.0  # scaled logits l become cap * tanh(l / cap); 0: no cap
    logit_bias: bool = False  # the output layer has a bias
    # Between an output matrix and states: a dense layer with this activation, and a norm; "": neither.
    logit_dense: Literal["", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu", "relu_squared"] = ""
    logit_dense_bias: bool = False
    # "xielu" has two learned slopes in each layer (Huang and Schlag 2024, arXiv:2411.13010).
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu", "relu_squared", "xielu"] = "gelu"
    gated_mlp: bool = False
    experts: ExpertConfig | None = None
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    segments: int = 0
    # Features of an embedding of each token for each layer, which is added behind the MLP (Gemma 3n); 0: there is none.
    layer_embedding: int = 0
    layer_scale: bool = False  # the output of each layer is multiplied by a number of its own
    shared: bool = False  # all layers have the same weights
    has_cross_attention: bool = False  # its layers have cross-attention
    # Each token has a second row, which predicts the token after it and to which no other row attends: the first of
    # ProphetNet's predicting streams (arXiv:2001.04063). Each row computes its biases of `distances`.
    two_streams: bool = False
    static: bool = False  # a token's state is its embedding; there are no layers
    source_width: int = 0  # of the states that cross-attention reads, if it is another than `width`
    hides_rows: bool = False  # sequences may end in rows that no row attends to (query expansion of ColBERT)
    recurrent: MixerConfig | None = None
    mixers: tuple[MixerName, ...] = ()  # of each layer; empty: attention
    mlps: tuple[bool, ...] = ()  # which layers have an MLP; empty: all

    @property
    def attention_kind(self) -> str:
        """Which class of attention the layers have: "latent", "two_streams", "global", or the kind of positions."""
        if self.latent is not None:
            return "latent"
        return "two_streams" if self.two_streams else "global" if self.global_tokens else self.position

    @property
    def has_sinusoidal_positions(self) -> bool:
        return self.position in ("sinusoidal", "sines-cosines", "closed-sines-cosines")

    @property
    def position_width(self) -> int:
        """The width of embedded positions."""
        return self.width if self.position_last else self.embedding_width or self.width

    @property
    def state_width(self) -> int:
        """The width of the states that heads read."""
        return self.output_width or self.width

    @property
    def has_distance_scores(self) -> bool:
        """Whether scores depend on the distance of tokens, apart from what is in queries and keys."""
        return bool(self.distances) or self.position in ("relative", "alibi")

    @property
    def active_mlp_width(self) -> int:
        """The most inner features that a token uses in the MLP of a layer."""
        experts = self.experts
        if experts is None:
            return self.mlp_width
        used = experts.chosen * experts.width + experts.shared_width
        return max(used, self.mlp_width) if not all(experts.layers) else used

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are scaled products and nothing else, so that a fused kernel can compute attention."""
        return not (self.score_cap or self.sinks)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state that is not in the cache of keys and values."""
        return self.recurrent is not None and bool(self.recurrent_layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, mixer in enumerate(self.mixers) if mixer not in ("attention", "none"))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.depth) if self.mixer(layer) == "attention")

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are in the cache."""
        return tuple(layer for layer in self.attention_layers if self.key_layer(layer) == layer)

    @property
    def read_layers(self) -> frozenset[int]:
        """The layers whose keys and values later layers read."""
        return frozenset(source for layer, source in enumerate(self.key_layers) if source < layer)

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers with keys of their own that are windowed. Layers that read their keys are windowed, too."""
        return tuple(filter(self.is_windowed, self.cached_layers))

    def of_layer(self, layer: int) -> "ModelConfig":
        """The configuration with the sizes of one layer."""
        if not self.layer_shapes:
            return self
        shape = self.layer_shapes[layer]
        return replace(self, kv_heads=shape.kv_heads, head_width=shape.head_width, mlp_width=shape.mlp_width)

    def key_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.key_layers[layer] if self.key_layers else layer

    def has_tied_values(self, layer: int) -> bool:
        return bool(self.tied_values) and self.tied_values[layer]

    def mixer(self, layer: int) -> MixerName:
        return self.mixers[layer] if self.mixers else "attention"

    def has_mlp(self, layer: int) -> bool:
        return not self.mlps or self.mlps[layer]

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.is_in(layer)

    def is_windowed(self, layer: int) -> bool:
        return bool(self.window) and (not self.windowed or self.windowed[layer])

    def has_query_key_norm(self, layer: int) -> bool:
        listed = self.query_key_norm_layers
        return bool(self.query_key_norm) and (not listed or listed[layer])

    def is_rotated(self, layer: int) -> bool:
        return self.position == "rotary" and (not self.rotated or self.rotated[layer])


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Two stacks over one vocabulary; `decoder` is causal. With `shared` they have one width and one matrix of token
    embeddings. `start` is the token before the first generated one.

    Logits are the products of states with the output matrix, which is the decoder's embedding matrix if `tied`. States
    are multiplied by `output_scale` before; with `output_bias` a bias for each token is added. The decoder's
    `logit_cap` limits them. With `wraps_last` a decoder that reads the encoder's text has the last token of the text
    before it, in place of `start`.
    """

    encoder: ModelConfig
    decoder: ModelConfig
    start: int
    shared: bool = True
    tied: bool = True
    output_scale: float = 1.0
    output_bias: bool = False
    wraps_last: bool = False
