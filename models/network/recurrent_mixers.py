"""Recurrent layers: each sequence has a state of fixed size, which every token changes in turn.

They stand where other layers have attention. Rows go through the scan in the order of models.network.scan_order; all of
it is float32. A token's numbers never depend on other sequences or on how a sequence is cut into steps: sums are over
the last features of each head alone, and functions that torch rounds differently at the end of a tensor are not used.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, AttentionContext, build_attention
from .mlp import logistic
from .model_config import ModelConfig
from .work_pieces import Pieces

# The states and one token of each sequence, in parts: the next states and the outputs.
Update = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]]
LENGTH_EPS = 1e-6  # of the lengths of queries and keys


def silu(x: Tensor) -> Tensor:
    """x * logistic(x); torch's own rounds the last elements of a tensor differently."""
    return x * logistic(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); torch's own rounds the last elements of a tensor differently."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


class RecurrentMixer(nn.Module):
    """What recurrent layers have in common: a causal convolution of each channel, a scan, and a projection of `outputs`
    features to the output."""

    def __init__(self, config: ModelConfig, layer: int, outputs: int) -> None:
        super().__init__()
        assert config.recurrent is not None
        self.config, self.layer = config.recurrent, layer
        self.output = nn.Linear(outputs, config.width, bias=self.config.output_bias)

    def read(self, x: Tensor, frame: AttentionContext) -> Pieces[Tensor]:
        """As `forward`, in one piece: the scan reads token after token."""
        out: Tensor = self(x, frame)
        yield
        return out

    def convolve(self, x: Tensor, taps: tuple[Tensor, Tensor | None], frame: AttentionContext) -> Tensor:
        """[T, C] to [T, C] float32: each channel over the row and the rows before it, the oldest first. `taps` are the
        factors [C, K] and the bias [C]."""
        scan, states, x = frame.scan, frame.batch.states, x.float()
        assert scan is not None
        past = x.new_zeros(len(scan.sequences), x.size(1), self.config.kernel - 1)
        if states is not None:
            past = states.read(states.state.rows[self.layer])
        listed = torch.cat((past.mT.flatten(0, 1), x))
        factors, bias = taps[0].float(), taps[1]
        out = listed.index_select(0, scan.windows[0]) * factors[:, 0]
        for tap, rows in enumerate(scan.windows[1:], start=1):
            out = out + listed.index_select(0, rows) * factors[:, tap]
        if states is not None:
            kept = states.state.rows[self.layer]
            states.write(kept, listed[scan.tails].mT)
            kept.index_copy_(0, scan.border_slots, listed[scan.border_tails].mT)
        return out if bias is None else out + bias.float()

    def scan(self, update: Update, inputs: tuple[Tensor, ...], frame: AttentionContext) -> Tensor:
        """Apply `update` to the state of each sequence, [N, H, P, K] with K features of a key, and its tokens in turn.
        Inputs and outputs are [T, ...]."""
        scan, states, config = frame.scan, frame.batch.states, self.config
        assert scan is not None
        shape = (config.heads, config.head_width, config.key_width)
        current = inputs[0].new_zeros(len(scan.sequences), *shape)
        if states is not None:
            current = states.read(states.state.matrices[self.layer]).index_select(0, scan.sequences)
        moments = zip(*(torch.split(part.index_select(0, scan.rows), scan.counts) for part in inputs), strict=True)
        outputs, ended = list[Tensor](), list[Tensor]()
        for time, (count, tokens) in enumerate(zip(scan.counts, moments, strict=True), start=1):
            if count < len(current):
                ended.append(current[count:])
                current = current[:count]
            current, out = update(current, tokens)
            outputs.append(out)
            for place, slot in scan.borders.get(time, ()):
                assert states is not None
                states.state.matrices[self.layer][slot] = current[place]
        if states is not None:
            last = torch.cat((current, *reversed(ended)))
            states.state.matrices[self.layer].index_copy_(0, states.writes[scan.sequences], last)
        return torch.cat(outputs).index_select(0, scan.places)


class ShortConvolution(RecurrentMixer):
    """A convolution between two gates, as in LFM2 (arXiv:2511.23404). Its rows of `input` are those of B, C and X."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, config.width)
        self.input = nn.Linear(config.width, 3 * config.width, bias=self.config.input_bias)
        self.taps = nn.Parameter(torch.zeros(config.width, self.config.kernel))
        self.taps_bias = nn.Parameter(torch.zeros(config.width)) if self.config.kernel_bias else None

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]."""
        before, after, inner = self.input(x).chunk(3, dim=-1)
        convolved = self.convolve(before * inner, (self.taps, self.taps_bias), frame)
        return cast(Tensor, self.output(after * convolved.to(x.dtype)))


