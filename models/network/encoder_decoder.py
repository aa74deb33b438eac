"""The encoder-decoder Transformer (Vaswani et al. 2017, arXiv:1706.03762).

The decoder is the same stack with a third part in each block, cross-attention. A decoding step uses a cache, as a
generator's does; keys and values of the source are computed once, when it has been encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import AttentionContext, group_sequences, has_pieces
from .cache import CacheView, ContiguousCache, MemoryView, SourceMemory
from .cross_attention import CrossAttention, build_cross_context
from .model_config import EncoderDecoderConfig, ModelConfig
from .ragged import RaggedBatch
from .transformer import PreBlock, Transformer, build_norm
from .work_pieces import Pieces, finish

INITIAL_CAPACITY = 16  # initial capacity of a target's cache in tokens; it grows by a quarter, at least by this many


class PreDecoderBlock(PreBlock):
    """Self-attention, cross-attention, MLP; with a norm before each part."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.cross, self.cross_norm = CrossAttention(config, layer), build_norm(config)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = x + (yield from self.attention.read(self.attention_norm(x), frame))
        x = frame.select_output_rows(x + (yield from self.cross.read(self.cross_norm(x), frame)), self.layer)
        return x + (yield from self.transform(self.mlp_norm(x), frame))


class PostDecoderBlock(PreDecoderBlock):
    """The same parts with a norm after each residual sum, as in the first Transformer."""

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = self.attention_norm(x + (yield from self.attention.read(x, frame)))
        x = self.cross_norm(frame.select_output_rows(x + (yield from self.cross.read(x, frame)), self.layer))
        return self.mlp_norm(x + (yield from self.transform(x, frame)))  # type: ignore[no-any-return]


class SandwichDecoderBlock(PreDecoderBlock):
    """The same parts with a norm before each part and after it, before the sum."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_post_norm, self.cross_post_norm, self.mlp_post_norm = (build_norm(config) for _ in range(3))

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        x = x + self.attention_post_norm((yield from self.attention.read(self.attention_norm(x), frame)))
        crossed = self.cross_post_norm((yield from self.cross.read(self.cross_norm(x), frame)))
        x = frame.select_output_rows(x + crossed, self.layer)
        return x + self.mlp_post_norm((yield from self.transform(self.mlp_norm(x), frame)))  # type: ignore[no-any-return]


class TransformerDecoder(Transformer):
    """The decoder stack, for batches with a source memory."""

    block_classes: ClassVar[Mapping[str, type[PreBlock]]] = {
        "pre": PreDecoderBlock,
        "post": PostDecoderBlock,
        "sandwich": SandwichDecoderBlock,
    }

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """The cross-attention of each block."""
        return [cast(PreDecoderBlock, block).cross for block in self.blocks]

    def build_memory(self, states: Tensor, sources: RaggedBatch, target_rows: Sequence[int]) -> Pieces[SourceMemory]:
        """The memory of sources, from the encoder's states [T, W]; `target_rows` are the numbers of target rows that
        attend to each at once. What each block reads is a piece."""
        kept = []
        for part in self.cross_attentions:
            kept.append((yield from part.project_source(states, in_pieces=has_pieces(sources))))
            yield
        return lay_out_memory(kept, sources, target_rows)

    def build_layer_memory(
        self, layer: int, states: Tensor, sources: RaggedBatch, target_rows: Sequence[int]
    ) -> SourceMemory:
        """As `build_memory`, for one layer only: the others must not read it."""
        memory = lay_out_memory([finish(self.cross_attentions[layer].project_source(states))], sources, target_rows)
        return replace(memory, layers=memory.layers * len(self.blocks))

    def embed_in_pieces(self, batch: RaggedBatch, in_pieces: bool) -> Pieces[tuple[Tensor, AttentionContext]]:
        """As that of a stack alone; with a memory, the context has cross-attention."""
        x, frame = yield from super().embed_in_pieces(batch, in_pieces)
        if batch.memory is None:
            return x, frame
        return x, replace(frame, cross=build_cross_context(batch, batch.memory, x.dtype, in_pieces=in_pieces))


class TwoStreamDecoder(TransformerDecoder):
    """A decoder with two rows for each token, side by side: the token's own, and one that predicts the token after it;
    see models.network.attention.TwoStreamAttention. The states are those of the predicting rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.predicting = nn.Parameter(torch.zeros(1, config.width))  # the embedding of each predicting row

    def embed_in_pieces(
        self,
        batch: RaggedBatch,
        in_pieces: bool,  # noqa: ARG002
    ) -> Pieces[tuple[Tensor, AttentionContext]]:
        """The embeddings of both rows [2 T, W], and the context, which is not for pieces: a step with a cache has
        none."""
        assert batch.memory is not None
        own, frame = yield from super().embed_in_pieces(replace(batch, memory=None), in_pieces=False)
        predicting = self.embedding_norm(self.position(self.predicting, batch.positions + 1))
        output_rows = torch.arange(len(own), device=own.device) if batch.output_rows is None else batch.output_rows
        both = replace(batch, starts=tuple(2 * start for start in batch.starts), output_rows=2 * output_rows + 1)
        cross = build_cross_context(both, batch.memory, own.dtype)
        return torch.stack((own, predicting), dim=1).flatten(0, 1), replace(frame, batch=both, cross=cross)


