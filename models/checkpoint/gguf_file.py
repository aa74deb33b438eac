"""Reads one GGUF file, which holds network, tokenizer and chat template. Everything unsupported is refused from the
header."""

from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ..architectures import FAMILIES
from ..architectures.family import MAX_HEAD_WIDTH, ORIGINAL, read_rope, read_rotary_width
from ..architectures.gguf_architectures import GGUF_ARCHITECTURES, GgufArchitecture, rename_tensor
from ..chat import ChatTemplate
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import open_regular
from ..network.heads import LabelScoring, Pooling, SequenceHead
from ..network.model_config import ModelConfig
from ..network.positions import Rotary, scale_frequencies
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .description import Description, HeadDescription
from .folder_files import FolderCheck, accept_folder, build_chat_template, parse_config, read_json, valid_tokens
from .gguf_header import TEMPLATE
from .gguf_parts import PART_NAME, read_parts
from .head_config import check_names, language_head, pooler_head
from .sampling_defaults import read_folder_sampling, read_gguf_sampling
from .tensor_files import TensorEntry

FREQUENCIES = "rope_freqs.weight"
NOT_ROTATED = torch.tensor(1e30)  # the factor of a frequency that is not used
SHORT_FACTORS = "rope_factors_short.weight"
POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
RANK_POOLING = 4
SCORES, OUTPUT_LABELS = "cls.output.weight", "classifier.output_labels"
MAX_LABELS = 1 << 20
END_TOKEN_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
log = getLogger(__name__)

Json = dict[str, Any]


def describe_gguf(
    path: Path, folder_check: FolderCheck = accept_folder, open_file: Callable[[Path], BinaryIO] = open_regular
) -> Description:
    """The description of a GGUF file, or of several parts, of which `path` is the first. `folder_check` is called
    before the tokenizer is made. `open_file` opens `path`: a file that was found in a folder is opened as its member.
    """
    metadata, entries = read_parts(path, open_file)
    name = check_architecture(path, metadata)
    fields = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    found = GGUF_ARCHITECTURES[name]
    dialect = found.variant(found, {tensor: entry.shape for tensor, entry in entries.items()})
    check_unsupported_keys(path, dialect, fields)
    config = parse_config(str(path), partial(read_config, dialect, fields, entries))
    head = choose_head(path, config, fields, entries)
    tokenizer = load_tokenizer(path, metadata, folder_check)
    generates = head.task == "generate"
    return Description(
        file=str(path),
        family=dialect.family,
        config=config,
        head=head,
        entries=entries,
        translate=partial(rename_tensor, dialect, config),
        tokenizer=tokenizer,
        chat=load_chat_template(path, metadata, tokenizer) if generates else None,
        stop_tokens=read_stop_tokens(metadata, tokenizer, config.vocab_size) if generates else frozenset(),
        max_tokens=config.max_positions,
        sampling=read_sampling(path, metadata) if generates else {},
    )


def read_sampling(path: Path, metadata: Json) -> dict[str, float]:
    """The sampling options that the file suggests, then those of the file beside it that names it. That file is no part
    of the model, so whatever is wrong with it is logged and refuses nothing."""
    beside = sampling_file(path)
    try:
        suggested = read_folder_sampling(str(beside), read_json(beside, {}))
    except (CheckpointError, OSError) as problem:
        log.warning("%s is not used: %s", beside, problem)
        suggested = {}
    return suggested | read_gguf_sampling(str(path), metadata)


def sampling_file(path: Path) -> Path:
    """The file beside a GGUF file that suggests its sampling: NAME.generation_config.json, of a part without its
    number."""
    part = PART_NAME.fullmatch(path.name)
    stem = part["stem"] if part else path.name.removesuffix(".gguf")
    return path.with_name(f"{stem}.generation_config.json")


def check_architecture(path: Path, metadata: Json) -> str:
    """The architecture's name. UnsupportedError if it is unknown, or if the file is only a part of a model."""
    name, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind == "adapter":
        message = "it is an adapter, which is loaded with its base: as BASE+ADAPTER, or as a model named BASE:NAME"
        raise UnsupportedError(message, file=str(path))
    if kind != "model":
        raise UnsupportedError(f"general.type is {show_value(kind)}; only whole models are loaded", file=str(path))
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise UnsupportedError(
            f"general.architecture {show_value(name)} is not known; known are {', '.join(GGUF_ARCHITECTURES)}",
            file=str(path),
        )
    return name


