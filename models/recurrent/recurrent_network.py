"""A recurrent encoder-decoder over one vocabulary: tokens in, logits out (models.seq2seq.protocol.Seq2Seq)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.errors import EncodingError, ModelError
from ..network.ragged import RaggedBatch
from ..network.work_pieces import Pieces
from .decoder import build_decoder
from .decoder_state import RecurrentState, join_states
from .encoder import RecurrentEncoder
from .recurrent_config import SIZE_LIMITS, RecurrentConfig


class RecurrentTranslator(nn.Module):
    """Encoder, decoder, embeddings and output matrix. Raises EncodingError for an empty source or target."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        # Embeddings of length one, so that tied logits are small at first.
        nn.init.normal_(self.tokens.weight, std=config.width**-0.5)
        self.encoder = RecurrentEncoder(config)
        self.decoder = build_decoder(config)
        self.output = nn.Linear(config.width, config.vocab_size)
        if config.tied:
            self.output.weight = self.tokens.weight
        self.dropout = nn.Dropout(config.dropout)

    @property
    def start_token(self) -> int:
        return self.config.start

    def forward(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        logits: Tensor = self.output(self.readout(sources, targets))
        return logits

    def readout(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        """[T, W] the input of the output layer."""
        x, state = self._embed(targets), self.initial_state(sources)
        made: Tensor = self.dropout(self.decoder.decode_targets(x, targets.lengths, state))
        return made

    @property
    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """The output matrix [V, W] and its bias [V]."""
        return self.output.weight, self.output.bias

    def initial_state(self, sources: RaggedBatch) -> RecurrentState:
        annotations, last = self.encoder(self._embed(sources), sources.lengths)
        return self.decoder.initial_state(annotations, sources.lengths, last)

    def initial_state_in_pieces(self, sources: RaggedBatch) -> Pieces[RecurrentState]:
        """As `initial_state`, in one piece."""
        yield from ()
        return self.initial_state(sources)

    def step(self, tokens: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        features, state = self.decoder.step(self.dropout(self.tokens(tokens)), state)
        return self.output(self.dropout(self.decoder.readout(features))), state

    def select_rows(self, state: RecurrentState, rows: Tensor) -> RecurrentState:
        return state.select_rows(rows)

    def join_states(self, states: Sequence[RecurrentState]) -> RecurrentState:
        return join_states(states)

    def attention_weights(self, state: RecurrentState) -> list[Tensor]:
        if self.config.attention == "none":
            return []
        return [weights[:length] for weights, length in zip(state.weights, state.source.lengths, strict=True)]

    def _embed(self, batch: RaggedBatch) -> Tensor:
        if min(batch.lengths, default=0) == 0:
            message = "a sequence has no token, and one is needed in each"
            raise EncodingError(message)
        vectors: Tensor = self.dropout(self.tokens(batch.tokens) if batch.embedded is None else batch.embedded)
        return vectors


def fit_hidden_width(config: RecurrentConfig, parameters: int) -> RecurrentConfig:
    """The configuration with the `hidden` width that comes closest to `parameters`, so that systems of equal size can
    be compared.

    The number of parameters is a quadratic function of that width, so three narrow networks determine it. ModelError if
    none is within a tenth of the number.
    """
    unit = config.directions
    one, two, three = (count_parameters(replace(config, hidden=width * unit)) for width in (1, 2, 3))

    def counts(width: int) -> int:
        return one + (two - one) * (width - 1) + (three - 2 * two + one) * (width - 1) * (width - 2) // 2

    above = bisect_left(range(1, SIZE_LIMITS["hidden"] // unit), parameters, key=counts) + 1
    width = min((above, max(above - 1, 1)), key=lambda width: abs(counts(width) - parameters))
    if abs(counts(width) - parameters) > parameters / 10:
        message = f"{parameters} parameters cannot be reached by this network: the nearest has {counts(width)}"
        raise ModelError(message)
    return replace(config, hidden=width * unit)


def count_parameters(config: RecurrentConfig) -> int:
    """The number of parameters of such a network. Torch's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        return sum(parameter.numel() for parameter in RecurrentTranslator(config).parameters())
