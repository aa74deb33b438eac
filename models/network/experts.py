"""Mixtures of experts: an MLP of which each token uses a few parts, chosen by a router (Shazeer et al. 2017,
arXiv:1701.06538)."""

import torch
from torch import Tensor, nn

from .lora import LinearFunction, apply_linear
from .mlp import MLP, ClampedMLP, logistic
from .model_config import ExpertConfig, ModelConfig
from .work_pieces import LAYER_PRODUCTS, LEAST_ROWS


class MixtureOfExperts(nn.Module):
    """The sum of the chosen experts' outputs, times the router's weights, and of a shared expert if there is one.

    For every row, experts are added in the order of their numbers, so the result does not depend on other rows.
    """

    def __init__(self, config: ModelConfig, experts: ExpertConfig) -> None:
        super().__init__()
        self.config = experts
        used = experts.chosen * experts.width + experts.shared_width
        # Of a row; so that experts have LEAST_ROWS of a piece each.
        most = LAYER_PRODUCTS * experts.chosen // (LEAST_ROWS * experts.count)
        self.products = min((3 if config.gated_mlp else 2) * config.width * used, most)
        self.router = nn.Linear(config.width, experts.count, bias=experts.router_bias)
        # Added to scores for the choice only (Wang et al. 2024, arXiv:2408.15664).
        self.choice_bias = nn.Parameter(torch.zeros(experts.count)) if experts.choice_bias else None
        self.output_scales = nn.Parameter(torch.ones(experts.count)) if experts.output_scales else None
        kind = ClampedMLP if experts.clamp else MLP
        self.experts = nn.ModuleList(kind(config, experts.width, bias=experts.bias) for _ in range(experts.count))
        self.shared = MLP(config, experts.shared_width) if experts.shared_width else None
        self.shared_gate = nn.Linear(config.width, 1, bias=False) if experts.shared_gate else None
        self.output_norm = nn.RMSNorm(config.width, config.norm_eps) if experts.output_norm else nn.Identity()

    def forward(self, x: Tensor, through: LinearFunction = apply_linear) -> Tensor:  # noqa: ARG002 - no adapters here
        """[T, W] to [T, W]."""
        out = self.sum_chosen(x, *self.route(x))
        if self.shared is None:
            return self.output_norm(out)  # type: ignore[no-any-return]
        shared: Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * logistic(self.shared_gate(x))
        if self.config.shared_scale != 1.0:
            shared = shared * self.config.shared_scale
        return self.output_norm(out + shared)  # type: ignore[no-any-return]

    def sum_chosen(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The sum [T, W] of the chosen experts' outputs, from their inputs [T, W] and what `route` returns."""
        out = torch.zeros_like(x)
        for number in torch.unique(chosen).tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.weigh(self.experts[number], x[rows], weights[rows, places, None]))
        return out

    def weigh(self, expert: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        """The share [M, W] of an expert in its tokens [M, W], from their `weights` [M, 1]."""
        share: Tensor = expert(x * weights) if self.config.weighs_input else expert(x) * weights
        return share

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [T, K] of the chosen experts, and their numbers [T, K]."""
        config = self.config
        logits = self.router(x).float()  # [T, E]
        if config.scoring == "sparse_mixer":
            weights, chosen = mix_sparsely(logits, config.chosen, config.margin)
            return weights.to(x.dtype), chosen
        scores = logits.softmax(dim=-1) if config.scoring == "softmax" else logistic(logits)
        compared = logits if config.chosen_by_logits else scores
        compared = compared if self.choice_bias is None else compared + self.choice_bias
        if config.groups:
            compared = self.hide_groups(compared)
        chosen = compared.topk(config.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + config.normalised_eps)
        if self.output_scales is not None:
            weights = weights * self.output_scales[chosen]
        return (weights * config.scale).to(x.dtype), chosen

    def hide_groups(self, scores: Tensor) -> Tensor:
        """[T, E] with all but the best groups of experts hidden. A group is as good as its best expert, or, with a
        bias for the choice, as its best two."""
        config = self.config
        grouped = scores.view(len(scores), config.groups, scores.size(1) // config.groups)
        ranks = grouped.amax(dim=-1) if self.choice_bias is None else grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = ranks.topk(config.chosen_groups, dim=-1).indices  # [T, chosen_groups]
        hidden = torch.ones_like(ranks, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(hidden[..., None], float("-inf")).view_as(scores)


class MixtureWithOwnNorms(MixtureOfExperts):
    """A mixture that reads a norm without weights: its router, its chosen experts and its shared expert have weights of
    their own for the features, and the last two a norm of their output (Gemma 4). The router reads a row scaled to
    length one."""

    def __init__(self, config: ModelConfig, experts: ExpertConfig) -> None:
        super().__init__(config, experts)
        self.router_input, self.chosen_input, self.shared_input = (
            nn.Parameter(torch.ones(config.width)) for _ in range(3)
        )
        self.chosen_norm, self.shared_norm = (nn.RMSNorm(config.width, config.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, through: LinearFunction = apply_linear) -> Tensor:  # noqa: ARG002 - no adapters here
        """[T, W] to [T, W]."""
        assert self.shared is not None, "description.invalid_fields has refused it"
        routed = self.route(x * self.router_input * x.size(-1) ** -0.5)
        chosen: Tensor = self.chosen_norm(self.sum_chosen(x * self.chosen_input, *routed))
        shared: Tensor = self.shared_norm(self.shared(x * self.shared_input))
        return shared + chosen


def mix_sparsely(logits: Tensor, count: int, margin: float) -> tuple[Tensor, Tensor]:
    """The weights [T, K] and numbers [T, K] of `count` experts, chosen one after the other from logits [T, E]. The
    weight of each is its share of a softmax over the experts not chosen before it whose distance from it is at most
    `margin` times the larger of its logit and their magnitude (SparseMixer, Liu et al. 2024, arXiv:2409.12136)."""
    left, weights, chosen = logits, list[Tensor](), list[Tensor]()
    for _ in range(count):
        best, number = left.max(dim=-1, keepdim=True)  # [T, 1]
        far = (best - logits) / logits.abs().clamp(min=best) > margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, number))
        chosen.append(number)
        left = left.scatter(-1, number, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def build_mlp(config: ModelConfig, layer: int) -> MLP | MixtureOfExperts:
    """The MLP of a layer."""
    if config.has_experts(layer):
        assert config.experts is not None
        return (MixtureWithOwnNorms if config.experts.own_norms else MixtureOfExperts)(config, config.experts)
    return MLP(config, config.of_layer(layer).mlp_width)
