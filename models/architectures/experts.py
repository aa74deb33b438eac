"""What the families with mixtures of experts have in common: how files name and pack the experts' matrices."""

import re

from torch import Tensor

from .family import Json, NamedTensors, Renames, layer_numbers

# Of the newer form: one tensor for all experts, gate above up; and of the older: a tensor for each expert.
FUSED = re.compile(r"(.*\.mlp)\.experts\.(gate_up_proj|down_proj)$")
RENAMES: Renames = (
    (r"\.mlp\.gate\.weight$", ".mlp.router.weight"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.choice_bias"),
    (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_gate."),
    (r"\.mlp\.shared_experts?\.", ".mlp.shared."),
    (r"\.mlp\.(experts\.\d+|shared)\.(up|gate|down)_proj\.", r".mlp.\1.\2."),
)


MAX_LISTED = 1 << 12  # experts in one tensor; published networks have 512


def list_experts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor of each expert. ValueError for more than MAX_LISTED: a tensor without numbers may have any shape."""
    if tensor.dim() < 2 or len(tensor) > MAX_LISTED:
        raise ValueError(f"it should hold the matrices of {MAX_LISTED} experts at most")
    return tensor.unbind()


def split_experts(name: str, tensor: Tensor) -> NamedTensors:
    """The matrices of a fused tensor [E, 2 I, W] or [E, W, I] by expert; any other tensor as it is."""
    found = FUSED.match(name)
    if found is None:
        return [(name, tensor)]
    parts = {"down_proj": ("down",), "gate_up_proj": ("gate", "up")}[found[2]]
    return [
        (f"{found[1]}.experts.{number}.{part}.weight", piece)
        for number, matrix in enumerate(list_experts(tensor))
        for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True)
    ]


def expert_count(hf: Json) -> int:
    """The number of experts in a layer, under the name that the configuration has for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count: int = hf[next((name for name in names if hf.get(name) is not None), names[0])]
    return count


def layers_from(hf: Json, first: int) -> tuple[bool, ...]:
    """The layers from `first` on have experts."""
    return tuple(layer >= first for layer in layer_numbers(hf["num_hidden_layers"]))
