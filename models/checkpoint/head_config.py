"""Chooses the head of a checkpoint folder, its task and the longest input. Where the files leave something open, the
default of Hugging Face's own libraries is used and logged."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..architectures import rename_weight
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import subfolder
from ..network.encoder_decoder import EncoderDecoder
from ..network.heads import (
    LabelScoring,
    LanguageHead,
    MaskHead,
    Pooler,
    Pooling,
    ScoreActivation,
    SequenceHead,
    TokenHead,
)
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from ..network.transformer import Transformer
from .description import MAX_NAMED, HeadDescription
from .folder_files import FolderParts, JsonObject, parse_config, read_json
from .generation_config import read_decoding_config, read_start_token
from .tensor_files import TensorEntry, has_same_bytes

OUTPUT, TOKENS, BIAS = "head.output.weight", "tokens.weight", "head.bias"
EMBEDDING_COPIES = ("head.copied.encoder.weight", "head.copied.decoder.weight")  # of the tokens' embeddings, one a side
BOTH_ORDERS = "both_orders"
MODULES, SPARSE = "modules.json", "SpladePooling"
PROMPTS, SENTENCE_CONFIG = "config_sentence_transformers.json", "sentence_bert_config.json"
NO_PROMPTS: Mapping[str, str] = {"": ""}
MAX_INPUT_LIMIT = 1 << 24  # tokenizers write 10^30 if there is no limit
MAX_LABEL_LENGTH = 1000  # characters of a label or of a prompt's name: answers repeat them
MAX_PROMPTS = 256
MAX_PROMPT_LENGTH = 4096  # characters; it is put before every text
MAX_LABEL_CHARACTERS = 4 << 20  # characters of all labels
POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "weightedmean": "weighted",
    "weightedmean_tokens": "weighted",
    "cls": "cls",
    "cls_token": "cls",
    "max": "max",
    "max_tokens": "max",
    "lasttoken": "last",
    "last_token": "last",
}
CROSS_ENCODER_ACTIVATIONS: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
log = getLogger(__name__)


def generation_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """The head of a generator: logits over the vocabulary. The output matrix may be tied to the token embedding."""
    return language_head(config, is_tied(parts, config)), config.max_positions


def is_tied(parts: FolderParts, config: ModelConfig) -> bool:
    """Whether the output matrix is tied to the token embedding."""
    names = checkpoint_names(parts, (OUTPUT, TOKENS))
    tied = bool(parts.config.get("tie_word_embeddings", OUTPUT not in names))
    if len(names) == 2 and tied:
        # Both exist: as in transformers, they are tied only if their numbers are equal.
        tied = is_embedding_copy(parts.entries[names[OUTPUT]], parts.entries[names[TOKENS]], config)
    return tied


def is_embedding_copy(copy: TensorEntry, tokens: TensorEntry, config: ModelConfig) -> bool:
    """Whether `copy` has the numbers of the token embedding. Tensors of another shape than the network's embedding are
    not read: their size has no bound, and the network is refused for them later."""
    expected = (config.vocab_size, config.embedding_width or config.width)
    return copy.shape == tokens.shape == expected and has_same_bytes(copy, tokens)


def translation_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """The head of an encoder-decoder."""
    both = read_both_sides(parts, config)
    tied = is_tied(parts, config)
    both = replace(both, tied=tied, output_bias=BIAS in checkpoint_names(parts, (BIAS,)))

    def build(network: Transformer) -> nn.Module:
        return EncoderDecoder(network, both)

    spare = (*EMBEDDING_COPIES, OUTPUT) if tied else EMBEDDING_COPIES
    how = read_decoding_config(parts.path, parts.config, both.decoder)
    head = HeadDescription("translate", build, ignored_names=spare, decoder_configs=(both.decoder,), decoding=how)
    return head, input_limit(parts.path, config)


def read_both_sides(parts: FolderParts, config: ModelConfig) -> EncoderDecoderConfig:
    """The configuration of an encoder-decoder. UnsupportedError unless both sides have the same embeddings."""
    file = str(parts.path / "config.json")
    names = checkpoint_names(parts, (TOKENS, *EMBEDDING_COPIES))
    for copy in EMBEDDING_COPIES:
        if copy in names and not (
            TOKENS in names and is_embedding_copy(parts.entries[names[copy]], parts.entries[names[TOKENS]], config)
        ):
            message = "the two sides have embeddings of their own; only one vocabulary for both is known"
            raise UnsupportedError(message, file=file, tensor=names[copy])
    both = parse_config(file, lambda: parts.spec.decoder(parts.config, read_start_token(parts.path, parts.config)))
    return replace(both, encoder=config, decoder=replace(both.decoder, has_cross_attention=True))


def language_head(config: ModelConfig, tied: bool) -> HeadDescription:
    """The head of a generator."""

    def build(network: Transformer) -> nn.Module:
        return LanguageHead(config, network.tokens if tied else None)

    return HeadDescription("generate", build, ignored_names=(OUTPUT,) if tied else ())


def checkpoint_names(parts: FolderParts, our_names: tuple[str, ...]) -> dict[str, str]:
    """The checkpoint's names of those of our tensors that it holds."""
    found = {}
    for name, entry in parts.entries.items():
        try:
            pieces = rename_weight(parts.family, parts.spec.renames, name, torch.empty(entry.shape, device="meta"))
        except (RuntimeError, ValueError):  # a shape that is refused when all tensors are matched
            continue
        found.update({ours: name for ours, _ in pieces if ours in our_names})
    return found


