"""From a source to a checkpoint that can run: `load(source)`.

A source is a folder in Hugging Face's layout, a GGUF file, or an id on the hub ("org/name", "org/name@revision"); any
of them "+" a PEFT LoRA folder, which is merged; or such a folder alone, which names its base.  Nothing in a checkpoint
is executed or unpickled.  Loading is plain work of the calling thread, whichever that is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from ..chat import ChatTemplate
from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..seq2seq.decoding import Writing
from ..tokenizer import Tokenizer
from . import folder
from . import gguf_file as gguf
from . import merged_adapter as adapter
from . import recurrent_folder as recurrent
from .default_precision import Suited
from .description import Description, blank
from .folder_files import Vet, trust
from .source_policy import ANYWHERE, Reach
from .unread_formats import refuse_file
from .weight_reader import Weights

Task = Literal["generate", "classify", "rank", "embed", "tag", "span", "fill", "translate"]
log = getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What came out of a source.  `max_tokens` counts special tokens too; `weight_bytes` counts tied weights once;
    `suited` is the precision for how its numbers are stored.

    `fill` gives a part of the network or the head its numbers, where they were not read with the rest.  Of one that
    translates, `network` reads and `head`, a models.seq2seq.protocol.Seq2Seq around it, writes, as `writing` has it
    where nobody asks otherwise.  `both_orders`: of a pair, what is said of it in either order is added."""

    source: str
    family: str
    task: Task
    config: ModelConfig
    body: ModelConfig  # see models.checkpoint.description.Description
    network: Transformer
    head: nn.Module
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    labels: tuple[str, ...]
    prompts: Mapping[str, str]
    pooling: str
    stop_tokens: frozenset[int]
    max_tokens: int
    weight_bytes: int
    dtype: str
    suited: Suited
    fill: Callable[[nn.Module], None]
    writing: Writing | None = None
    both_orders: bool = False


def ignore(done: int, total: int) -> None:
    """Nobody asked for progress."""


def load(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = ignore,
) -> Checkpoint:
    """Read a checkpoint into memory as `dtype` on `device`; `progress` hears of bytes done and bytes in all.

    CheckpointError names the file and the tensor at fault; UnsupportedError says what to do instead.
    """
    return read(source, describe(source), dtype=dtype, device=device, progress=progress)


def read(
    source: str,
    what: Description,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> Checkpoint:
    """The same of a source that is described already."""
    begun = begin(source, what, dtype=dtype, device=device, progress=progress)
    begun.fill(begun.network)
    begun.fill(begun.head)
    begun.network.to(device)
    begun.head.to(device)
    return begun


def begin(
    source: str,
    what: Description,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> Checkpoint:
    """The same with nothing read yet: parameters have shapes and no memory, until `fill` is called for what is wanted.

    CheckpointError unless the files hold exactly what the network takes.
    """
    network, head = blank(what)
    weights = Weights(what, network, head, progress)
    known, rows = what.tokenizer.vocab_size, what.config.vocab_size
    if known > rows:
        log.warning("%s: the tokenizer knows %d tokens, the network only the first %d", source, known, rows)
    numbers = {id(parameter): parameter.numel() for each in (network, head) for parameter in each.parameters()}
    return Checkpoint(
        source=source,
        family=what.family,
        task=cast(Task, what.head.task),
        config=what.config,
        body=what.body,
        network=network.eval(),
        head=head.eval(),
        tokenizer=what.tokenizer.saying(what.chat.format.tags) if what.chat else what.tokenizer,
        chat=what.chat,
        labels=what.head.labels,
        prompts=what.head.prompts,
        pooling=what.head.pooling,
        both_orders=what.head.both_orders,
        stop_tokens=what.stop_tokens,
        max_tokens=what.max_tokens,
        weight_bytes=sum(numbers.values()) * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        suited=what.suited,
        fill=partial(weights.fill, dtype=dtype, device=torch.device(device)),
        writing=what.head.writing,
    )


def describe(source: str, reach: Reach = ANYWHERE, vet: Vet = trust) -> Description:
    """All about a checkpoint but its numbers.  What lies out of `reach` is not looked at.

    `vet` gets each folder, or GGUF file and its metadata, before its tokenizer is read, and raises CheckpointError for
    one that must not be.
    """
    base, _, addition = ("", "", "") if "+" not in source or reach.has(source) else source.rpartition("+")
    if base and addition:
        return with_adapter(reach.place(base), reach.place(addition), vet)
    path = reach.place(source)
    if not path.is_dir():
        refuse_file(path)
        return gguf.describe(path, vet)
    if adapter.is_adapter(path):
        return with_adapter(reach.of(source).place(adapter.base_of(path)), path, vet)
    if recurrent.is_recurrent(path):
        return recurrent.describe(path, vet)
    return folder.describe(folder.open_folder(path), vet)


def with_adapter(base: Path, addition: Path, vet: Vet = trust) -> Description:
    """A base checkpoint with a LoRA merged into it."""
    if base.is_file():
        message = "an adapter is merged only into a safetensors folder; name the one this file was made from"
        raise UnsupportedError(message, file=str(base))
    return folder.describe(adapter.applied(adapter.read(addition), folder.open_folder(base)), vet)
