"""What a network is made of: the only description of an architecture.  No other module asks for a family's name."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to contexts longer than the pretrained one.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595).  `llama3` leaves the high
    frequencies alone, divides the low ones and blends between (Llama 3.1 model card).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One transformer body.  Widths count features, positions and windows count tokens."""

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    max_positions: int
    causal: bool
    position: Literal["learned", "sinusoidal", "sines-cosines", "rotary", "bias", "distance", "relative", "alibi"] = (
        "learned"  # sinusoidal: a sine beside its cosine; bias: of `distances`, and nothing else
    )
    position_offset: int = 0
    distances: int = 0  # kinds of them, for which scores have a bias, or a vector if that is their `position`; 0: none
    farthest: int = 128  # tokens, from which on all distances are of one kind; about, where kinds are counted
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int = 0  # how many tokens a windowed layer sees, itself included; 0: no layer is windowed
    windowed: tuple[bool, ...] = ()  # which layers are; empty: all of them, if `window` is set
    window_rope_base: float = 0.0  # rotary base of the windowed layers where it differs; 0: the same
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # of "layer"
    norm_order: Literal["pre", "post", "sandwich"] = "pre"
    opening_norm: bool = True  # before the first attention, of "pre" and "sandwich"
    embedding_norm: bool = False
    embedding_width: int = 0  # of what is projected to `width` before the first layer; 0: it has that width already
    embedding_scale: float = 1.0
    query_key_norm: bool = False
    score_scale: float = 0.0  # 0: 1 / sqrt(head_width)
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    gated_mlp: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    segments: int = 0
    shared: bool = False  # all layers have the same weights
    has_cross_attention: bool = False  # its layers look at what another body has read, too

    @property
    def has_distance_scores(self) -> bool:
        """Whether scores depend on how far tokens are apart, besides what is in queries and keys."""
        return bool(self.distances) or self.position in ("relative", "alibi")

    def is_windowed(self, layer: int) -> bool:
        return bool(self.window) and (not self.windowed or self.windowed[layer])


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Two bodies of one width over one vocabulary, whose tokens have the same vectors on both sides; `decoder` is
    causal.  `start` is the token that stands before the first that is written.

    How likely a token is is the product of a state with its row of a matrix, which is that of the embeddings if `tied`.
    States are multiplied by `output_scale` before; with `output_bias` a number for each token is added.
    """

    encoder: ModelConfig
    decoder: ModelConfig
    start: int
    tied: bool = True
    output_scale: float = 1.0
    output_bias: bool = False