def sequence_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A score per label for a text. With one label the score is a relevance and the task is to rank."""
    labels = read_labels(parts)
    closing = choose_score_activation(parts, len(labels))
    scoring = read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return SequenceHead(network.config, len(labels), scoring, closing)

    both = reads_both_orders(parts, closing)
    head = HeadDescription("rank" if len(labels) == 1 else "classify", build, labels, both_orders=both)
    return head, input_limit(parts.path, config)


def choice_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A score for each of several texts. Their probabilities follow only from all of them."""
    scoring = read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return SequenceHead(network.config, 1, scoring, "none")

    return HeadDescription("choose", build), input_limit(parts.path, config)


def read_scoring(parts: FolderParts) -> LabelScoring:
    return parse_config(str(parts.path / "config.json"), partial(parts.spec.scoring, parts.config))


def reads_both_orders(parts: FolderParts, closing: ScoreActivation) -> bool:
    """Whether the scores of a pair's two orders are added (Radford et al. 2018, section 3.3). Only checkpoints saved by
    this program have the field."""
    both, file = parts.config.get(BOTH_ORDERS, False), str(parts.path / "config.json")
    if not isinstance(both, bool):
        raise CheckpointError(f"{BOTH_ORDERS} is {show_value(both)}, which should be true or false", file=file)
    if both and closing != "softmax":
        raise UnsupportedError(
            f"{BOTH_ORDERS} is supported before a softmax only, and this head has {closing}", file=file
        )
    return both


def read_labels(parts: FolderParts) -> tuple[str, ...]:
    """Names of the labels in the order of the outputs; transformers' default is two labels without names."""
    file, names = str(parts.path / "config.json"), parts.config.get("id2label")
    if names is None:
        count = parts.config.get("num_labels", 2)
        if not isinstance(count, int) or not 0 < count < 1 << 20:
            raise CheckpointError(f"num_labels is {show_value(count)}, which should be a positive number", file=file)
        return check_names("num_labels", tuple(f"LABEL_{index}" for index in range(count)), file)
    if (
        not isinstance(names, dict)
        or not names
        or {str(key) for key in names} != {str(index) for index in range(len(names))}
    ):
        raise CheckpointError(f"id2label should name the labels 0 to n-1, not {show_value(names)}", file=file)
    named = {str(key): name for key, name in names.items()}
    if wrong := next((name for name in named.values() if isinstance(name, list | dict)), None):
        raise CheckpointError(f"id2label has {show_value(wrong)} where the name of a label belongs", file=file)
    return check_names("id2label", tuple(str(named[str(index)]) for index in range(len(named))), file)