def check_unsupported_keys(path: Path, dialect: GgufArchitecture, fields: Json) -> None:
    for key in dialect.unsupported_keys:
        if fields.get(key):
            raise UnsupportedError(f"{key} {show_value(fields[key])} is not known here", file=str(path))
    for key, value in fields.items():
        counts = ("attention.head_count", "feed_forward_length")
        if isinstance(value, list) and key.startswith(counts) and key not in dialect.layered_keys:
            raise UnsupportedError(f"{key} differs from layer to layer, which is not known here", file=str(path))


def read_config(dialect: GgufArchitecture, fields: Json, entries: Mapping[str, TensorEntry]) -> ModelConfig:
    shapes = {name: entry.shape for name, entry in entries.items()}
    hf = dialect.config(fields, shapes)
    if FREQUENCIES in entries:
        parameters = hf["rope_parameters"].get("full_attention", hf["rope_parameters"])
        parameters |= infer_rope_scaling(entries[FREQUENCIES], hf, fields)
    if SHORT_FACTORS in entries:
        hf["rope_parameters"] |= read_short_factors(entries[SHORT_FACTORS], hf, fields)
        hf[ORIGINAL] = hf["rope_parameters"][ORIGINAL]
    config = FAMILIES[dialect.family].config(hf)
    causal = fields.get("attention.causal")
    if causal is not None and causal is not config.causal:
        seen = "before them only" if config.causal else "after them too"
        message = f"attention.causal is {show_value(causal)}, and tokens of this architecture see those {seen}"
        raise UnsupportedError(message)
    return config


