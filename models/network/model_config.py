"""The configuration of a network, the only description of an architecture. No other module depends on a family's
name."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled to contexts longer than the pretrained one.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` keeps the high
    frequencies, divides the low ones and blends between (Llama 3.1 model card).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


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
    position: Literal["learned", "sinusoidal", "sines-cosines", "rotary", "bias", "distance", "relative", "alibi"] = (
        # Sinusoidal: sine and cosine alternate; sines-cosines: all sines first; bias: only that of `distances`.
        "learned"
    )
    position_offset: int = 0
    # Number of distance buckets, each with a bias (with a vector if `position` is "distance"); 0: none.
    distances: int = 0
    farthest: int = 128  # tokens; larger distances share a bucket (approximately so, if there are `distances`)
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int = 0  # tokens that a windowed layer sees, including the row's own; 0: no layer is windowed
    windowed: tuple[bool, ...] = ()  # which layers are windowed; empty: all, if `window` is set
    window_rope_base: float = 0.0  # rotary base of the windowed layers if it differs; 0: the same
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # of "layer"
    norm_order: Literal["pre", "post", "sandwich"] = "pre"
    opening_norm: bool = True  # a norm before the first attention, in "pre" and "sandwich"
    embedding_norm: bool = False
    embedding_width: int = 0  # width of the embeddings if they are projected to `width`; 0: `width`
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
    has_cross_attention: bool = False  # its layers have cross-attention

    @property
    def has_distance_scores(self) -> bool:
        """Whether scores depend on the distance of tokens, apart from what is in queries and keys."""
        return bool(self.distances) or self.position in ("relative", "alibi")

    def is_windowed(self, layer: int) -> bool:
        return bool(self.window) and (not self.windowed or self.windowed[layer])


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Two stacks of one width over one vocabulary with shared token embeddings; `decoder` is causal. `start` is the
    token before the first generated one.

    Logits are the products of states with the output matrix, which is the embedding matrix if `tied`. States are
    multiplied by `output_scale` before; with `output_bias` a bias for each token is added.
    """

    encoder: ModelConfig
    decoder: ModelConfig
    start: int
    tied: bool = True
    output_scale: float = 1.0
    output_bias: bool = False
