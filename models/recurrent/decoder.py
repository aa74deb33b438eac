"""What writes a target: three ways for a recurrent network to know its source.

Knows nothing of the vocabulary.  The one idea: a decoder is a step of N sequences, and a whole target is that step over
all that are still going, so that what is trained is what runs.  Where no step reads what the one before it made of its
state, the cells run through a whole target in one call, and what comes behind them is computed for all rows at once.
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
    """What all of them have: cells, and a way through a target."""

    def __init__(self, config: RecurrentConfig, beside: int = 0) -> None:
        """`beside`: features that come into the cells with those of a token."""
        super().__init__()
        self.config = config
        dropout = config.dropout if config.depth > 1 else 0.0
        self.layers = CELL_CLASSES[config.cell](config.width + beside, config.hidden, config.depth, dropout=dropout)

    def initial_state(self, annotations: Tensor, lengths: Sequence[int], last: Tensor) -> RecurrentState:
        """Of N sources of these lengths, as the encoder gives them."""
        source, count = self.build_source(annotations, lengths), len(lengths)
        made, weights = annotations.new_zeros(count, self.config.width), annotations.new_zeros(source.mask.shape)
        written = torch.zeros(count, dtype=torch.long, device=annotations.device)
        return RecurrentState(source, self.initial_memory(last), made, written, weights)

    def initial_memory(self, last: Tensor) -> Tensor:
        """The first memory [M, depth, N, H]: what both directions remember, side by side."""
        return last.transpose(2, 3).flatten(3)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        """What can be looked at later."""
        raise NotImplementedError

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """[N, W] vectors of the last tokens to what there is to say of the next ones, and what is known then."""
        raise NotImplementedError

    def readout(self, features: Tensor) -> Tensor:
        """What steps gave, of any number of rows, to what the output matrix takes: [..., W]."""
        return features

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        """[T, W] vectors of whole targets to what the output matrix takes: [T, W]."""
        packing = Packing.of(lengths, x.device)
        state, found = state.select_rows(packing.order), []
        for rows in torch.split(x.index_select(0, packing.rows), packing.sizes):
            features, state = self.step(rows, state.first_rows(len(rows)))
            found.append(features)
        return self.readout(packing.unpack(torch.cat(found)))

    def run_step(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One step of [N, ...] rows: the uppermost layer's state [N, H], and the memory behind it."""
        return self._run_cells(pack_step(x), memory)

    def run_all_steps(self, x: Tensor, lengths: Sequence[int], memory: Tensor) -> Tensor:
        """All steps of [T, ...] rows, in one call: [T, H]."""
        packing = Packing.of(lengths, x.device)
        return packing.unpack(self._run_cells(packing.pack(x), memory)[0])

    def _run_cells(self, x: PackedSequence, memory: Tensor) -> tuple[Tensor, Tensor]:
        kept = memory.contiguous()
        out, after = self.layers(x, tuple(kept) if len(kept) > 1 else kept[0])
        return out.data, torch.stack(after if isinstance(after, tuple) else (after,))


class PlainDecoder(RecurrentDecoder):
    """Without attention: it starts from what the encoder remembered last, which is all it knows of a source
    (Sutskever et al. 2014, arXiv:1409.3215)."""

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
    """With attention."""

    def __init__(self, config: RecurrentConfig, beside: int = 0) -> None:
        super().__init__(config, beside)
        self.looking = SourceAttention(config)

    def build_source(self, annotations: Tensor, lengths: Sequence[int]) -> EncodedSource:
        return self.looking.build_source(annotations, lengths)

    def attend(self, query: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """[N, H] queries to contexts [N, H]."""
        contexts, weights = self.looking(query[:, None], state.source, state.steps[:, None])
        return contexts[:, 0], replace(state, weights=weights[:, 0], steps=state.steps + 1)


class BahdanauDecoder(AttentionDecoder):
    """It looks before its cell runs, asking with the state before, and what it sees goes into the cell (Bahdanau et al.
    2015, arXiv:1409.0473).  The first state is made of what was remembered last by the direction that ends at the first
    token; the readout is a maxout of state, token and context (Goodfellow et al. 2013)."""

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
    """It looks when its cell has run, asking with that state, and says of both tanh(W [c; h]), the attentional vector
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
        """Of all rows of targets, in groups of like size: [T, H]."""
        found, places = [], []
        for members in group_sequences(lengths, source.lengths):
            rows, inside = (part.to(states.device) for part in padded_rows(lengths, members))
            asked = source.select_rows(torch.tensor(members, device=states.device))
            times = torch.arange(rows.size(1), device=states.device)[None]
            found.append(self.looking(states[rows], asked, times)[0][inside])
            places.append(rows[inside])
        return torch.cat(found).index_select(0, torch.cat(places).argsort())


class InputFeedingDecoder(LuongDecoder):
    """Each step reads the attentional vector of the one before, so that it knows where it looked."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config, config.width)

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        return super().step(torch.cat((x, state.attentional), dim=-1), state)

    def decode_targets(self, x: Tensor, lengths: Sequence[int], state: RecurrentState) -> Tensor:
        return RecurrentDecoder.decode_targets(self, x, lengths, state)


def build_decoder(config: RecurrentConfig) -> RecurrentDecoder:
    """The one that a configuration asks for."""
    kinds = {
        "none": PlainDecoder,
        "bahdanau": BahdanauDecoder,
        "luong": InputFeedingDecoder if config.input_feeding else LuongDecoder,
    }
    return kinds[config.attention](config)
