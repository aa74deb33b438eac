"""Loads a model for the compiled step as a server does: weights are read when their part is packed, then freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import free_weights
from polyhead.models.network.heads import LanguageHead


def pack_by_parts(folder: Path, **options: Any) -> NativeExecutor:
    """The compiled step of a checkpoint folder; `options` are those of NativeExecutor."""
    described = checkpoint.describe_source(str(folder))
    loaded = checkpoint.prepare(
        str(folder), WeightReader(described), dtype=torch.float32, device="cpu", progress=checkpoint.ignore_progress
    )

    @contextmanager
    def load_part(part: nn.Module) -> Iterator[None]:
        loaded.load_blocks(part)
        yield
        free_weights(part)

    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    return NativeExecutor(loaded.network, head, load_part=load_part, **options)