def read_short_factors(entry: TensorEntry, hf: Json, fields: Json) -> Json:
    """LongRoPE within the original context, from the factors that the file has for its frequencies.

    The factors are read while the file is described, so their number is limited.
    """
    width = read_rotary_width(hf, hf["head_dim"]) or hf["head_dim"]
    if entry.shape != (width // 2,) or width > MAX_HEAD_WIDTH:
        message = f"its shape is {list(entry.shape)}, but the rotated features ask for {[width // 2]}"
        raise CheckpointError(message, file=str(entry.file), tensor=SHORT_FACTORS)
    original = fields.get("rope.scaling.original_context_length", hf["max_position_embeddings"])
    return {
        "rope_type": "longrope",
        "short_factor": entry.read(torch.float32, torch.device("cpu")).tolist(),
        "attention_factor": fields.get("rope.scaling.attn_factor"),
        ORIGINAL: original,
    }


def infer_rope_scaling(entry: TensorEntry, hf: Json, fields: Json) -> Json:
    """Rotary scaling, inferred from the factors that the file has for every frequency: that of Llama 3, or a share of
    rotated features, where the others are divided by NOT_ROTATED.

    The converter writes the factors, not the parameters. Only the largest factor and the published constants are tried.
    The factors are read while the file is described, before its memory is estimated, so their number is limited.
    """
    width = hf["global_head_dim"] if "global_head_dim" in hf else hf["head_dim"]
    if entry.shape != (width // 2,):
        message = f"its shape is {list(entry.shape)}, but the head width asks for {[width // 2]}"
        raise CheckpointError(message, file=str(entry.file), tensor=FREQUENCIES)
    if width > MAX_HEAD_WIDTH:
        message = f"the head width is {width}; such factors are read for heads of {MAX_HEAD_WIDTH} features at most"
        raise UnsupportedError(message, file=str(entry.file), tensor=FREQUENCIES)
    factors = entry.read(torch.float32, torch.device("cpu"))
    if bool((factors == 1).all()):
        return {}
    rotated = int((factors == 1).sum())
    if rotated and bool((factors[:rotated] == 1).all()) and bool((factors[rotated:] == NOT_ROTATED).all()):
        return {"rope_type": "proportional", "partial_rotary_factor": (rotated + 0.25) / len(factors)}
    if "full_attention" in hf["rope_parameters"]:
        message = f"its factors should be 1, and then {float(NOT_ROTATED):.0e} for features that are not rotated"
        raise UnsupportedError(message, file=str(entry.file), tensor=FREQUENCIES)
    guess = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": fields.get("rope.scaling.original_context_length", 8192),
    }
    if not torch.allclose(frequency_divisors(hf, guess), factors, rtol=1e-3):
        message = "its factors are not those of Llama 3's rope scaling, the only ones known"
        raise UnsupportedError(message, file=str(entry.file), tensor=FREQUENCIES)
    return guess


def frequency_divisors(hf: Json, guess: Json) -> Tensor:
    """The divisor of each frequency under the guessed scaling."""
    parameters = hf["rope_parameters"] | guess
    base, scaling = read_rope({"rope_parameters": parameters})
    assert scaling is not None
    plain = Rotary(hf["head_dim"], base).frequency
    return plain / scale_frequencies(plain, base, scaling)


def choose_head(path: Path, config: ModelConfig, fields: Json, entries: Mapping[str, TensorEntry]) -> HeadDescription:
    """A generator's head, unless the file is an encoder or names a pooling."""
    pooling = fields.get("pooling_type", 0)
    if config.causal and not pooling:
        return language_head(config, tied="output.weight" not in entries)
    if pooling == RANK_POOLING:
        return choose_score_head(path, config, fields, entries)
    if not isinstance(pooling, int) or pooling not in POOLINGS:
        log.warning("%s: no pooling_type says how to pool states; taking their mean", path)
        pooling = 1
    return pooler_head(POOLINGS[pooling], normalise=True)


def choose_score_head(
    path: Path, config: ModelConfig, fields: Json, entries: Mapping[str, TensorEntry]
) -> HeadDescription:
    """The head of an encoder that scores a pair of texts or classifies a text, from the state of its first token: a
    dense layer with tanh, if the file has one, and a score for each label (build_pooling in llama-graph.cpp).

    A reranker that generates (Qwen3) reads its pair in a prompt and is refused.
    """
    if config.causal or SCORES not in entries:
        message = f"it is a reranker whose scores are not those of an encoder with {SCORES}"
        raise UnsupportedError(f"{message}; load it from its safetensors folder", file=str(path))
    if not (shape := entries[SCORES].shape) or not 0 < shape[0] <= MAX_LABELS:
        message = f"its shape is {list(shape)}; a head has a row for each label, {MAX_LABELS} at most"
        raise CheckpointError(message, file=str(path), tensor=SCORES)
    labels = fields.get(OUTPUT_LABELS, [f"LABEL_{index}" for index in range(shape[0])])
    if not isinstance(labels, list) or len(labels) != shape[0] or not all(isinstance(each, str) for each in labels):
        message = f"{OUTPUT_LABELS} is {show_value(labels)}, which should be names of the {shape[0]} rows of {SCORES}"
        raise CheckpointError(message, file=str(path))
    names = check_names(OUTPUT_LABELS, tuple(labels), str(path))
    scoring = LabelScoring(
        activation="tanh" if "cls.weight" in entries else "none",
        dense_bias="cls.bias" in entries,
        bias="cls.output.bias" in entries,
    )

    def build(network: Transformer) -> nn.Module:
        return SequenceHead(network.config, len(names), scoring, "sigmoid" if len(names) == 1 else "softmax")

    return HeadDescription("rank" if len(names) == 1 else "classify", build, names)


def load_tokenizer(path: Path, metadata: Json, folder_check: FolderCheck = accept_folder) -> Tokenizer:
    try:
        fields = Tokenizer.select_gguf_fields(metadata)
        return Tokenizer.from_gguf(fields, folder_check(path, fields))
    except CheckpointError as error:
        raise error if error.file else type(error)(str(error), file=str(path)) from None


def load_chat_template(path: Path, metadata: Json, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template, with the one for tools. A file with templates of other names alone has none."""
    named = {
        key.removeprefix(f"{TEMPLATE}."): value for key, value in metadata.items() if key.startswith(f"{TEMPLATE}.")
    }
    templates = {**named, "default": metadata.get(TEMPLATE, named.get("default"))}
    if templates["default"] is None and named:
        log.warning("%s: none of its chat templates is the default one: %s", path, show_value(sorted(named)))
    return build_chat_template(str(path), templates, tokenizer)


def read_stop_tokens(metadata: Json, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    return valid_tokens([*(metadata.get(key) for key in END_TOKEN_KEYS), tokenizer.eos_id], vocab_size)