def check_names(field: str, names: tuple[str, ...], file: str) -> tuple[str, ...]:
    """The `names`, which answers repeat. Raises CheckpointError if one is longer than MAX_LABEL_LENGTH characters, or
    all together are longer than MAX_LABEL_CHARACTERS."""
    for name in names:
        check_characters(field, name, MAX_LABEL_LENGTH, file)
    if (characters := sum(map(len, names))) > MAX_LABEL_CHARACTERS:
        message = f"{field} has {characters} characters in all; at most {MAX_LABEL_CHARACTERS} are allowed"
        raise CheckpointError(message, file=file)
    return names


def check_characters(field: str, text: str, most: int, file: str) -> None:
    if len(text) > most:
        message = f"{field} has a string of {len(text)} characters, {text[:30]!r}...; at most {most} are allowed"
        raise CheckpointError(message, file=file)


def choose_score_activation(parts: FolderParts, labels: int) -> ScoreActivation:
    """How scores become probabilities, as in transformers' pipeline and sentence-transformers' CrossEncoder."""
    extra = parts.config.get("sentence_transformers")
    chosen = extra.get("activation_fn") if isinstance(extra, dict) else None
    if chosen:
        name = chosen.rpartition(".")[2] if isinstance(chosen, str) else ""
        if name not in CROSS_ENCODER_ACTIVATIONS:
            message = (
                f"activation_fn {show_value(chosen)} is not known; known are {', '.join(CROSS_ENCODER_ACTIVATIONS)}"
            )
            raise UnsupportedError(message, file=str(parts.path / "config.json"))
        return CROSS_ENCODER_ACTIVATIONS[name]
    problem = parts.config.get("problem_type")
    if problem == "regression" and labels > 1:
        return "none"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def tag_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A score per label for every token."""
    labels, scoring = read_labels(parts), read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return TokenHead(network.config, len(labels), "softmax", scoring)

    return HeadDescription("tag", build, labels), input_limit(parts.path, config)


def span_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """Start and end logits of an answer for every token. Their probabilities follow only from the whole context."""
    scoring = read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return TokenHead(network.config, 2, "none", scoring)

    return HeadDescription("span", build), input_limit(parts.path, config)


def mask_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """Logits over the vocabulary for every token. The output matrix may be tied to the token embedding."""
    check_sparse_pooling(parts.path)
    tied, scoring = is_tied(parts, config), read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return MaskHead(network.config, scoring, network.tokens if tied else None)

    return HeadDescription("fill", build, ignored_names=(OUTPUT,) if tied else ()), input_limit(parts.path, config)


def check_sparse_pooling(folder: Path) -> None:
    """UnsupportedError for other token weightings of sentence-transformers' sparse encoders than the supported one."""
    if (folder / MODULES).is_file():
        file = subfolder(folder, read_modules(folder)[SPARSE]) / "config.json"
        config = read_json(file)
        for key, known in (("pooling_strategy", "max"), ("activation_function", "relu")):
            if config.get(key, known) != known:
                raise UnsupportedError(
                    f"{key} {show_value(config[key])} is not known; known is {known}", file=str(file)
                )


def is_embedder(folder: Path) -> bool:
    """Whether the folder is a sentence-transformers model that gives one vector a text."""
    return (folder / MODULES).is_file() and SPARSE not in read_modules(folder)


def embedding_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """One vector a text.

    modules.json defines how states are pooled. Without that file, sentence-transformers takes the mean and does not
    normalise; so does this.
    """
    if not (parts.path / MODULES).is_file():
        log.warning("%s: no modules.json says how to pool states; taking their mean", parts.path)
        return pooler_head("mean", normalise=False), input_limit(parts.path, config)
    modules = read_modules(parts.path)
    prompts = read_prompts(parts.path)
    pooling = (
        read_pooling(subfolder(parts.path, modules["Pooling"]) / "config.json") if "Pooling" in modules else "mean"
    )
    limit = read_json(parts.path / SENTENCE_CONFIG, {}).get("max_seq_length")
    longest = input_limit(parts.path, config)
    if isinstance(limit, int) and limit > 0:
        longest = min(limit, config.max_positions)
    return pooler_head(pooling, "Normalize" in modules, prompts), longest


