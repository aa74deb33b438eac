"""Makes a network's answers independent of the batch, to the last bit: `make_invariant(network, head)`.

The same tokens give the same states and logits whatever else the batch contains, in chunks of any size, with cached
keys or recomputed ones. Linear layers, activations and attention are replaced from outside; norms, embeddings,
rotations and softmax are computed row by row by torch already. No library guarantees this of its kernels, so the shapes
of this network are tested on this machine before the first request (safe_sizes.py).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.errors import InvarianceError
from ..core.turns import YieldTurn, keep_turn
from ..network.attention import Attention
from ..network.embedding_head import DenseLayer
from ..network.heads import LanguageHead, MaskHead, TokenHead
from ..network.mlp import MLP
from ..network.ragged import RaggedBatch
from ..network.sequence_spans import Kernel, SequenceSpans
from ..network.transformer import Transformer
from .invariant_attention import self_test_attention
from .invariant_linear import (
    InvariantActivation,
    InvariantLinear,
    find_safe_sizes,
    self_test_rows,
    store_transposed,
    widen_linear,
)
from .varlen_probe import self_test_kernel

__all__ = ["make_head_invariant", "make_invariant", "self_test_kernel"]

SafeSizes = dict[tuple[object, ...], tuple[int, ...]]  # the safe numbers of rows, by the shape of a matrix

TEST_LENGTHS = (2, 7, 20)  # lengths of the sequences that the self-test computes alone and together


@torch.inference_mode()
def make_invariant(
    network: Transformer, head: nn.Module, yield_turn: YieldTurn = keep_turn, kernel: Kernel | None = None
) -> None:
    """Replace what depends on the batch in both modules, in place, and test the rest.

    `kernel` is what will attend; without it, attention is computed in groups.
    It takes about a second; `yield_turn` is called between parts of the work, often, so that the thread can do other
    work. Call it in the thread that will compute, with the number of threads that thread will have. InvarianceError
    names the kernel that fails.
    """
    if network.config.static:  # row by row already
        make_head_invariant(head, yield_turn=yield_turn)
        return
    if network.config.position in ("distance", "relative"):
        raise InvarianceError("products with distance vectors are not made invariant; serve it without `deterministic`")
    _replace_linears(network, head, sizes={}, yield_turn=yield_turn)
    _replace_activation(head)
    weight, config = network.tokens.weight, network.config
    if kernel is None:
        _replace_attention(network, yield_turn)
    else:
        self_test_kernel(kernel, config, weight)
    for module in network.modules():
        if isinstance(module, MLP):
            module.activation = InvariantActivation(module.activation)
    norms = nn.ModuleList(part for name, part in network.blocks[0].named_children() if name.endswith("_norm"))
    for inner in [module for module in network.modules() if isinstance(module, MLP)][:1]:
        self_test_rows("the activation", inner.activation, inner.width, weight)
    self_test_rows("the norm", norms[-1], config.width, weight)
    self_test_rows("softmax", lambda x: x.softmax(dim=-1), config.width, weight)
    yield_turn()
    self_test(network, head, yield_turn, kernel)


@torch.inference_mode()
def make_head_invariant(
    head: nn.Module, safe_sizes: SafeSizes | None = None, yield_turn: YieldTurn = keep_turn
) -> None:
    """As `make_invariant`, for a head alone, over states that are invariant already.

    `safe_sizes` collects the tested shapes, for further heads.
    """
    if not isinstance(head, LanguageHead):
        sizes = {} if safe_sizes is None else safe_sizes
        _replace_linears(head, sizes=sizes, yield_turn=yield_turn)
        _replace_activation(head)


def _replace_attention(network: Transformer, yield_turn: YieldTurn) -> None:
    """By products of fixed sizes, tested for each shape of heads."""
    config, device = network.config, network.tokens.weight.device
    shapes = {(each.head_width, each.heads // each.kv_heads) for each in map(config.of_layer, config.attention_layers)}
    mixes = {}
    for shape in sorted(shapes):
        mixes[shape] = self_test_attention(*shape, device)
        yield_turn()
    for module in network.modules():
        if isinstance(module, Attention):
            own = module.config
            module.mix = mixes[own.head_width, own.heads // own.kv_heads]


def _replace_activation(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, MaskHead | TokenHead | DenseLayer) or (
            isinstance(module, LanguageHead) and module.dense is not None
        ):
            module.activation = InvariantActivation(module.activation)


def _replace_linears(*modules: nn.Module, sizes: SafeSizes, yield_turn: YieldTurn = keep_turn) -> None:
    for owner, name, linear in list(_linears(*modules)):
        wide = widen_linear(linear)
        store_transposed(wide.weight, yield_turn)
        shape = (wide.in_features, wide.out_features, wide.bias is None)
        if shape not in sizes:
            sizes[shape] = find_safe_sizes(wide, yield_turn)
        setattr(owner, name, InvariantLinear(wide, sizes[shape], linear.out_features))
        yield_turn()


def _linears(*modules: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer, with the module and the name that hold it."""
    for module in modules:
        for owner in module.modules():
            for name, child in owner.named_children():
                if isinstance(child, nn.Linear):
                    yield owner, name, child


def self_test(network: Transformer, head: nn.Module, yield_turn: YieldTurn, kernel: Kernel | None = None) -> None:
    """InvarianceError unless three texts give the same states and logits alone and together."""
    config = network.config
    lengths = [min(length, config.max_positions) for length in TEST_LENGTHS]
    sequences = [[(7 * index + length) % config.vocab_size for index in range(length)] for length in lengths]
    found = []
    for some in (sequences, *([sequence] for sequence in sequences)):
        found.append(_last_outputs(network, head, some, kernel))
        yield_turn()
    together, *alone = found
    if not torch.equal(together, torch.cat(alone)):
        raise InvarianceError("texts get other numbers in a batch than alone, although each kernel passed its test")


def _last_outputs(network: Transformer, head: nn.Module, sequences: list[list[int]], kernel: Kernel | None) -> Tensor:
    """[N, W or V] the last state of each sequence, or the logits after it."""
    batch = RaggedBatch.of(sequences, device=network.tokens.weight.device)
    if kernel is not None:
        starts = torch.tensor(batch.starts, dtype=torch.int32, device=batch.tokens.device)
        batch = replace(batch, spans=SequenceSpans(kernel, starts, starts, max(batch.lengths), max(TEST_LENGTHS)))
    last = torch.tensor([start - 1 for start in batch.starts[1:]], device=batch.tokens.device)
    states: Tensor = network(batch)[last]
    return head(states) if isinstance(head, LanguageHead) else states
