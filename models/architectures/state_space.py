"""What the families with state space layers (Mamba-2, arXiv:2405.21060) have in common: how their files name tensors
and sizes."""

import math
from collections.abc import Mapping

from torch import Tensor

from ..network.model_config import MixerConfig, MixerName
from .family import Json, NamedTensors, Renames, check_required_values, read_sizes

TAPS = ".conv1d.weight"  # the convolution's factors [C, 1, K]
RENAMES: Renames = (
    (r"\.(mamba|mixer)\.in_proj\.", ".attention.input."),
    (r"\.(mamba|mixer)\.out_proj\.", ".attention.output."),
    (r"\.(mamba|mixer)\.conv1d\.weight$", ".attention.taps"),
    (r"\.(mamba|mixer)\.conv1d\.bias$", ".attention.taps_bias"),
    (r"\.(mamba|mixer)\.norm\.weight$", ".attention.norm_weight"),
    (r"\.(mamba|mixer)\.A_log$", ".attention.log_decay"),
    (r"\.(mamba|mixer)\.D$", ".attention.skip"),
    (r"\.(mamba|mixer)\.dt_bias$", ".attention.step_bias"),
)
KINDS: dict[str, MixerName] = {
    "linear_attention": "state_space",
    "mamba": "state_space",
    "full_attention": "attention",
    "attention": "attention",
}


def squeeze_taps(name: str, tensor: Tensor) -> NamedTensors:
    """The convolution's factors as [C, K]."""
    return [(name, tensor.squeeze(1) if name.endswith(TAPS) else tensor)]


def read_step_limits(hf: Json) -> tuple[float, float]:
    """The limits of steps; files may have infinity as an object."""
    limits = hf.get("time_step_limit") or (0.0, math.inf)
    low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in limits)
    return low, high


def read_hybrid(hf: Json) -> MixerConfig:
    """The layers of Bamba, from fields that begin with "mamba"."""
    check_required_values(hf, {"hidden_act": "silu"})
    hf = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, **hf}
    heads, groups, width = read_sizes(hf, "mamba_n_heads", "mamba_n_groups", "hidden_size")
    head_width = hf.get("mamba_d_head", "auto")
    has_bias = bool(hf.get("mamba_proj_bias", False))
    return MixerConfig(
        kernel=hf["mamba_d_conv"],
        kernel_bias=bool(hf.get("mamba_conv_bias", True)),
        heads=heads,
        head_width=hf["mamba_expand"] * width // heads if head_width == "auto" else head_width,
        key_heads=groups,
        key_width=hf["mamba_d_state"],
        input_bias=has_bias,
        output_bias=has_bias,
        norm_groups=groups,
        norm_eps=hf["rms_norm_eps"],
        step_limits=read_step_limits(hf),
    )