def read_prompts(folder: Path) -> dict[str, str]:
    """The prompts that sentence-transformers puts before texts, by name; the one with the empty name is put before
    every text.

    UnsupportedError for other changes of the text.
    """
    if read_json(folder / SENTENCE_CONFIG, {}).get("do_lower_case"):
        message = "do_lower_case would change every text, which is not supported; unset it and send lower-case texts"
        raise UnsupportedError(message, file=str(folder / SENTENCE_CONFIG))
    file, config = folder / PROMPTS, read_json(folder / PROMPTS, {})
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError("prompts should be an object of strings", file=str(file))
    if len(prompts) > MAX_PROMPTS:
        raise CheckpointError(f"prompts has {len(prompts)} prompts; {MAX_PROMPTS} are the most", file=str(file))
    check_names("prompts", tuple(prompts), str(file))
    for text in prompts.values():
        check_characters("prompts", text, MAX_PROMPT_LENGTH, str(file))
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = ", ".join(prompts) or "there are none"
        message = f"default_prompt_name {show_value(default)} is none of its prompts: {known}"
        raise CheckpointError(message, file=str(file))
    return {**prompts, "": prompts[default] if default else ""}


def pooler_head(pooling: Pooling, normalise: bool, prompts: Mapping[str, str] = NO_PROMPTS) -> HeadDescription:
    """The head of an embedder."""

    def build(network: Transformer) -> nn.Module:  # noqa: ARG001 - every head is built for a network
        return Pooler(pooling, normalise)

    return HeadDescription("embed", build, prompts=prompts, pooling=pooling)


def read_modules(folder: Path) -> dict[str, str]:
    """The subfolder of each module of a sentence-transformers folder, by the module's kind."""
    file, kinds = folder / MODULES, ("Transformer", "Pooling", "Normalize", "MLMTransformer", SPARSE)
    found = {}
    for module in read_list(file):
        kind, path = module.get("type"), module.get("path", "")
        kind = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if kind not in kinds:
            raise UnsupportedError(
                f"module {show_value(module.get('type'))} is not known; known are {', '.join(kinds)}", file=str(file)
            )
        if not isinstance(path, str):
            raise CheckpointError(f"path {show_value(path)} of {kind} is no string", file=str(file))
        found[kind] = path
    network = found.get("Transformer") or found.get("MLMTransformer")
    if network:
        message = f"its Transformer lies in {show_value(network)}; only folders with it at the top are loaded"
        raise UnsupportedError(message, file=str(file))
    return found


def read_list(file: Path) -> list[JsonObject]:
    modules: Any = read_json(file, kind=list)
    if not all(isinstance(module, dict) for module in modules):
        raise CheckpointError("should hold a list of objects, one a module", file=str(file))
    return list(modules)


def read_pooling(file: Path) -> Pooling:
    """The pooling, from the newer `pooling_mode` or from the older form with one boolean a mode."""
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise UnsupportedError("include_prompt: false is not known; tokens of a prompt are pooled", file=str(file))
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [] if mode is None else mode
    if not isinstance(modes, list) or not all(isinstance(each, str) for each in modes):
        raise UnsupportedError(f"pooling_mode is {show_value(mode)}, which should be a string", file=str(file))
    modes = modes + [
        key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on
    ]
    if len(set(modes)) != 1 or modes[0] not in POOLINGS:
        raise UnsupportedError(
            f"pooling {' + '.join(modes[:MAX_NAMED]) or 'none'} is not known; "
            "known are one of mean, weightedmean, cls, max, lasttoken",
            file=str(file),
        )
    return POOLINGS[modes[0]]


def input_limit(path: Path, config: ModelConfig) -> int:
    """The longest input in tokens, special tokens included."""
    stored = read_json(path / "tokenizer_config.json", {}).get("model_max_length")
    sane = isinstance(stored, int | float) and 0 < stored < MAX_INPUT_LIMIT
    return min(int(stored), config.max_positions) if sane else config.max_positions


HEADS: dict[str, Callable[[FolderParts, ModelConfig], tuple[HeadDescription, int]]] = {
    "generate": generation_head,
    "classify": sequence_head,
    "choose": choice_head,
    "embed": embedding_head,
    "tag": tag_head,
    "span": span_head,
    "fill": mask_head,
    "translate": translation_head,
}
