"""Decoders of recurrent encoder-decoders: without attention, with Bahdanau's and with Luong's.

A decoder runs one step of N sequences; a whole target is that step over all unfinished sequences, so training runs the
same code as generation. If no step reads the attentional output of the previous one, the cells run over the whole
target in one call, and the rest is computed for all rows at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..network.attention import group_sequences
from .decoder_state import RecurrentState
from .encoder import CELL_CLASSES
from .recurrent_config import RecurrentConfig
from .sequence_layouts import Packing, pack_step, padded_rows
from .source_attention import EncodedSource, SourceAttention


class RecurrentDecoder(nn.Module):
    """The common part of all decoders: the cells, and decoding of whole targets."""

    def __init__(self, config: RecurrentConfig, beside: int = 0) -> None:
        """`beside`: the number of features that enter the cells with those of a token."""
        super().__init__()
        self.config = config
        dropout = config.dropout if config.depth > 1 else 0.0
        self.layers = CELL_CLASSES[config.cell](config.width + beside, config.hidden, config.depth, dropout=dropout)

    def initial_state(self, annotations: Tensor, lengths: Sequence[int], last: Tensor) -> RecurrentState:
        """The state of N sources of these lengths, from the encoder's output."""
        source, count = self.build_source(annotations, lengths), len(lengths)
        made, weights = annotations.new_zeros(count, self.config.width), annotations.new_zeros(source.mask.shape)
        written = torch.zeros(count, dtype=torch.long, device=annotations.device)
        return RecurrentState(source, self.initial_memory(last), made, written, weights)

    def initial_memory(self, last: Tensor) -> Tensor:
        """The initial memory [M, depth, N, H]: the last states of both directions, concatenated."""
        return last.transpose(2, 3).flatten(3)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        """What attention reads of the sources."""
        raise NotImplementedError

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """[N, W] embeddings of the last tokens to features for the next ones, and the new state."""
        raise NotImplementedError

    def readout(self, features: Tensor) -> Tensor:
        """The features of steps, of any number of rows, to the input of the output matrix: [..., W]."""
        return features

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        """[T, W] embeddings of whole targets to the input of the output matrix: [T, W]."""
        packing = Packing.of(lengths, x.device)
        state, found = state.select_rows(packing.order), []
        for rows in torch.split(x.index_select(0, packing.rows), packing.sizes):
            features, state = self.step(rows, state.first_rows(len(rows)))
            found.append(features)
        return self.readout(packing.unpack(torch.cat(found)))

    def run_step(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One step of [N, ...] rows: the top layer's state [N, H], and the new memory."""
        return self._run_cells(pack_step(x), memory)

    def run_all_steps(self, x: Tensor, lengths: Sequence[int], memory: Tensor) -> Tensor:
        """All steps of [T, ...] rows in one call: [T, H]."""
        packing = Packing.of(lengths, x.device)
        return packing.unpack(self._run_cells(packing.pack(x), memory)[0])

    def _run_cells(self, x: PackedSequence, memory: Tensor) -> tuple[Tensor, Tensor]:
        kept = memory.contiguous()
        out, after = self.layers(x, tuple(kept) if len(kept) > 1 else kept[0])
        return out.data, torch.stack(after if isinstance(after, tuple) else (after,))


class PlainDecoder(RecurrentDecoder):
    """Without attention: the encoder's last state, the initial memory, is all it gets of the source (Sutskever et al.
    2014, arXiv:1409.3215)."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.narrow = nn.Linear(config.hidden, config.width, bias=False)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        none = annotations.new_zeros(len(lengths), 0, self.config.hidden)
        return EncodedSource((0,) * len(lengths), none, none, none[..., 0].bool())

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        out, memory = self.run_step(x, state.memory)
        return out, replace(state, memory=memory, steps=state.steps + 1)

    def readout(self, features: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(features)
        return narrowed

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        return self.readout(self.run_all_steps(x, lengths, state.memory))


class AttentionDecoder(RecurrentDecoder):
    """A decoder with attention."""

    def __init__(self, config: RecurrentConfig, beside: int = 0) -> None:
        super().__init__(config, beside)
        self.looking = SourceAttention(config)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        return self.looking.build_source(annotations, lengths)

    def attend(self, query: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """[N, H] queries to contexts [N, H], and the new state."""
        contexts, weights = self.looking(query[:, None], state.source, state.steps[:, None])
        return contexts[:, 0], replace(state, weights=weights[:, 0], steps=state.steps + 1)


class BahdanauDecoder(AttentionDecoder):
    """Attention before the cell: the query is the previous state, and the context enters the cell (Bahdanau et al.
    2015, arXiv:1409.0473).

    The initial state is computed from the last state of the backward direction; the readout is a maxout of state, token
    and context (Goodfellow et al. 2013).
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config, config.hidden)
        self.bridge = nn.Linear(config.hidden // config.directions, config.hidden)
        self.maxout = nn.Linear(config.width + 2 * config.hidden, 2 * config.width)

    def initial_memory(self, last: Tensor) -> Tensor:
        opened: Tensor = self.bridge(last[:, :, -1]).tanh()
        return opened

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        context, state = self.attend(state.memory[0, -1], state)
        out, memory = self.run_step(torch.cat((x, context), dim=-1), state.memory)
        return torch.cat((out, x, context), dim=-1), replace(state, memory=memory)

    def readout(self, features: Tensor) -> Tensor:
        pairs: Tensor = self.maxout(features)
        return pairs.view(*pairs.shape[:-1], -1, 2).amax(dim=-1)


class LuongDecoder(AttentionDecoder):
    """Attention after the cell: the query is the new state, and the output is tanh(W [c; h]), the attentional vector
    (Luong et al. 2015, arXiv:1508.04025)."""

    def __init__(self, config: RecurrentConfig, beside: int = 0) -> None:
        super().__init__(config, beside)
        self.combine = nn.Linear(2 * config.hidden, config.width, bias=False)

    def attentional_vectors(self, contexts: Tensor, states: Tensor) -> Tensor:
        made: Tensor = self.combine(torch.cat((contexts, states), dim=-1)).tanh()
        return made

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        out, memory = self.run_step(x, state.memory)
        context, state = self.attend(out, state)
        made = self.attentional_vectors(context, out)
        return made, replace(state, memory=memory, attentional=made)

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        states = self.run_all_steps(x, lengths, state.memory)
        return self.attentional_vectors(self.attend_all(states, lengths, state.source), states)

    def attend_all(self, states: Tensor, lengths: Sequence[int], source: EncodedSource) -> Tensor:
        """[T, H] contexts of all rows of targets, computed in groups of similar size."""
        found, places = [], []
        for members in group_sequences(lengths, source.lengths):
            rows, inside = (part.to(states.device) for part in padded_rows(lengths, members))
            sources = source.select_rows(torch.tensor(members, device=states.device))
            times = torch.arange(rows.size(1), device=states.device)[None]
            found.append(self.looking(states[rows], sources, times)[0][inside])
            places.append(rows[inside])
        return torch.cat(found).index_select(0, torch.cat(places).argsort())


class InputFeedingDecoder(LuongDecoder):
    """Input feeding: each step also reads the previous attentional vector."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config, config.width)

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        return super().step(torch.cat((x, state.attentional), dim=-1), state)

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        return RecurrentDecoder.decode_targets(self, x, lengths, state)


def build_decoder(config: RecurrentConfig) -> RecurrentDecoder:
    """The decoder for a configuration."""
    kinds = {
        "none": PlainDecoder,
        "bahdanau": BahdanauDecoder,
        "luong": InputFeedingDecoder if config.input_feeding else LuongDecoder,
    }
    return kinds[config.attention](config)
