"""Saves and reads the folder of a recurrent encoder-decoder: config.json, model.safetensors, tokenizer.json. The fields
and parameters are stored under the network's own names, and all of them are read."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from math import prod
from pathlib import Path

import orjson
import torch
from safetensors.torch import save as packed

from ..core.errors import CheckpointError, ModelError, UnsupportedError, show_value
from ..core.files import copy_file
from ..network.model_config import ModelConfig
from ..recurrent import RecurrentConfig, RecurrentTranslator
from ..seq2seq.decoding import DecodingConfig
from ..tokenizer import Tokenizer
from .description import LAYER_NAME, Description, HeadDescription, SkipInitialization, check_depth, join_names
from .folder import list_tensors
from .folder_files import FolderCheck, JsonObject, accept_folder, read_json
from .tensor_files import TensorEntry, check_readable
from .unread_formats import SINGLE

KIND, ARCHITECTURE = "polyhead-recurrent", "RecurrentForTranslation"
STANDARD_NAMES = {
    "start": "decoder_start_token_id",
    "end": "eos_token_id",
    "pad": "pad_token_id",
}  # names that other programs use
FILE_NAMES = {
    field.name: STANDARD_NAMES.get(field.name, field.name) for field in fields(RecurrentConfig)
}  # the file's names by ours


def save_recurrent(folder: Path, network: RecurrentTranslator, tokenizer_file: Path) -> None:
    """Save a folder that can be loaded like any other. config.json is written last: without it a folder is no
    checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().to("cpu", torch.float32).contiguous() for name, each in network.named_parameters()}
    (folder / SINGLE).write_bytes(packed(tensors, metadata={"format": "pt"}))
    if tokenizer_file.absolute() != (folder / "tokenizer.json").absolute():
        copy_file(tokenizer_file, folder / "tokenizer.json")
    described = {FILE_NAMES[name]: value for name, value in asdict(network.config).items()}
    whole = {"model_type": KIND, "architectures": [ARCHITECTURE], "dtype": "float32", **described}
    (folder / "config.json").write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2) + b"\n")


def is_recurrent(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == KIND


def describe_recurrent(folder: Path, folder_check: FolderCheck = accept_folder) -> Description:
    """The description of the folder. `folder_check` is called before the tokenizer is read."""
    file = folder / "config.json"
    config, entries = parse_recurrent_config(str(file), read_json(file)), list_tensors(folder)
    tokenizer = Tokenizer.from_folder(folder, folder_check(folder, {}))
    if tokenizer.vocab_size > config.vocab_size:
        message = f"it knows {tokenizer.vocab_size} tokens, {file} says that the network knows {config.vocab_size}"
        raise CheckpointError(message, file=str(folder))
    check_entries(str(file), config, entries)
    stack_config = ModelConfig(
        vocab_size=config.vocab_size,
        width=config.hidden,
        depth=config.depth,
        heads=1,
        kv_heads=1,
        head_width=config.hidden,
        mlp_width=4 * config.hidden,
        max_positions=config.max_positions,
        causal=False,
    )
    how = DecodingConfig(stop_tokens=frozenset({config.end}), max_tokens=config.max_positions)
    decoder_config = replace(stack_config, causal=True, has_cross_attention=True)
    return Description(
        file=str(file),
        family=KIND,
        config=stack_config,
        head=HeadDescription("translate", lambda network: network, decoder_configs=(decoder_config,), decoding=how),
        entries=entries,
        translate=lambda name, tensor: [(name, tensor)],
        tokenizer=tokenizer,
        max_tokens=config.max_positions,
        build_network=partial(RecurrentTranslator, config),
    )


def parse_recurrent_config(file: str, content: JsonObject) -> RecurrentConfig:
    """The configuration in a config.json. CheckpointError unless it has every field and no unknown one."""
    if (content.get("model_type"), content.get("architectures")) != (KIND, [ARCHITECTURE]):
        kind, architectures = map(show_value, (content.get("model_type"), content.get("architectures")))
        found = f"model_type {kind} with architectures {architectures}"
        raise UnsupportedError(f"{found} is not {KIND!r} with [{ARCHITECTURE!r}]", file=file)
    described = {name: value for name, value in content.items() if name not in ("model_type", "architectures", "dtype")}
    if unknown := sorted(described.keys() - FILE_NAMES.values()):
        raise CheckpointError(f"{join_names(unknown)}: no such field is known; remove it", file=file)
    if missing := [name for name in FILE_NAMES.values() if name not in described]:
        raise CheckpointError(f"{join_names(missing)}: missing", file=file)
    try:
        return RecurrentConfig(**{ours: described[name] for ours, name in FILE_NAMES.items()})
    except ModelError as error:
        ours, _, wrong = str(error).partition(" ")
        raise CheckpointError(f"{FILE_NAMES[ours]} {wrong}", file=file) from None


def check_entries(file: str, config: RecurrentConfig, entries: Mapping[str, TensorEntry]) -> None:
    """CheckpointError unless the entries are exactly the network's parameters."""
    tensor_count = sum(1 for name, entry in entries.items() if LAYER_NAME.search(name) and prod(entry.shape))
    check_depth(file, config.depth, tensor_count)
    with torch.device("meta"), SkipInitialization():
        network = RecurrentTranslator(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if missing := [name for name in shapes if name not in entries]:
        message = f"{len(missing)} tensors are missing: {join_names(missing)}; config.json asks for them"
        raise CheckpointError(message, file=str(Path(file).parent), tensor=missing[0])
    for name, entry in entries.items():
        if name not in shapes:
            raise CheckpointError(
                "it has no place in the network that config.json describes", file=str(entry.file), tensor=name
            )
        if entry.shape != shapes[name]:
            message = f"its shape is {list(entry.shape)}, but config.json asks for {list(shapes[name])}"
            raise CheckpointError(message, file=str(entry.file), tensor=name)
        check_readable(entry)
