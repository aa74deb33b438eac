"""Loads checkpoints: `load(source)`.

A source is a folder in Hugging Face's layout, a GGUF file (of one in parts the first part, or their folder), or a name
on the hub ("org/name", "org/name@revision", "org/name:Q4_K_M", "org/name/file.gguf"; see hub.py). "+" and a LoRA after
it, a PEFT folder or a GGUF file, merge that adapter; a PEFT folder alone names its base. "#rank" or "#generate" at the
end says what a generator is to do (published_rerankers.py). Nothing in a checkpoint is executed or unpickled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn

from ..chat import ChatTemplate
from ..chat.pair_prompt import PairPrompt, PairTemplate
from ..core.decision_prompt import DecisionPrompt
from ..core.errors import UnsupportedError
from ..core.label_prompt import LabelPrompt
from ..core.late_interaction import LateInteraction
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..seq2seq.decoding import DecodingConfig
from ..tokenizer import Tokenizer
from . import decision_folders, folder, label_folders, static_folder
from . import gguf_file as gguf
from . import merged_adapter as adapter
from . import recurrent_folder as recurrent
from .default_precision import DefaultPrecision
from .description import Description, Form
from .folder_files import FolderCheck, accept_folder
from .gguf_adapter import apply_gguf_adapter, read_gguf_adapter
from .gguf_parts import find_split_file
from .published_rerankers import FOLDER_TASK, TASK_MARK, WantedTask, split_task
from .source_policy import ANY_SOURCE, SourcePolicy
from .unread_formats import check_file
from .weight_reader import WeightReader
from .weight_reader import ignore_progress as ignore_progress

Task = Literal[
    "generate",
    "classify",
    "rank",
    "choose",
    "embed",
    "tag",
    "span",
    "fill",
    "translate",
    "label_spans",
    "label_texts",
    "decide",
]
log = getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint. `max_tokens` includes special tokens; `weight_bytes` counts tied weights once;
    `default_precision` follows from how the weights are stored.

    `load_weights` reads the weights of a part of the network or head that have not been read yet; `load_blocks` does it
    for the compiled step, which packs blocks of a GGUF file as they are (weight_reader.py). For an
    encoder-decoder, `network` is the encoder and `head` the whole model (models.seq2seq.protocol.Seq2Seq); `decoding`
    has its default rules. `both_orders`: a pair is scored in both orders and the scores are added.
    `width` is that of an embedder's vectors, else that of the states; `excludes_prompt`: an embedder does not pool the
    tokens of a prompt. `pair_prompt`: how a reranker that generates gets a pair. `late`: how an
    embedder with a vector for each token reads texts. `label_prompt`: how labels of the request are read;
    `decision_prompt`: how questions about a text are. `more_forms`,
    `missing_forms`, `has_queries` and `skipped_tokens`: see models.checkpoint.description.HeadDescription. `sampling`:
    options that the checkpoint suggests to requests.
    """

    source: str
    family: str
    task: Task
    config: ModelConfig
    decoder_config: ModelConfig  # see models.checkpoint.description.Description
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
    default_precision: DefaultPrecision
    load_weights: Callable[[nn.Module], None]
    load_blocks: Callable[[nn.Module], None]
    width: int
    decoding: DecodingConfig | None = None
    both_orders: bool = False
    excludes_prompt: bool = False
    pair_prompt: PairPrompt | PairTemplate | None = None
    late: LateInteraction | None = None
    label_prompt: LabelPrompt | None = None
    decision_prompt: DecisionPrompt | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    more_forms: tuple[Form, ...] = ()
    missing_forms: Mapping[str, str] = field(default_factory=dict)
    has_queries: bool = False
    skipped_tokens: frozenset[int] = frozenset()
    query_tokens: int = 0  # the longest query, of a network of their own; 0: `max_tokens`


def load(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = ignore_progress,
    folder_check: FolderCheck = accept_folder,
) -> Checkpoint:
    """Read a checkpoint into memory as `dtype` on `device`. `progress` is called with the bytes read so far and in all,
    `folder_check` as by `describe_source`.

    CheckpointError names the faulty file and tensor; UnsupportedError gives an alternative.
    """
    described = describe_source(source, folder_check=folder_check)
    return load_described(source, described, dtype=dtype, device=device, progress=progress)