def lay_out_memory(
    layers: Sequence[tuple[Tensor, Tensor]], sources: RaggedBatch, target_rows: Sequence[int]
) -> SourceMemory:
    """The memory with these keys and values of each layer, packed as the sources are."""
    spans = list(zip(sources.starts, sources.lengths, strict=False))
    return SourceMemory.of(layers, spans, group_sequences(target_rows, sources.lengths))


class SharedTextTransformer(Transformer):
    """An encoder-decoder that reads the same text on both sides (Lewis et al. 2020, arXiv:1910.13461, section 3.1): the
    decoder's input is the text moved by one token, behind the start token or the last one. The states are the
    decoder's.

    It takes whole texts.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config.encoder)
        self.start, self.wraps_last = config.start, config.wraps_last
        self.decoder = TransformerDecoder(config.decoder)
        self.decoder.tokens = self.tokens

    def forward(self, batch: RaggedBatch) -> Tensor:
        return finish(self.forward_in_pieces(batch))

    def forward_in_pieces(self, batch: RaggedBatch) -> Pieces[Tensor]:
        states = yield from super().forward_in_pieces(replace(batch, output_rows=None))
        memory = yield from self.decoder.build_memory(states, batch, batch.lengths)
        spans = list(zip(batch.starts, batch.lengths, strict=False))
        moved = torch.where(batch.positions == 0, self.start, batch.tokens.roll(1))
        if self.wraps_last:
            moved[[first for first, _ in spans]] = batch.tokens[[first + length - 1 for first, length in spans]]
        view = MemoryView([memory], range(len(batch.lengths)))
        written = replace(batch, tokens=moved, segments=None, additions=None, memory=view)
        return (yield from self.decoder.forward_in_pieces(written))


@dataclass(frozen=True)
class TransformerState:
    """The decoding state of N targets. It is immutable: later steps make new states.

    `written` tokens of each target are in the `cache`, which had `step_count` steps written to it when this state was
    made.
    """

    cache: ContiguousCache
    step_count: int
    written: tuple[int, ...]  # [N]
    memories: tuple[SourceMemory, ...]
    sources: tuple[int, ...]  # [N] the source text of each target, numbered across the memories
    queries: tuple[Tensor, ...]  # [N, H, D] of each layer, the queries of the last rows


class EncoderDecoder(nn.Module):
    """An encoder with a decoder, which may share its token embeddings; a models.seq2seq.protocol.Seq2Seq."""

    def __init__(self, encoder: Transformer, config: EncoderDecoderConfig) -> None:
        super().__init__()
        assert encoder.config == config.encoder
        self.config = config
        build_decoder = TwoStreamDecoder if config.decoder.two_streams else TransformerDecoder
        self.encoder, self.decoder = encoder, build_decoder(config.decoder)
        if config.shared:
            self.decoder.tokens = encoder.tokens
        self.output = nn.Linear(config.decoder.width, config.decoder.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.decoder.tokens.weight
        self.bias = nn.Parameter(torch.zeros(config.decoder.vocab_size)) if config.output_bias else None

    @property
    def start_token(self) -> int:
        return self.config.start

    def forward(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, V] logits after each row of N targets; the n-th target belongs to the n-th source."""
        return self.limit(F.linear(self.readout(sources, targets), *self.output_layer))

    def readout(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, W] the input of the output layer."""
        memory = finish(self.encode(sources, targets.lengths))
        view = MemoryView([memory], range(len(memory.lengths)))
        return self.scale_states(self.decoder(replace(targets, memory=view)))

    @property
    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """The output matrix [V, W], and a bias [V] or None."""
        return self.output.weight, self.bias

    def encode(self, sources: RaggedBatch, target_rows: Sequence[int]) -> Pieces[SourceMemory]:
        """The memory of the sources; `target_rows` are the numbers of target rows that attend to each at once."""
        assert min(sources.lengths) > 0
        states = yield from self.encoder.forward_in_pieces(sources)
        return (yield from self.decoder.build_memory(states, sources, target_rows))

    def compute_logits(self, states: Tensor) -> Tensor:
        """[T, W] to [T, V]."""
        return self.limit(F.linear(self.scale_states(states), *self.output_layer))

    def limit(self, logits: Tensor) -> Tensor:
        """Logits below the decoder's `logit_cap`."""
        cap = self.config.decoder.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def scale_states(self, states: Tensor) -> Tensor:
        return states if self.config.output_scale == 1.0 else states * self.config.output_scale

    def initial_state(self, sources: RaggedBatch) -> TransformerState:
        """The state of N targets after their sources are encoded, before the first token."""
        return finish(self.initial_state_in_pieces(sources))

    @torch.no_grad()
    def initial_state_in_pieces(self, sources: RaggedBatch) -> Pieces[TransformerState]:
        """As `initial_state`; see Transformer.forward_in_pieces."""
        count, config = len(sources.lengths), self.config.decoder
        memory = yield from self.encode(sources, [1] * count)
        nothing = memory.layers[0][0].new_zeros(count, config.heads, config.head_width)
        cache = ContiguousCache(config, count, INITIAL_CAPACITY, nothing)
        return TransformerState(cache, 0, (0,) * count, (memory,), tuple(range(count)), (nothing,) * config.depth)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """[N, V] logits after the last [N] tokens, and the new state."""
        assert max(state.written) < self.config.decoder.max_positions
        cache, count = ensure_capacity(state), len(state.written)
        positions = torch.tensor(state.written, device=tokens.device)
        slots = torch.arange(count, device=tokens.device) * cache.size + positions
        tables, seen = [[n] for n in range(count)], [written + 1 for written in state.written]
        view = MemoryView(state.memories, state.sources)
        own = CacheView(cache, cache.storage_rows(slots), tables, seen)
        batch = RaggedBatch(tokens, positions, tuple(range(count + 1)), cache=own, memory=view)
        logits = self.compute_logits(self.decoder(batch))
        cache.step_count += 1
        last_queries = tuple(queries.view(count, -1, *queries.shape[1:])[:, -1] for queries in view.queries)
        return logits, TransformerState(
            cache, cache.step_count, tuple(seen), state.memories, state.sources, last_queries
        )

    @torch.no_grad()
    def select_rows(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """The state of the sequences at [M] rows. Unused source texts are freed once they are half of a memory."""
        selected = rows.tolist()
        if selected == list(range(len(state.written))):
            return state
        memories, sources = drop_unused_sources(state.memories, [state.sources[row] for row in selected])
        written = tuple(state.written[row] for row in selected)
        last_queries = tuple(queries.index_select(0, rows) for queries in state.queries)
        return TransformerState(state.cache.select_rows(rows), 0, written, memories, sources, last_queries)

    @torch.no_grad()
    def join_states(self, states: Sequence[TransformerState]) -> TransformerState:
        """The state of all their sequences, one state after the other."""
        if len(states) == 1:
            return states[0]
        firsts = accumulate((sum(len(each.lengths) for each in state.memories) for state in states), initial=0)
        sources = tuple(first + text for first, state in zip(firsts, states, strict=False) for text in state.sources)
        memories = merge_memories([memory for state in states for memory in state.memories])
        cache = ContiguousCache.concatenate([state.cache for state in states], 0)
        last_queries = tuple(torch.cat(layer) for layer in zip(*(state.queries for state in states), strict=True))
        return TransformerState(
            cache, 0, tuple(n for state in states for n in state.written), memories, sources, last_queries
        )

    @torch.no_grad()
    def attention_weights(self, state: TransformerState) -> list[Tensor]:
        """For each of N targets the cross-attention weights [K] of its last row, the mean of heads and layers; uniform
        before the first step."""
        texts = [(memory, text) for memory in state.memories for text in range(len(memory.lengths))]
        found = []
        for n, source in enumerate(state.sources):
            memory, text = texts[source]
            first, count = memory.spans[text]
            layers = zip(self.decoder.cross_attentions, state.queries, memory.layers, strict=True)
            weights = [
                part.mean_weights(last_queries[n], keys[first : first + count])
                for part, last_queries, (keys, _) in layers
            ]
            found.append(torch.stack(weights).mean(dim=0))
        return found


def ensure_capacity(state: TransformerState) -> ContiguousCache:
    """The state's cache, if it has room for one more token and no later state has written to it; else a copy with
    room."""
    cache, longest = state.cache, max(state.written) + 1
    if longest <= cache.size and cache.step_count == state.step_count:
        return cache
    return ContiguousCache.concatenate(
        [cache], longest + max(INITIAL_CAPACITY, longest // 4) if longest > cache.size else 0
    )


def drop_unused_sources(
    memories: Sequence[SourceMemory], sources: Sequence[int]
) -> tuple[tuple[SourceMemory, ...], tuple[int, ...]]:
    """The memories reduced to the texts in use, and the new numbers of those texts. A memory is copied once half of its
    tokens are unused."""
    kept, numbers, used, first = list[SourceMemory](), dict[int, int](), set(sources), 0
    for memory in memories:
        texts = [text for text in range(len(memory.lengths)) if first + text in used]
        if 2 * sum(memory.lengths[text] for text in texts) > sum(memory.lengths):
            texts = list(range(len(memory.lengths)))
        before = sum(len(each.lengths) for each in kept)
        numbers |= {first + text: before + place for place, text in enumerate(texts)}
        if texts:
            kept.append(memory if len(texts) == len(memory.lengths) else rebuild_memory([memory], texts))
        first += len(memory.lengths)
    return tuple(kept), tuple(numbers[source] for source in sources)


def merge_memories(memories: Sequence[SourceMemory]) -> tuple[SourceMemory, ...]:
    """The same texts in few memories, each more than twice as large as the next. So a source is copied only a few
    times, not at every join."""
    kept: list[SourceMemory] = []
    for memory in memories:
        kept.append(memory)
        while len(kept) > 1 and kept[-2].row_count <= 2 * kept[-1].row_count:
            last = [kept.pop(-2), kept.pop()]
            kept.append(rebuild_memory(last, range(sum(len(each.lengths) for each in last))))
    return tuple(kept)


def rebuild_memory(memories: Sequence[SourceMemory], texts: Sequence[int]) -> SourceMemory:
    """A memory of the chosen texts, numbered across the memories."""
    bases = accumulate((memory.row_count for memory in memories), initial=0)
    spans = [(base + first, n) for base, memory in zip(bases, memories, strict=False) for first, n in memory.spans]
    layers = [
        (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
        for layer in zip(*(memory.layers for memory in memories), strict=True)
    ]
    chosen = [spans[text] for text in texts]
    return SourceMemory.of(layers, chosen, group_sequences([1] * len(chosen), [count for _, count in chosen]))