class StateSpace(RecurrentMixer):
    """The state space layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

    Its rows of `input` are those of the gate [H * P], x [H * P], B [G * N], C [G * N] and the steps [H]. The state of a
    head is S [P, N]: a step d makes it exp(-exp(log_decay) d) S + d x B', and the output is S C + skip x.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        recurrent = config.recurrent
        assert recurrent is not None
        inner, keys = recurrent.heads * recurrent.head_width, recurrent.key_heads * recurrent.key_width
        super().__init__(config, layer, inner)
        self.input = nn.Linear(config.width, 2 * (inner + keys) + recurrent.heads, bias=recurrent.input_bias)
        self.taps = nn.Parameter(torch.zeros(inner + 2 * keys, recurrent.kernel))
        self.taps_bias = nn.Parameter(torch.zeros(inner + 2 * keys)) if recurrent.kernel_bias else None
        self.step_bias, self.log_decay = (nn.Parameter(torch.zeros(recurrent.heads)) for _ in range(2))
        self.skip = nn.Parameter(torch.ones(recurrent.heads))
        self.norm_weight = nn.Parameter(torch.ones(inner)) if recurrent.gated_norm else None

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]."""
        config = self.config
        inner, keys, groups = config.heads * config.head_width, config.key_heads * config.key_width, config.key_heads
        gate, convolved, step = torch.split(self.input(x), [inner, inner + 2 * keys, config.heads], dim=-1)
        activated = silu(self.convolve(convolved, (self.taps, self.taps_bias), frame))
        values, b, c = torch.split(activated, [inner, keys, keys], dim=-1)
        values = values.view(len(x), groups, -1, config.head_width)  # [T, G, H / G, P]
        steps = softplus(step.float() + self.step_bias.float()).clamp(*config.step_limits).view(len(x), groups, -1, 1)
        decay = (-self.log_decay.float().exp().view(groups, -1, 1) * steps).exp()
        b, c = (part.view(len(x), groups, 1, 1, -1) for part in (b, c))
        mixed = self.scan(self.update, (decay[..., None], values * steps, b, c), frame)
        mixed = mixed + self.skip.float().view(groups, -1, 1) * values
        return cast(Tensor, self.output(self.norm(mixed.flatten(1), gate.float()).to(x.dtype)))

    @staticmethod
    def update(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """[M, H, P, N] states after one token, and what they give, [M, G, H / G, P]."""
        decay, driven, b, c = token
        grouped = state.view(*driven.shape, -1) * decay + driven[..., None] * b
        return grouped.view_as(state), (grouped * c).sum(dim=-1)

    def norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, H * P] with its gate, float32; groups of features are normed apart."""
        config = self.config
        if self.norm_weight is None:
            return x * silu(gate)
        if config.gate_first:
            x = x * silu(gate)
        grouped = x.view(len(x), config.norm_groups, -1)
        normed = F.rms_norm(grouped, grouped.shape[-1:], None, config.norm_eps).flatten(-2) * self.norm_weight.float()
        return normed if config.gate_first else normed * silu(gate)


class DeltaNet(RecurrentMixer):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    The state of a head is S [P, N], features of values by those of keys. A token makes it
    S' = exp(-exp(log_decay) softplus(decay + step_bias)) S and then S' + rate (v - S' k) k', and the output is S q.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        recurrent = config.recurrent
        assert recurrent is not None
        inner, keys = recurrent.heads * recurrent.head_width, recurrent.key_heads * recurrent.key_width
        super().__init__(config, layer, inner)
        self.query, self.key, self.value, self.gate = (
            nn.Linear(config.width, count, bias=recurrent.input_bias) for count in (keys, keys, inner, inner)
        )
        self.rate, self.decay = (nn.Linear(config.width, recurrent.heads, bias=recurrent.input_bias) for _ in range(2))
        self.query_taps, self.key_taps, self.value_taps = (
            nn.Parameter(torch.zeros(count, recurrent.kernel)) for count in (keys, keys, inner)
        )
        self.step_bias, self.log_decay = (nn.Parameter(torch.zeros(recurrent.heads)) for _ in range(2))
        self.norm_weight = nn.Parameter(torch.ones(recurrent.head_width))

    def forward(self, x: Tensor, frame: AttentionContext) -> Tensor:
        """[T, W] to [T, W]."""
        config, groups, keys = self.config, self.config.key_heads, self.config.key_heads * self.config.key_width
        taps = torch.cat((self.query_taps, self.key_taps, self.value_taps))
        asked = torch.cat((self.query(x), self.key(x), self.value(x)), dim=-1)
        query, key, values = silu(self.convolve(asked, (taps, None), frame)).tensor_split((keys, 2 * keys), dim=-1)
        query, key = (part.view(len(x), groups, 1, 1, -1) for part in (query, key))  # [T, G, 1, 1, N]
        query, key = (part * (part.square().sum(dim=-1, keepdim=True) + LENGTH_EPS).rsqrt() for part in (query, key))
        query = query * config.key_width**-0.5
        values = values.view(len(x), groups, -1, config.head_width)  # [T, G, H / G, P]
        rates = (logistic(self.rate(x).float()) * config.update_scale).view(len(x), groups, -1, 1)
        steps = softplus(self.decay(x).float() + self.step_bias.float())
        kept = (-self.log_decay.float().exp() * steps).exp().view(len(x), groups, -1, 1, 1)
        heads = self.scan(self.update, (kept, rates, query, key, values), frame).flatten(1, 2)  # [T, H, P]
        normed = F.rms_norm(heads, heads.shape[-1:], None, config.norm_eps) * self.norm_weight.float()
        return cast(Tensor, self.output((normed.flatten(1) * silu(self.gate(x).float())).to(x.dtype)))

    @staticmethod
    def update(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """[M, H, P, N] states after one token, and what they give, [M, G, H / G, P]."""
        kept, rate, query, key, value = token
        grouped = state.view(*value.shape, -1) * kept
        change = rate * (value - (grouped * key).sum(dim=-1))
        grouped = grouped + change[..., None] * key
        return grouped.view_as(state), (grouped * query).sum(dim=-1)


MIXER_CLASSES: dict[str, Callable[[ModelConfig, int], RecurrentMixer]] = {
    "convolution": ShortConvolution,
    "state_space": StateSpace,
    "delta": DeltaNet,
}  # by ModelConfig.mixer


def build_mixer(config: ModelConfig, layer: int) -> Attention | RecurrentMixer:
    """The part of a layer that mixes tokens; not of a layer that has none."""
    recurrent = MIXER_CLASSES.get(config.mixer(layer))
    return build_attention(config, layer) if recurrent is None else recurrent(config, layer)
