"""Folders of static embeddings, which have a vector for each token of the vocabulary and no network: those of model2vec
and of sentence-transformers' StaticEmbedding.

The same folder may be read by both packages. As in them, model2vec's own (with its config.json) skips unknown tokens,
and the others do not.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..network.model_config import ModelConfig
from ..network.static_network import StaticNetwork
from ..tokenizer import Tokenizer
from .description import Description, HeadDescription, NamedPieces
from .folder import list_tensors, load_tokenizer
from .folder_files import FolderCheck, JsonObject, accept_folder, read_json
from .head_config import pooler_head, read_prompts, vector_head
from .sentence_modules import STATIC, has_modules, read_flag, read_modules, read_vector_modules
from .tensor_files import INTEGER_ENCODINGS, TensorEntry
from .unread_formats import check_folder

MODEL2VEC = "model2vec"
CLASS_NAME = "StaticModel"  # of model2vec
DEFAULT_LENGTH = 512  # tokens that model2vec reads if its configuration names no other number
MAX_LENGTH = 1 << 15  # tokens of a text for which a folder names no limit
MAX_WIDTH = 1 << 14  # numbers of a vector; published models have a thousand
# The tensors of both packages, by our names.
TENSORS = {"embedding.weight": "tokens.weight", "embeddings": "tokens.weight", "weights": "weights"}
MAPPING = "mapping"
BYTES = "whole numbers of 8 bits"  # a kind of numbers: a quantised matrix, of which no scale is kept


def is_static(root: Path) -> bool:
    """Whether a folder has static embeddings."""
    if has_modules(root):
        return any(module.kind == STATIC for module in read_modules(root)[:1])
    return is_model2vec(read_json(root / "config.json", {}))


def is_model2vec(config: JsonObject) -> bool:
    return config.get("model_type") == MODEL2VEC or config.get("architectures") == [CLASS_NAME]


def describe_static(root: Path, folder_check: FolderCheck = accept_folder) -> Description:
    """The description of a folder. `folder_check` is called before the tokenizer is read."""
    path = read_modules(root)[0].folder if has_modules(root) else root
    check_folder(path)
    config, entries = read_json(path / "config.json", {}), list_tensors(path)
    matrix = find_matrix(path, entries)
    entries = {**entries, matrix.name: matrix}
    tokenizer = load_tokenizer(path, folder_check).without_boundary_tokens()
    mapping = read_mapping(entries[MAPPING], matrix.shape[0], tokenizer.vocab_size) if MAPPING in entries else None
    limit = read_limit(path / "config.json", config)
    shape = ModelConfig(
        vocab_size=matrix.shape[0] if mapping is None else len(mapping),
        width=matrix.shape[1],
        depth=1,
        heads=1,
        kv_heads=1,
        head_width=matrix.shape[1],
        mlp_width=1,
        max_positions=limit,
        causal=False,
        static=True,
    )
    head = read_head(root, path, config, tokenizer, shape.width)
    own = {name: entry for name, (_, entry) in head.own_entries.items()}
    build = partial(StaticNetwork, shape, matrix.shape[0], mapping, weighted="weights" in entries)
    return Description(
        file=str(matrix.file),
        family="static",
        config=shape,
        head=head,
        entries={name: entry for name, entry in entries.items() if name != MAPPING} | own,
        translate=partial(translate, {**TENSORS, **{name: ours for name, (ours, _) in head.own_entries.items()}}),
        build_network=build,
        tokenizer=tokenizer,
        max_tokens=limit,
    )


def translate(names: Mapping[str, str], name: str, tensor: Tensor) -> NamedPieces:
    return [(names.get(name, name), tensor)]


def find_matrix(path: Path, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    """The matrix with a vector for each token, or for several. Whole numbers of 8 bits are its numbers as they are."""
    known = [name for name, ours in TENSORS.items() if ours == "tokens.weight" and name in entries]
    if len(known) != 1:
        raise CheckpointError("it should hold one of embedding.weight and embeddings", file=str(path))
    matrix = entries[known[0]]
    if len(matrix.shape) != 2 or not matrix.shape[0] or not 0 < matrix.shape[1] <= MAX_WIDTH:
        message = f"its shape is {list(matrix.shape)}, which should be rows of 1 to {MAX_WIDTH} numbers"
        raise CheckpointError(message, file=str(matrix.file), tensor=matrix.name)
    return replace(matrix, kind=BYTES) if matrix.kind == "I8" else matrix


def read_mapping(entry: TensorEntry, rows: int, tokens: int) -> Tensor:
    """The row of each token, [V]. CheckpointError for a row that the matrix does not have.

    It is read while the folder is described, before its memory is estimated, so it is as long as the tokenizer has
    `tokens` at most.
    """
    if entry.kind not in INTEGER_ENCODINGS or len(entry.shape) != 1 or not entry.shape[0]:
        message = f"its numbers are {entry.kind} of shape {list(entry.shape)}, which should be one integer a token"
        raise CheckpointError(message, file=str(entry.file), tensor=entry.name)
    if entry.shape[0] > tokens:
        message = f"it names the rows of {entry.shape[0]} tokens, and the tokenizer has {tokens}"
        raise CheckpointError(message, file=str(entry.file), tensor=entry.name)
    mapping = entry.read(torch.int64, torch.device("cpu"))
    if int(mapping.min()) < 0 or int(mapping.max()) >= rows:
        wrong = int(mapping.min()) if int(mapping.min()) < 0 else int(mapping.max())
        message = f"it names row {wrong}, and the matrix has rows 0 to {rows - 1}"
        raise CheckpointError(message, file=str(entry.file), tensor=entry.name)
    return mapping


def read_limit(file: Path, config: JsonObject) -> int:
    """The longest text in tokens."""
    length = config.get("max_length", DEFAULT_LENGTH if is_model2vec(config) else None)
    if length is None:
        return MAX_LENGTH
    if type(length) is not int or length < 1:
        raise CheckpointError(f"max_length is {show_value(length)}, which should be a positive number", file=str(file))
    return min(length, MAX_LENGTH)


def read_head(root: Path, path: Path, config: JsonObject, tokenizer: Tokenizer, width: int) -> HeadDescription:
    """The mean of a text's vectors, and the modules after it."""
    if has_modules(root):
        modules = read_vector_modules(root, width)
        if modules.token_layers or modules.poolings != ("mean",) or not modules.include_prompt:
            raise UnsupportedError("a Pooling after StaticEmbedding is not known", file=str(root / "modules.json"))
        head = vector_head(modules, read_prompts(root), width)
    else:
        head = pooler_head("mean", read_flag(path / "config.json", config, "normalize", default=False))
    unknown = tokenizer.unknown_id
    skips = is_model2vec(config) and unknown is not None
    return replace(head, skipped_tokens=frozenset((cast(int, unknown),)) if skips else frozenset[Any]())
