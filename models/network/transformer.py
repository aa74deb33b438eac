"""The transformer stack for every architecture: embeddings, blocks, a final norm. Heads are in heads.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from .attention import Attention, AttentionContext, has_pieces
from .experts import MixtureOfExperts, build_mlp
from .mlp import MLP, MLP_ACTIVATIONS
from .model_config import ModelConfig
from .positions import Rotary, build_distances, build_embedding, build_rotary
from .ragged import RaggedBatch
from .recurrent_mixers import RecurrentMixer, build_mixer
from .work_pieces import Pieces, finish


def build_norm(config: ModelConfig, width: int = 0) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(width or config.width, config.norm_eps, elementwise_affine=config.norm_weight)
    return nn.LayerNorm(
        width or config.width, config.norm_eps, elementwise_affine=config.norm_weight, bias=config.norm_bias
    )


def build_mlp_norm(config: ModelConfig, layer: int) -> nn.Module:
    """The norm before the MLP of a layer, without weights if the parts of its mixture have their own."""
    own = config.experts is not None and config.experts.own_norms and config.has_experts(layer)
    return build_norm(replace(config, norm_weight=False) if own else config)


class PreBlock(nn.Module):
    """Norm before each part (Xiong et al. 2020, arXiv:2002.04745)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention: Attention | RecurrentMixer = build_mixer(config, layer)
        self.attention_norm = build_norm(config) if layer or config.opening_norm else nn.Identity()
        self.mlp: MLP | MixtureOfExperts = build_mlp(config, layer)
        self.mlp_norm = build_mlp_norm(config, layer)
        self.residual_scale = config.residual_scale

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]; in the last layer to the output rows."""
        return finish(self.read(x, frame))

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As `forward`, in pieces."""
        attended = yield from self.attention.read(self.attention_norm(x), frame)
        x = frame.select_output_rows(self.add(x, attended), self.layer)
        return self.add(x, (yield from self.transform(self.mlp_norm(x), frame)))

    def transform(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """The output [M, W] of the MLP."""
        return (yield from frame.map_rows(self.mlp, x, self.mlp.products, self.layer))

    def add(self, x: Tensor, part: Tensor) -> Tensor:
        """The residual sum [T, W] with the output of a part."""
        return x + part if self.residual_scale == 1.0 else x + part * self.residual_scale


class PostBlock(PreBlock):
    """Norm after each residual sum, as in the first Transformer (Vaswani et al. 2017) and BERT."""

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = self.add(x, (yield from self.attention.read(x, frame)))
        x = self.attention_norm(frame.select_output_rows(x, self.layer))
        return self.mlp_norm(self.add(x, (yield from self.transform(x, frame))))  # type: ignore[no-any-return]


class SandwichBlock(PreBlock):
    """Norm before each part and after it, before the sum (Ding et al. 2021, arXiv:2105.13290)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_post_norm, self.mlp_post_norm = build_norm(config), build_norm(config)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        attended = self.attention_post_norm((yield from self.attention.read(self.attention_norm(x), frame)))
        x = frame.select_output_rows(self.add(x, attended), self.layer)
        return self.add(x, self.mlp_post_norm((yield from self.transform(self.mlp_norm(x), frame))))


class ScaledSandwichBlock(SandwichBlock):
    """A sandwich block that adds an embedding of each token for this layer behind its MLP, through a gate (Gemma 3n),
    and multiplies its output by a number of its own (Gemma 4); see ModelConfig.layer_embedding and layer_scale."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None
        self.reads_inputs, inner = bool(config.layer_embedding), config.layer_embedding
        if inner:
            self.input_gate, self.input_up = (
                nn.Linear(config.width, inner, bias=False),
                nn.Linear(inner, config.width, bias=False),
            )
            self.input_norm, self.input_activation = build_norm(config), MLP_ACTIVATIONS[config.activation]

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = yield from super().read(x, frame)
        if self.reads_inputs:
            gate = self.input_activation(self.input_gate(x))
            x = self.add(x, self.input_norm(self.input_up(gate * frame.layer_input(self.layer))))
            yield
        return x if self.scale is None else x * self.scale


class LayerEmbedding(nn.Module):
    """Embeddings of tokens for each layer: from a table of their own, and projected from the embeddings of the network
    (Gemma 3n). Both have a variance of about one, and so has their sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = config.layer_embedding
        self.table = nn.Embedding(config.vocab_size, config.depth * self.inner)
        self.projection = nn.Linear(config.width, config.depth * self.inner, bias=False)
        self.norm = build_norm(config, self.inner)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """[T] tokens and their embeddings [T, W] to [T, depth, P]."""
        own = (self.table(tokens) * self.inner**0.5).unflatten(-1, (-1, self.inner))
        projected = (self.projection(x) * x.size(-1) ** -0.5).unflatten(-1, (-1, self.inner))
        out: Tensor = (self.norm(projected) + own) * 2**-0.5
        return out


class ConvolutionBlock(PostBlock):
    """A post-norm block with a convolution of its input beside it, whose output is added and normed again (DeBERTa's
    second version; He et al. 2021, arXiv:2006.03654).

    It takes whole sequences.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.convolution = nn.Conv1d(config.width, config.width, config.convolution, groups=config.convolution_groups)
        self.convolution_activation = CONVOLUTION_ACTIVATIONS[config.convolution_activation]
        self.convolution_norm = build_norm(config)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        neighbours = find_neighbours(frame.batch, self.convolution.kernel_size[0])  # [T, C]
        padded = torch.cat((x, x.new_zeros(1, x.size(1))))
        products = self.convolution.weight.numel()
        beside = yield from frame.map_rows(lambda rows, _: self.convolve(padded[rows].mT), neighbours, products)
        beside = frame.select_output_rows(beside, self.layer)
        return self.convolution_norm((yield from super().read(x, frame)) + beside)  # type: ignore[no-any-return]

    def convolve(self, windows: Tensor) -> Tensor:
        """[T, W, C] rows and those around each, to [T, W]."""
        return self.convolution_activation(self.convolution(windows).squeeze(-1))


class BottleneckPreBlock(PreBlock):
    """A pre-norm block with a narrow MLP after the MLP; see ModelConfig.bottleneck."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.bottleneck = MLP(replace(config, gated_mlp=False), config.bottleneck)
        self.adds_to_norm = config.bottleneck_adds_to_norm

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        return (yield from self.pass_bottleneck((yield from super().read(x, frame)), frame))

    def pass_bottleneck(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """[M, W] the residual sum after the MLP, to the sum after the narrow one."""
        normed, narrow = self.mlp_norm(x), self.bottleneck
        out = yield from frame.map_rows(lambda rows, _: narrow(rows), normed, narrow.products, self.layer)
        return (normed if self.adds_to_norm else x) + out


class BottleneckPostBlock(BottleneckPreBlock):
    """The same with a norm after each residual sum; that after the MLP is used twice."""

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = self.add(x, (yield from self.attention.read(x, frame)))
        x = self.attention_norm(frame.select_output_rows(x, self.layer))
        x = yield from self.pass_bottleneck(self.add(x, (yield from self.transform(x, frame))), frame)
        return self.mlp_norm(x)  # type: ignore[no-any-return]


BOTTLENECK_BLOCKS: dict[str, type[PreBlock]] = {"pre": BottleneckPreBlock, "post": BottleneckPostBlock}


def find_neighbours(batch: RaggedBatch, count: int) -> Tensor:
    """[T, count] the rows around each row in its sequence; T, one more than the last row, beyond its ends."""
    positions, total = batch.positions, batch.starts[-1]
    lengths = torch.tensor(batch.lengths, device=positions.device)
    ends = lengths.repeat_interleave(lengths, output_size=total)[:, None]  # [T, 1]
    offsets = torch.arange(count, device=positions.device) - count // 2
    places = positions[:, None] + offsets  # [T, count] in its sequence
    rows = torch.arange(total, device=positions.device)[:, None] + offsets
    return torch.where((places >= 0) & (places < ends), rows, total)


CONVOLUTION_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**MLP_ACTIVATIONS, "tanh": torch.tanh}


class InnerBlock(PreBlock):
    """Norm after each part, before the sum, as in OLMo 2 (arXiv:2501.00656)."""

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        attended = self.attention_norm((yield from self.attention.read(x, frame)))
        x = frame.select_output_rows(self.add(x, attended), self.layer)
        return self.add(x, self.mlp_norm((yield from self.transform(x, frame))))


class ParallelBlock(PreBlock):
    """Attention and MLP of the same input, each behind its norm, as in GPT-J and GPT-NeoX (arXiv:2204.06745)."""

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        inner = self.mlp_norm(frame.select_output_rows(x, self.layer))
        attended = yield from self.attention.read(self.attention_norm(x), frame)
        x = frame.select_output_rows(self.add(x, attended), self.layer)
        return self.add(x, (yield from self.transform(inner, frame)))


class MixerBlock(PreBlock):
    """A pre-norm block without an MLP, as in Mamba-2 (arXiv:2405.21060)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.layer, self.residual_scale = layer, config.residual_scale
        self.attention, self.attention_norm = build_mixer(config, layer), build_norm(config)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        attended = yield from self.attention.read(self.attention_norm(x), frame)
        return frame.select_output_rows(self.add(x, attended), self.layer)


class MLPBlock(PreBlock):
    """A pre-norm block in which rows do not mix, as in Nemotron-H (arXiv:2504.03624)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.layer, self.residual_scale = layer, config.residual_scale
        self.mlp, self.mlp_norm = build_mlp(config, layer), build_norm(config)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = frame.select_output_rows(x, self.layer)
        return self.add(x, (yield from self.transform(self.mlp_norm(x), frame)))


BLOCKS: dict[str, type[PreBlock]] = {
    "pre": PreBlock,
    "post": PostBlock,
    "sandwich": SandwichBlock,
    "inner": InnerBlock,
    "parallel": ParallelBlock,
}


def share_parameters(blocks: nn.ModuleList) -> None:
    """Give all blocks the parameters of the first (Lan et al. 2020, arXiv:1909.11942)."""
    for block in list(blocks)[1:]:
        for module, first in zip(block.modules(), blocks[0].modules(), strict=True):
            for name, parameter in first.named_parameters(recurse=False):
                module.register_parameter(name, parameter)


class Transformer(nn.Module):
    """Token ids to states. `forward(batch)`: T packed rows to [T, W], or to the output rows [M, W]."""

    block_classes: ClassVar[Mapping[str, type[PreBlock]]] = BLOCKS  # by the order of norms

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embedding_width or config.width
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.segments = nn.Embedding(config.segments, width) if config.segments else None
        self.position = build_embedding(config)
        self.distances = build_distances(config)
        self.embedding_norm = build_norm(config, width) if config.embedding_norm else nn.Identity()
        self.projection = nn.Linear(width, config.width) if config.embedding_width else nn.Identity()
        self.layer_embedding = LayerEmbedding(config) if config.layer_embedding else None
        self.blocks = nn.ModuleList(self.choose_block(config, layer)(config, layer) for layer in range(config.depth))
        if config.shared:
            share_parameters(self.blocks)
        closes = config.closing_norm and config.norm_order != "post"
        self.final_norm = build_norm(config) if closes else nn.Identity()
        narrowed = config.output_width
        self.output_projection = nn.Linear(config.width, narrowed, bias=False) if narrowed else nn.Identity()
        kinds = (False, True) if config.window_rope_base else (False,)
        rotary = config.position == "rotary"
        self.rotaries = nn.ModuleList(build_rotary(config, windowed) for windowed in kinds if rotary)

    def choose_block(self, config: ModelConfig, layer: int) -> type[PreBlock]:
        if config.mixer(layer) == "none":
            return MLPBlock
        if not config.has_mlp(layer):
            return MixerBlock
        if config.recurrent is not None and config.recurrent.is_pre_norm and config.mixer(layer) != "attention":
            return PreBlock
        if config.bottleneck:
            return BOTTLENECK_BLOCKS[config.norm_order]
        if config.layer_embedding or config.layer_scale:
            return ScaledSandwichBlock
        return ConvolutionBlock if config.convolution and layer == 0 else self.block_classes[config.norm_order]

    def outer_parts(self) -> nn.ModuleList:
        """All that it has beside the token embeddings and the blocks."""
        return nn.ModuleList(part for name, part in self.named_children() if name not in ("tokens", "blocks"))

    def forward(self, batch: RaggedBatch) -> Tensor:
        x, frame = finish(self.embed_in_pieces(batch, has_pieces(batch)))
        for block in self.blocks:
            x = block(x, frame)
        return self.close(x)

    def forward_in_pieces(self, batch: RaggedBatch) -> Pieces[Tensor]:
        """As `forward`, with the same numbers; each piece is bounded work if `has_pieces`, or at most a block."""
        x, frame = yield from self.embed_in_pieces(batch, has_pieces(batch))
        for block in self.blocks:
            x = yield from cast(PreBlock, block).read(x, frame)
            yield
        return self.close(x)

    def close(self, x: Tensor) -> Tensor:
        """[M, W] the output of the last block to the states that heads read."""
        out: Tensor = self.output_projection(self.final_norm(x))
        return out

    def embed(self, batch: RaggedBatch) -> tuple[Tensor, AttentionContext]:
        """The input of the first block: embeddings [T, W], and the context that all blocks share. Each group of
        sequences attends at once."""
        return finish(self.embed_in_pieces(batch, in_pieces=False))

    def embed_in_pieces(self, batch: RaggedBatch, in_pieces: bool) -> Pieces[tuple[Tensor, AttentionContext]]:
        """As `embed`; `in_pieces`: the context is for layers that are computed in pieces of bounded work."""
        x = self.tokens(batch.tokens) if batch.embedded is None else batch.embedded
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.segments is not None:
            x = x + (self.segments.weight[0] if batch.segments is None else self.segments(batch.segments))
        if self.config.position_last:
            x = self.position(self.projection(self.embedding_norm(x)), batch.positions)
        else:
            x = self.projection(self.embedding_norm(self.position(x, batch.positions)))
        yield
        positions = (cast(list[Rotary], list(self.rotaries)), self.distances)
        frame = yield from AttentionContext.of(batch, self.config, positions, x.dtype, in_pieces)
        return x, frame if self.layer_embedding is None else replace(
            frame, layer_inputs=self.layer_embedding(batch.tokens, x)
        )
