"""Which head a folder's checkpoint has, what it is called in requests, and how long its input may be.

Knows nothing of weights.  Where Hugging Face's files leave something open, what their own libraries do by default is
done here, and said in the log.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..architectures import rename
from ..core.errors import CheckpointError, UnsupportedError
from ..core.files import subfolder
from ..network.encoder_decoder import EncoderDecoder
from ..network.heads import Closing, LanguageHead, MaskHead, Pooler, Pooling, SequenceHead, TokenHead
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from .description import Head
from .folder_files import Json, Parts, configured, read_json
from .generation_config import start_of, writing_of
from .tensor_files import same

OUTPUT, TOKENS, BIAS = "head.output.weight", "tokens.weight", "head.bias"
COPIES = ("head.copied.encoder.weight", "head.copied.decoder.weight")  # of the tokens' embeddings, one a side
BOTH_ORDERS = "both_orders"
MODULES, SPARSE = "modules.json", "SpladePooling"
PROMPTS, LOWERED = "config_sentence_transformers.json", "sentence_bert_config.json"
NO_PROMPTS: Mapping[str, str] = {"": ""}
LONGEST_SANE = 1 << 24  # tokenizers write 10^30 where they know of no limit
LONGEST_NAME = 1000  # characters of a label or of a prompt's name: answers repeat them
MOST_PROMPTS = 256
LONGEST_PROMPT = 4096  # characters: every text has it before it
MOST_NAMED = 4 << 20  # characters of all labels
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
CROSS_ENCODER: dict[str, Closing] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
log = getLogger(__name__)


def generating(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """Logits over the vocabulary; the matrix may be that of the token embedding."""
    return language(config, is_tied(parts)), config.max_positions


def is_tied(parts: Parts) -> bool:
    """Whether the output matrix is that of the token embedding."""
    names = theirs(parts, (OUTPUT, TOKENS))
    tied = bool(parts.config.get("tie_word_embeddings", OUTPUT not in names))
    if len(names) == 2 and tied:
        # Both are there: as in transformers, they are one only if they hold the same.
        tied = same(parts.entries[names[OUTPUT]], parts.entries[names[TOKENS]])
    return tied


def writing(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """Another text, written from what was read."""
    file = str(parts.path / "config.json")
    names = theirs(parts, (TOKENS, BIAS, *COPIES))
    for copy in COPIES:
        if copy in names and not (TOKENS in names and same(parts.entries[names[copy]], parts.entries[names[TOKENS]])):
            message = "the two sides have embeddings of their own; only one vocabulary for both is known"
            raise UnsupportedError(message, file=file, tensor=names[copy])
    both = configured(file, lambda: parts.spec.decoder(parts.config, start_of(parts.path, parts.config)))
    tied = is_tied(parts)
    decoder = replace(both.decoder, faces=True)
    both = replace(both, encoder=config, decoder=decoder, tied=tied, output_bias=BIAS in names)

    def build(network: Transformer) -> nn.Module:
        return EncoderDecoder(network, both)

    spare = (*COPIES, OUTPUT) if tied else COPIES
    how = writing_of(parts.path, parts.config, both.decoder)
    head = Head("translate", build, spare=spare, configs=(both.decoder,), writing=how)
    return head, input_limit(parts.path, config)


def language(config: ModelConfig, tied: bool) -> Head:
    """The head of a generator."""

    def build(network: Transformer) -> nn.Module:
        return LanguageHead(config, network.tokens if tied else None)

    return Head("generate", build, spare=(OUTPUT,) if tied else ())


def theirs(parts: Parts, wanted: tuple[str, ...]) -> dict[str, str]:
    """The checkpoint's names of those of our tensors that it holds."""
    found = {}
    for name in parts.entries:
        for ours, _ in rename(parts.family, parts.spec.renames, name, torch.empty((3, 3), device="meta")):
            if ours in wanted:
                found[ours] = name
    return found


