"""Placement of a model: its device, its precision, and the compiled step or torch, by the settings and by this machine.

Of a model only two things matter here: the precision that suits how it is stored, and whether the compiled step
supports its network.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from polyhead.models.checkpoint.default_precision import DefaultPrecision
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.packed_network import BLOCK_TOKENS, unsupported_reason
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.sequence_spans import Kernel
from polyhead.models.network.varlen import find_kernel

from ..config.settings import Settings, SettingsError
from ..resources.machine import compute_threads

Precision = Literal["float32", "bfloat16", "int8", "int4"]


@dataclass(frozen=True)
class Placement:
    """A device, and the format of weights and arithmetic on it.

    `instructions` are those of the compiled step (models.native); empty: torch computes. `kernel` attends to cache
    blocks in place (models.network.varlen), if there is one. `dtype` is the type in which weights are read.
    """

    device: torch.device
    precision: Precision
    threads: int
    block_size: int
    instructions: str = ""
    kernel: Kernel | None = None

    @property
    def torch_threads(self) -> int:
        """Torch's threads: one beside the compiled step, which has its own. Two thread pools on the same cores slow
        each other down.
        """
        return 1 if self.instructions else self.threads

    @property
    def dtype(self) -> torch.dtype:
        return precision_dtype(self.precision)


def choose_placement(
    settings: Settings, default: DefaultPrecision | None = None, config: ModelConfig | None = None
) -> Placement:
    """Place a model whose stored form suits `default`, with a network of the shape `config`; without them, most models.

    Raises SettingsError if a GPU is required and there is none, or if the settings require what only the compiled step
    can do and it is not available. Raises UnsupportedError if they require it, and it is available but cannot compute
    this network.
    """
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise SettingsError("device: cuda is asked for and torch finds no GPU here; use auto or cpu")
    gpu = has_gpu and settings.device != "cpu"
    if settings.deterministic and settings.tensor_parallel > 1:
        raise SettingsError("deterministic: sums over processes are not held to the bit; tensor_parallel must be 1")
    if gpu and settings.tensor_parallel > max(torch.cuda.device_count(), 1):
        counts = f"{settings.tensor_parallel} devices are asked for and torch finds {torch.cuda.device_count()} here"
        raise SettingsError(f"tensor_parallel: {counts}; each process has one of its own")
    precision: Precision = settings.precision if settings.precision != "auto" else ("bfloat16" if gpu else "float32")
    obstacle, unsupported = native_step_obstacle(settings, precision, gpu), unsupported_reason(config) if config else ""
    if (obstacle or unsupported) and (settings.executor == "native" or precision.startswith("int")):
        requested = "executor: native" if settings.executor == "native" else f"precision: {precision}"
        if obstacle:
            raise SettingsError(f"{requested} is asked for and the compiled step cannot be used: {obstacle}")
        raise UnsupportedError(
            f"{requested} is asked for, and the compiled step cannot compute this network: {unsupported}; torch "
            "computes it, in float32 or bfloat16, where neither is asked for"
        )
    obstacle = obstacle or unsupported
    if default and settings.precision == "auto" and not obstacle:
        precision = default.precision
    threads = settings.threads or max(compute_threads() // settings.tensor_parallel, 1)
    device, dtype = torch.device("cuda" if gpu else "cpu"), precision_dtype(precision)
    kernel = find_kernel(device, dtype, settings.deterministic) if obstacle else None
    size = settings.block_size or BLOCK_TOKENS
    return Placement(device, precision, threads, size, "" if obstacle else runnable_targets()[0], kernel)


def precision_dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def native_step_obstacle(settings: Settings, precision: Precision, gpu: bool) -> str:
    """Return why the compiled step is not used; empty if it is."""
    if settings.tensor_parallel > 1:
        return f"tensor_parallel is {settings.tensor_parallel}, and it computes whole networks only"
    if settings.executor == "torch":
        return "executor is set to torch"
    if gpu:
        return "it runs on a CPU, and networks run on the GPU here"
    if precision == "bfloat16":
        return "it computes in float32, int8 or int4, not in bfloat16"
    if settings.block_size not in (0, BLOCK_TOKENS):
        return f"its cache has blocks of {BLOCK_TOKENS} tokens, and block_size is {settings.block_size}"
    return "" if runnable_targets() else "it was not compiled when polyhead was installed, for want of a C++ compiler"
