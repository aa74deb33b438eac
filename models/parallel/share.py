"""Which part of a network each process computes, from the configuration and the number of processes.

A share is a range, and ranges may have different lengths: three key heads are split between two processes as two and
one. The first share is never smaller than another, so it is used to plan memory.
"""

import re
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig

SPLIT_BY_HEADS = re.compile(r"blocks\.\d+\.attention\.(query|key|value|output)\.(weight|bias)")
SPLIT_BY_HEAD_ROWS = re.compile(
    r"blocks\.\d+\.attention\.(query_norm\.weight|query_norm\.bias|sinks|key_norm\.weight|key_norm\.bias)"
)
SPLIT_BY_FEATURES = re.compile(r"blocks\.\d+\.mlp\.(up|gate|down)\.(weight|bias)")
SPLIT_BY_TOKENS = ("tokens.weight", "head.output.weight", "head.output.bias")  # of a generator
# Of models.network.positions.DistanceBias: one column for each head.
HEAD_BIAS_TABLE = re.compile(r"(blocks\.\d+\.attention\.)?distances\.table\.weight")
SPLIT_BY_INPUTS = ("output", "down")  # split by inputs; the others by outputs


@dataclass(frozen=True)
class Share:
    """The share of process `rank` of `world`, counted from 0."""

    rank: int
    world: int

    def range_of(self, count: int) -> range:
        """The range of `count` ordered items in this share."""
        start, stop = (-(-count * rank // self.world) for rank in (self.rank, self.rank + 1))
        return range(start, stop)

    def heads(self, config: ModelConfig) -> tuple[range, range]:
        """The ranges of query heads and key heads: whole groups that share keys. If there are fewer key heads than
        shares, several shares have the same key head and divide its query heads."""
        shared = config.heads // config.kv_heads
        if config.kv_heads >= self.world:
            kept = self.range_of(config.kv_heads)
            return range(kept.start * shared, kept.stop * shared), kept
        each = self.world // config.kv_heads
        own = self.rank // each
        asking = Share(self.rank % each, each).range_of(shared)
        return range(own * shared + asking.start, own * shared + asking.stop), range(own, own + 1)


@dataclass(frozen=True)
class Cut:
    """A range of one dimension of a tensor."""

    dim: int
    span: range

    def __call__(self, tensor: Tensor) -> Tensor:
        """The range, without a copy."""
        return tensor.narrow(self.dim, self.span.start, len(self.span))


def share_config(config: ModelConfig, share: Share) -> ModelConfig:
    """The configuration of the share as a network of its own. UnsupportedError if the network cannot be split among so
    many."""
    if reason := split_problem(config, share.world):
        raise UnsupportedError(reason)
    asking, kept = share.heads(config)
    return replace(config, heads=len(asking), kv_heads=len(kept), mlp_width=len(share.range_of(config.mlp_width)))


def split_problem(config: ModelConfig, world: int) -> str:
    """Why such a network cannot be split among `world` processes, and which numbers are possible; empty if it can."""
    if config.experts is not None and world > 1:
        return "its MLPs are mixtures of experts, which are not split, so tensor_parallel would have to be 1"
    if config.latent is not None and world > 1:
        return "its attention is latent, which is not split, so tensor_parallel would have to be 1"
    if config.is_recurrent and world > 1:
        return "it has recurrent layers, which are not split, so tensor_parallel would have to be 1"
    if config.attention_gate and world > 1:
        return "its attention has a gate, which is not split, so tensor_parallel would have to be 1"
    if (config.layer_shapes or config.key_layers) and world > 1:
        return "its layers differ in their heads, which are not split, so tensor_parallel would have to be 1"
    if config.value_norm and world > 1:
        return "its values are normed, which is not split, so tensor_parallel would have to be 1"
    if config.layer_embedding and world > 1:
        return "its layers read embeddings, which are not split, so tensor_parallel would have to be 1"
    if config.global_tokens and world > 1:
        return "its global tokens have projections, which are not split, so tensor_parallel would have to be 1"
    if config.bottleneck and world > 1:
        return "a narrow MLP follows that of each layer, which is not split, so tensor_parallel would have to be 1"
    if config.logit_dense and world > 1:
        return "its head has a dense layer, which is not split, so tensor_parallel would have to be 1"
    if config.query_key_norm == "joint" and world > 1:
        return "its queries are normalised over all heads together, so tensor_parallel would have to be 1"
    if can_split(config, world):
        return ""
    fitting = [str(other) for other in range(1, config.heads + 1) if can_split(config, other)]
    heads = f"its {config.heads} query heads over {config.kv_heads} key heads"
    return f"{heads} cannot be shared out among {world}; right for tensor_parallel would be {', '.join(fitting)}"


def can_split(config: ModelConfig, world: int) -> bool:
    fewer, shared = world > config.kv_heads, config.heads // config.kv_heads
    if fewer and (world % config.kv_heads or world // config.kv_heads > shared):
        return False
    return world <= min(config.mlp_width, config.vocab_size)


def parameter_cut(name: str, config: ModelConfig, share: Share, generates: bool) -> Cut | None:
    """How the parameter of that name is cut; None: every process has all of it.

    The vocabulary of a generator is split, since its embeddings and logits cost as much as layers. With other heads,
    which are not split, the embeddings are not split either.
    """
    if name in SPLIT_BY_TOKENS:
        return Cut(0, share.range_of(config.vocab_size)) if generates else None
    asking, kept = share.heads(config)
    if HEAD_BIAS_TABLE.fullmatch(name) and config.position != "distance":
        return Cut(1, asking)
    if (by_head := SPLIT_BY_HEAD_ROWS.fullmatch(name)) and (
        by_head[1] == "sinks" or config.query_key_norm == "per_head"
    ):
        return Cut(0, kept if by_head[1].startswith("key") else asking)
    found = SPLIT_BY_HEADS.fullmatch(name) or SPLIT_BY_FEATURES.fullmatch(name)
    if found is None or (found[1] in SPLIT_BY_INPUTS and found[2] == "bias"):
        return None
    width = config.head_width
    heads = {"query": asking, "output": asking, "key": kept, "value": kept}.get(found[1])
    of = range(heads.start * width, heads.stop * width) if heads else share.range_of(config.mlp_width)
    return Cut(1 if found[1] in SPLIT_BY_INPUTS else 0, of)