def sequence(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """A score per label.  One label is a relevance: the task is to rank."""
    labels = labels_of(parts)
    closing = closing_of(parts, len(labels))
    scoring = configured(str(parts.path / "config.json"), partial(parts.spec.scoring, parts.config))

    def build(network: Transformer) -> nn.Module:
        return SequenceHead(network.config, len(labels), scoring, closing)

    both = added(parts, closing)
    head = Head("rank" if len(labels) == 1 else "classify", build, labels, both_orders=both)
    return head, input_limit(parts.path, config)


def added(parts: Parts, closing: Closing) -> bool:
    """Whether the scores of a pair's two orders are (Radford et al. 2018, section 3.3), as only we write it."""
    both, file = parts.config.get(BOTH_ORDERS, False), str(parts.path / "config.json")
    if not isinstance(both, bool):
        raise CheckpointError(f"{BOTH_ORDERS} is {both!r}, which should be true or false", file=file)
    if both and closing != "softmax":
        raise UnsupportedError(f"{BOTH_ORDERS} is known before a softmax, this head has {closing}", file=file)
    return both


def labels_of(parts: Parts) -> tuple[str, ...]:
    """Names of the labels in the order of the outputs; transformers' default is two without a name."""
    file, names = str(parts.path / "config.json"), parts.config.get("id2label")
    if names is None:
        count = parts.config.get("num_labels", 2)
        if not isinstance(count, int) or not 0 < count < 1 << 20:
            raise CheckpointError(f"num_labels is {count!r}, which should be a positive number", file=file)
        return check_names("num_labels", tuple(f"LABEL_{index}" for index in range(count)), file)
    if (
        not isinstance(names, dict)
        or not names
        or {str(key) for key in names} != {str(index) for index in range(len(names))}
    ):
        raise CheckpointError(f"id2label should name the labels 0 to n-1, not {names!r}"[:300], file=file)
    return check_names("id2label", tuple(str(names[key]) for key in sorted(names, key=int)), file)


def check_names(field: str, names: tuple[str, ...], file: str) -> tuple[str, ...]:
    """`names`, which answers repeat.  Raises CheckpointError if one is longer than LONGEST_NAME characters, or all
    together are longer than MOST_NAMED."""
    for name in names:
        check_characters(field, name, LONGEST_NAME, file)
    if (characters := sum(map(len, names))) > MOST_NAMED:
        message = f"{field} has {characters} characters in all; at most {MOST_NAMED} are allowed"
        raise CheckpointError(message, file=file)
    return names


def check_characters(field: str, text: str, most: int, file: str) -> None:
    if len(text) > most:
        message = f"{field} has a string of {len(text)} characters, {text[:30]!r}...; at most {most} are allowed"
        raise CheckpointError(message, file=file)


def closing_of(parts: Parts, labels: int) -> Closing:
    """How scores become probabilities: as transformers' pipeline and sentence-transformers' CrossEncoder do."""
    extra = parts.config.get("sentence_transformers")
    chosen = extra.get("activation_fn") if isinstance(extra, dict) else None
    if chosen:
        name = str(chosen).rpartition(".")[2]
        if name not in CROSS_ENCODER:
            message = f"activation_fn {chosen!r} is not known; known are {', '.join(CROSS_ENCODER)}"
            raise UnsupportedError(message, file=str(parts.path / "config.json"))
        return CROSS_ENCODER[name]
    problem = parts.config.get("problem_type")
    if problem == "regression" and labels > 1:
        return "none"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def tags(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """A score per label for every token."""
    labels = labels_of(parts)

    def build(network: Transformer) -> nn.Module:
        return TokenHead(network.config, len(labels), "softmax")

    return Head("tag", build, labels), input_limit(parts.path, config)


def spans(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """How well an answer starts and ends at every token: logits; what they are worth is seen beside a whole context."""

    def build(network: Transformer) -> nn.Module:
        return TokenHead(network.config, 2, "none")

    return Head("span", build), input_limit(parts.path, config)


def fillings(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """What a token may be; the matrix may be that of the token embedding."""
    refuse_other_weights(parts.path)
    tied, activation = is_tied(parts), parts.spec.activation or config.activation

    def build(network: Transformer) -> nn.Module:
        return MaskHead(network.config, activation, network.tokens if tied else None)

    return Head("fill", build, spare=(OUTPUT,) if tied else ()), input_limit(parts.path, config)


def refuse_other_weights(folder: Path) -> None:
    """Ways to weigh words (sentence-transformers' sparse encoders) that are not done here."""
    if (folder / MODULES).is_file():
        file = subfolder(folder, modules_of(folder)[SPARSE]) / "config.json"
        config = read_json(file)
        for key, known in (("pooling_strategy", "max"), ("activation_function", "relu")):
            if config.get(key, known) != known:
                raise UnsupportedError(f"{key} {config[key]!r} is not known; known is {known}", file=str(file))


def pools(folder: Path) -> bool:
    """Whether sentence-transformers made one vector a text of it."""
    return (folder / MODULES).is_file() and SPARSE not in modules_of(folder)


def vector(parts: Parts, config: ModelConfig) -> tuple[Head, int]:
    """One vector a text.

    modules.json says how states are pooled.  A plain encoder without it says nothing; sentence-transformers then
    takes the mean and leaves the length alone, and so do we.
    """
    if not (parts.path / MODULES).is_file():
        log.warning("%s: no modules.json says how to pool states; taking their mean", parts.path)
        return pooled("mean", normalise=False), input_limit(parts.path, config)
    modules = modules_of(parts.path)
    prompts = prompts_of(parts.path)
    pooling = pooling_of(subfolder(parts.path, modules["Pooling"]) / "config.json") if "Pooling" in modules else "mean"
    limit = read_json(parts.path / LOWERED, {}).get("max_seq_length")
    longest = input_limit(parts.path, config)
    if isinstance(limit, int) and limit > 0:
        longest = min(limit, config.max_positions)
    return pooled(pooling, "Normalize" in modules, prompts), longest


def prompts_of(folder: Path) -> dict[str, str]:
    """What sentence-transformers puts before texts, by name; the one without a name is put before every text.

    UnsupportedError for what else it does to them.
    """
    if read_json(folder / LOWERED, {}).get("do_lower_case"):
        message = "do_lower_case would change every text, which is not done here; unset it and send the text so"
        raise UnsupportedError(message, file=str(folder / LOWERED))
    file, config = folder / PROMPTS, read_json(folder / PROMPTS, {})
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError("prompts should be an object of strings", file=str(file))
    if len(prompts) > MOST_PROMPTS:
        raise CheckpointError(f"prompts has {len(prompts)} prompts; {MOST_PROMPTS} are the most", file=str(file))
    check_names("prompts", tuple(prompts), str(file))
    for text in prompts.values():
        check_characters("prompts", text, LONGEST_PROMPT, str(file))
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = ", ".join(prompts) or "there are none"
        message = f"default_prompt_name {str(default)[:60]!r} is none of its prompts: {known}"
        raise CheckpointError(message, file=str(file))
    return {**prompts, "": prompts[default] if default else ""}


def pooled(pooling: Pooling, normalise: bool, prompts: Mapping[str, str] = NO_PROMPTS) -> Head:
    """The head of an embedder."""

    def build(network: Transformer) -> nn.Module:  # noqa: ARG001 - every head is built for a network
        return Pooler(pooling, normalise)

    return Head("embed", build, prompts=prompts, pooling=pooling)


def modules_of(path: Path) -> dict[str, str]:
    """Where each module of a sentence-transformers folder keeps its files, by its kind."""
    file, kinds = path / MODULES, ("Transformer", "Pooling", "Normalize", "MLMTransformer", SPARSE)
    found = {}
    for module in read_list(file):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in kinds:
            raise UnsupportedError(
                f"module {module.get('type')!r} is not known; known are {', '.join(kinds)}", file=str(file)
            )
        found[kind] = str(module.get("path", ""))
    network = found.get("Transformer") or found.get("MLMTransformer")
    if network:
        message = f"its Transformer lies in {network!r}; only folders with it at the top are loaded"
        raise UnsupportedError(message, file=str(file))
    return found


def read_list(file: Path) -> list[Json]:
    modules: Any = read_json(file, kind=list)
    if not all(isinstance(module, dict) for module in modules):
        raise CheckpointError("should hold a list of objects, one a module", file=str(file))
    return list(modules)


def pooling_of(file: Path) -> Pooling:
    """From the newer `pooling_mode` or the older one switch a mode."""
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise UnsupportedError("include_prompt: false is not known; tokens of a prompt are pooled", file=str(file))
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes += [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if len(set(modes)) != 1 or modes[0] not in POOLINGS:
        raise UnsupportedError(
            f"pooling {' + '.join(map(str, modes)) or 'none'} is not known; "
            "known are one of mean, weightedmean, cls, max, lasttoken",
            file=str(file),
        )
    return POOLINGS[modes[0]]


def input_limit(path: Path, config: ModelConfig) -> int:
    """The longest input in tokens, special ones included."""
    said = read_json(path / "tokenizer_config.json", {}).get("model_max_length")
    sane = isinstance(said, int | float) and 0 < said < LONGEST_SANE
    return min(int(said), config.max_positions) if sane else config.max_positions


HEADS: dict[str, Callable[[Parts, ModelConfig], tuple[Head, int]]] = {
    "generate": generating,
    "classify": sequence,
    "embed": vector,
    "tag": tags,
    "span": spans,
    "fill": fillings,
    "translate": writing,
}
