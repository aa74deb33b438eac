"""Turns a network into one of its shares: parameters are cut, and modules are replaced where shares are combined.
Parameters keep their names, so they can be loaded by name."""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from ..network.heads import LanguageHead
from ..network.mlp import MLP
from ..network.positions import LinearBias
from ..network.transformer import PreBlock, Transformer
from .process_group import ProcessGroup
from .share import Cut, Share, parameter_cut, share_config


class RowParallelLinear(nn.Module):
    """A linear layer of which each process has a range of the inputs; the bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.group = linear.weight, linear.bias, group

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs of the share] to [T, out]."""
        out = self.group.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


class ParallelEmbedding(nn.Module):
    """Token embeddings of which each process has a range of the tokens; other tokens give zeros, and the results are
    summed."""

    def __init__(self, table: nn.Embedding, token_range: range, group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.token_range, self.group = table.weight, token_range, group

    def forward(self, tokens: Tensor) -> Tensor:
        """[T] to [T, W]."""
        foreign = (tokens < self.token_range.start) | (tokens >= self.token_range.stop)
        own = F.embedding((tokens - self.token_range.start).masked_fill_(foreign, 0), self.weight)
        return self.group.all_reduce(own.masked_fill_(foreign[:, None], 0))


class ParallelLogits(nn.Module):
    """Logits of which each process has a range of the tokens; the first process gets all of them."""

    def __init__(self, linear: nn.Linear, counts: list[int], group: ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias, self.counts, self.group = linear.weight, linear.bias, counts, group

    def forward(self, states: Tensor) -> Tensor:
        """[M, W] to [M, V] on the first process, to their own share of them on the others."""
        return self.group.gather_columns(F.linear(states, self.weight, self.bias), self.counts)


def shard_network(network: Transformer, head: nn.Module, group: ProcessGroup) -> dict[str, Cut]:
    """Split both modules in place, on the meta device or loaded. Returns how their parameters were cut, by name.

    UnsupportedError if the network cannot be split among so many processes.
    """
    cuts = cut_parameters(network, head, group.share)
    insert_collectives(network, head, group)
    return cuts


def cut_parameters(network: Transformer, head: nn.Module, share: Share) -> dict[str, Cut]:
    """Cut the parameters alone; tied ones stay tied."""
    whole, generates = network.config, isinstance(head, LanguageHead)
    network.config = share_config(whole, share)
    cuts, cut_once = dict[str, Cut](), dict[nn.Parameter, nn.Parameter]()
    for prefix, module in (("", network), ("head.", head)):
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if how := parameter_cut(prefix + name, whole, share, generates):
                cuts[prefix + name] = how
                small = cut_once.setdefault(parameter, nn.Parameter(how(parameter.detach()).clone()))
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, small)
    if isinstance(network.distances, LinearBias):
        asking, _ = share.heads(whole)
        network.distances.rates = network.distances.rates[asking.start : asking.stop]
    return cuts


def insert_collectives(network: Transformer, head: nn.Module, group: ProcessGroup) -> None:
    """Replace the modules whose shares are combined, after their parameters were cut."""
    for module in network.blocks:
        block = cast(PreBlock, module)
        block.attention.output = cast(nn.Linear, RowParallelLinear(block.attention.output, group))
        assert isinstance(block.mlp, MLP)
        block.mlp.down = cast(nn.Linear, RowParallelLinear(block.mlp.down, group))
    if isinstance(head, LanguageHead):
        share, token_range = group.share, network.config.vocab_size
        counts = [len(Share(rank, share.world).range_of(token_range)) for rank in range(share.world)]
        network.tokens = cast(nn.Embedding, ParallelEmbedding(network.tokens, share.range_of(token_range), group))
        head.output = cast(nn.Linear, ParallelLogits(head.output, counts, group))