def load_described(
    source: str,
    description: Description,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> Checkpoint:
    """As `load`, for a source that is described already."""
    return load_built(source, WeightReader(description), dtype=dtype, device=device, progress=progress)


def load_built(
    source: str,
    weights: WeightReader,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> Checkpoint:
    """As `load_described`, for a network that is built already."""
    checkpoint = prepare(source, weights, dtype=dtype, device=device, progress=progress)
    checkpoint.load_weights(checkpoint.network)
    checkpoint.load_weights(checkpoint.head)
    if torch.device(device).type != "cpu":  # buffers, which are made there
        checkpoint.network.to(device)
        checkpoint.head.to(device)
    return checkpoint


def prepare(
    source: str,
    weights: WeightReader,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> Checkpoint:
    """As `load_built`, but nothing is read yet: parameters have shapes and no memory until `load_weights` is called
    for a part.
    """
    weights.begin(progress)
    description = weights.description
    known, rows = description.tokenizer.vocab_size, description.config.vocab_size
    if known > rows:
        log.warning("%s: the tokenizer has %d tokens, the network only the first %d", source, known, rows)
    return Checkpoint(
        source=source,
        family=description.family,
        task=cast(Task, description.head.task),
        config=description.config,
        decoder_config=description.decoder_config,
        network=weights.network,
        head=weights.head,
        tokenizer=description.text_tokenizer,
        chat=description.chat,
        labels=description.head.labels,
        prompts=description.head.prompts,
        pooling=description.head.pooling,
        both_orders=description.head.both_orders,
        width=description.vector_width,
        excludes_prompt=description.head.excludes_prompt,
        pair_prompt=description.head.pair_prompt,
        late=description.late,
        label_prompt=description.labels,
        decision_prompt=description.decisions,
        sampling=description.sampling,
        more_forms=description.head.more_forms,
        missing_forms=description.head.missing_forms,
        has_queries=description.head.has_queries,
        skipped_tokens=description.head.skipped_tokens,
        query_tokens=0 if description.queries is None else description.queries.max_tokens,
        stop_tokens=description.stop_tokens,
        max_tokens=description.max_tokens,
        weight_bytes=weights.parameter_count * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        default_precision=description.default_precision,
        load_weights=partial(weights.load, dtype=dtype, device=torch.device(device)),
        load_blocks=weights.load_blocks,
        decoding=description.head.decoding,
    )


def describe_source(
    source: str, policy: SourcePolicy = ANY_SOURCE, folder_check: FolderCheck = accept_folder
) -> Description:
    """The description of a checkpoint, without reading its weights. Sources outside of `policy` are refused unread.

    `folder_check` is called with each folder, or with each GGUF file and its metadata, before its tokenizer is read. It
    raises CheckpointError if the tokenizer must not be read.
    """
    source, wanted = split_task(source, policy.exists)
    base, _, addition = ("", "", "") if "+" not in source or policy.exists(source) else source.rpartition("+")
    if base and addition:
        return describe_merged(policy.locate(base), policy.locate(addition), folder_check, wanted)
    path = policy.locate(source)
    if not path.is_dir():
        check_file(path)
        check_task_chosen(path, wanted)
        return gguf.describe_gguf(path, folder_check)
    if adapter.is_adapter(path):
        bases = policy.for_source(source)
        return describe_merged(bases.locate(adapter.base_source(path, bases)), path, folder_check, wanted)
    for is_kind, describe in OTHER_FOLDERS.items():
        if is_kind(path):
            check_task_chosen(path, wanted)
            return describe(path, folder_check)
    return describe_folder(path, folder_check, wanted)


def check_task_chosen(path: Path, wanted: WantedTask) -> None:
    """UnsupportedError if a source says a task, which is known for folders of safetensors only."""
    if wanted.task:
        message = f"{TASK_MARK}{wanted.task} after a source is for folders of generators, and this is none"
        raise UnsupportedError(message, file=str(path))


OTHER_FOLDERS: Mapping[Callable[[Path], bool], Callable[[Path, FolderCheck], Description]] = {
    recurrent.is_recurrent: recurrent.describe_recurrent,
    static_folder.is_static: static_folder.describe_static,
    label_folders.is_label_folder: label_folders.describe_label_folder,
    decision_folders.is_decision_folder: decision_folders.describe_decision_folder,
}  # folders whose network is no transformer of a known family alone, in the order in which they are asked for


def describe_merged(
    base: Path, addition: Path, folder_check: FolderCheck = accept_folder, wanted: WantedTask = FOLDER_TASK
) -> Description:
    """The description of a base checkpoint with a LoRA merged into it. A LoRA in a GGUF file has a base of either
    format, one in a folder only a safetensors folder."""
    if base.is_file():
        check_task_chosen(base, wanted)
    if not addition.is_dir():
        check_file(addition)
        is_file = base.is_file()
        described = gguf.describe_gguf(base, folder_check) if is_file else describe_folder(base, folder_check, wanted)
        return apply_gguf_adapter(read_gguf_adapter(addition), described)
    if base.is_file():
        message = "an adapter folder is merged only into a safetensors folder; name the one this file was made from"
        raise UnsupportedError(message, file=str(base))
    return folder.describe_folder(
        adapter.apply_adapter(adapter.read_adapter(addition), folder.open_folder(base, wanted)), folder_check
    )


def describe_folder(path: Path, folder_check: FolderCheck, wanted: WantedTask = FOLDER_TASK) -> Description:
    """The description of a folder: a safetensors checkpoint, or the parts of a GGUF file."""
    if first_part := find_split_file(path):
        check_task_chosen(first_part, wanted)
        return gguf.describe_gguf(first_part, folder_check)
    return folder.describe_folder(folder.open_folder(path, wanted), folder_check)
