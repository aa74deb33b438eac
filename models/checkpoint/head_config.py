"""Chooses the head of a checkpoint folder, its task and the longest input. Where the files leave something open, the
default of Hugging Face's own libraries is used and logged."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import getLogger
from math import prod
from pathlib import Path

import torch
from torch import nn

from ..architectures import rename_weight
from ..chat.pair_prompt import PairPrompt
from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.json_files import LARGE_JSON
from ..network.embedding_head import EmbeddingHead, UnitSpec, output_width
from ..network.encoder_decoder import EncoderDecoder
from ..network.heads import (
    LabelScoring,
    LanguageHead,
    MaskHead,
    Pooler,
    Pooling,
    ScoreActivation,
    SequenceHead,
    SparsePooling,
    TokenHead,
)
from ..network.logit_score import LogitScoreHead
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .description import HeadDescription, NamedPieces, list_pieces, most_tensors
from .folder_files import FolderParts, parse_config, read_json
from .generation_config import read_decoding_config, read_start_token
from .late_interaction import token_vector_head
from .published_rerankers import build_pair_template, find_answer_tokens
from .sentence_modules import (
    LOGIT_SCORE,
    MODULES,
    PROMPTS,
    SENTENCE_CONFIG,
    SPARSE,
    VectorModules,
    check_network_settings,
    has_modules,
    read_modules,
    read_object,
    read_sentence_config,
    read_vector_modules,
)
from .tensor_files import TensorEntry, entry_rows, has_same_bytes

OUTPUT, TOKENS, BIAS = "head.output.weight", "tokens.weight", "head.bias"
EMBEDDING_COPIES = ("head.copied.encoder.weight", "head.copied.decoder.weight")  # of the tokens' embeddings, one a side
BOTH_ORDERS = "both_orders"
NO_PROMPTS: Mapping[str, str] = {"": ""}
MAX_INPUT_LIMIT = 1 << 24  # tokenizers write 10^30 if there is no limit
MAX_COMPARED_NUMBERS = 1 << 33  # of a token embedding; the largest published ones have half of it
MAX_LABEL_LENGTH = 1000  # characters of a label or of a prompt's name: answers repeat them
MAX_PROMPTS = 256
MAX_PROMPT_LENGTH = 4096  # characters; it is put before every text
MAX_LABEL_CHARACTERS = 3 << 20  # characters of all labels
CROSS_ENCODER_ACTIVATIONS: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
OLDER_ACTIVATION = "sbert_ce_default_activation_function"  # in sentence-transformers before 4.0
log = getLogger(__name__)


def generation_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """The head of a generator: logits over the vocabulary. The output matrix may be tied to the token embedding.
    UnsupportedError for a network whose tokens see those after them."""
    if not config.causal:
        fields = "is_causal, is_decoder, use_bidirectional_attention"
        message = f"its tokens see those after them ({fields}), so it cannot generate"
        raise UnsupportedError(message, file=str(parts.path / "config.json"))
    return language_head(config, is_tied(parts, config)), config.max_positions


def is_tied(parts: FolderParts, config: ModelConfig) -> bool:
    """Whether the output matrix is tied to the token embedding."""
    names = checkpoint_names(parts, config, (OUTPUT, TOKENS))
    tied = bool(parts.config.get("tie_word_embeddings", OUTPUT not in names))
    if len(names) == 2 and tied:
        # Both exist: as in transformers, they are tied only if their numbers are equal.
        tied = is_embedding_copy(parts.entries[names[OUTPUT]], parts.entries[names[TOKENS]], config)
    return tied


def is_embedding_copy(copy: TensorEntry, tokens: TensorEntry, config: ModelConfig) -> bool:
    """Whether `copy` has the numbers of the token embedding. Tensors of another shape than the network's embedding are
    not read: their size has no bound, and the network is refused for them later. CheckpointError for more numbers than
    any network has there: they are compared before the memory for them is estimated."""
    expected = (config.vocab_size, config.embedding_width or config.width)
    if copy.shape == expected and prod(expected) > MAX_COMPARED_NUMBERS:
        message = f"it has {prod(expected)} numbers, and {MAX_COMPARED_NUMBERS} are the most where two are compared"
        raise CheckpointError(message, file=str(copy.file), tensor=copy.name)
    return copy.shape == tokens.shape == expected and has_same_bytes(copy, tokens)


def translation_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """The head of an encoder-decoder."""
    both = read_both_sides(parts, config)
    tied = is_tied(parts, config)
    both = replace(both, tied=tied, output_bias=BIAS in checkpoint_names(parts, config, (BIAS,)))

    def build(network: Transformer) -> nn.Module:
        return EncoderDecoder(network, both)

    spare = (*EMBEDDING_COPIES, OUTPUT) if tied else EMBEDDING_COPIES
    how = read_decoding_config(parts.path, parts.config, both.decoder)
    head = HeadDescription("translate", build, ignored_names=spare, decoder_configs=(both.decoder,), decoding=how)
    return head, input_limit(parts.path, config)


def read_both_sides(parts: FolderParts, config: ModelConfig) -> EncoderDecoderConfig:
    """The configuration of an encoder-decoder. UnsupportedError unless both sides have the same embeddings."""
    file = str(parts.path / "config.json")
    names = checkpoint_names(parts, config, (TOKENS, *EMBEDDING_COPIES))
    for copy in EMBEDDING_COPIES:
        if copy in names and not (
            TOKENS in names and is_embedding_copy(parts.entries[names[copy]], parts.entries[names[TOKENS]], config)
        ):
            message = "the two sides have embeddings of their own; only one vocabulary for both is known"
            raise UnsupportedError(message, file=file, tensor=names[copy])
    start = read_start_token(parts.path, parts.config)
    both = parse_config(file, lambda: parts.spec.decoder(parts.config, start.token))
    start.check(both.decoder.vocab_size)
    return replace(both, encoder=config, decoder=replace(both.decoder, has_cross_attention=True))


def language_head(config: ModelConfig, tied: bool) -> HeadDescription:
    """The head of a generator."""

    def build(network: Transformer) -> nn.Module:
        return LanguageHead(config, network.tokens if tied else None)

    return HeadDescription("generate", build, ignored_names=(OUTPUT,) if tied else ())


def checkpoint_names(parts: FolderParts, config: ModelConfig, our_names: tuple[str, ...]) -> dict[str, str]:
    """The checkpoint's names of those of our tensors that it holds. CheckpointError as by `list_pieces`."""

    def translate(name: str, entry: TensorEntry) -> NamedPieces:
        try:
            return rename_weight(parts.family, parts.spec.renames, name, torch.empty(entry.shape, device="meta"))
        except (RuntimeError, ValueError, IndexError):  # a shape that is refused when all tensors are matched
            return []

    most = most_tensors((config, config))  # the second may be a decoder
    pieces = list_pieces(str(parts.path / "config.json"), parts.entries, most, translate)
    return {ours: name for name, _, each in pieces for ours, _ in each if ours in our_names}


def sequence_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A score per label for a text. With one label the score is a relevance and the task is to rank."""
    labels = read_labels(parts)
    closing = choose_score_activation(parts, len(labels))
    scoring = read_scoring(parts)

    def build(network: Transformer) -> nn.Module:
        return SequenceHead(network.config, len(labels), scoring, closing)

    both = reads_both_orders(parts, closing)
    pairs = read_pair_prompt(parts, "sequence-classification") if has_modules(parts.root) else None
    task = "rank" if len(labels) == 1 else "classify"
    head = HeadDescription(task, build, labels, both_orders=both, pair_prompt=pairs)
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
    """How scores become probabilities, as in transformers' pipeline and sentence-transformers' CrossEncoder. These
    differ for a regression with one label: a CrossEncoder is known by its fields or its modules."""
    extra = parts.config.get("sentence_transformers")
    if has_modules(parts.root) and (newer := read_json(parts.root / PROMPTS, {}).get("activation_fn")):
        return read_activation(parts.root / PROMPTS, newer)
    field, fields = OLDER_ACTIVATION, parts.config
    if isinstance(extra, dict) and "activation_fn" in extra:
        field, fields = "activation_fn", extra
    if chosen := fields.get(field):
        return read_activation(parts.path / "config.json", chosen, field)
    problem = parts.config.get("problem_type")
    if problem == "regression" and (labels > 1 or not (isinstance(extra, dict) or has_modules(parts.root))):
        return "none"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def read_activation(file: Path, chosen: object, field: str = "activation_fn") -> ScoreActivation:
    """The function that a field of sentence-transformers names."""
    name = chosen.rpartition(".")[2] if isinstance(chosen, str) else ""
    if name not in CROSS_ENCODER_ACTIVATIONS:
        message = f"{field} {show_value(chosen)} is not known; known are {', '.join(CROSS_ENCODER_ACTIVATIONS)}"
        raise UnsupportedError(message, file=str(file))
    return CROSS_ENCODER_ACTIVATIONS[name]


def tag_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A score per label for every token."""
    scoring = read_scoring(parts)
    labels = scoring.two_labels or read_labels(parts)

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
    sparse, scoring = read_sparse_pooling(parts.root), read_scoring(parts)
    tied = is_tied(parts, config)

    def build(network: Transformer) -> nn.Module:
        head = MaskHead(network.config, scoring, network.tokens if tied else None)
        head.sparse = sparse
        return head

    return HeadDescription("fill", build, ignored_names=(OUTPUT,) if tied else ()), input_limit(parts.path, config)


def read_sparse_pooling(root: Path) -> SparsePooling:
    """How the weights of words follow from a mask head's logits (SPLADE); without modules.json as most models do.
    UnsupportedError for modules without a SpladePooling."""
    if not has_modules(root):
        return SparsePooling()
    folder = next((module.folder for module in read_modules(root) if module.kind == SPARSE), None)
    if folder is None:
        message = f"its modules make no weights of words: {SPARSE} should follow the network, which has a mask head"
        raise UnsupportedError(message, file=str(root / MODULES))
    file, config = folder / "config.json", read_json(folder / "config.json")
    found = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for key, value, known in zip(
        ("pooling_strategy", "activation_function"), found, (("max", "sum"), ("relu", "log1p_relu")), strict=True
    ):
        if value not in known:
            raise UnsupportedError(
                f"{key} {show_value(value)} is not known; known are {', '.join(known)}", file=str(file)
            )
    return SparsePooling(sums=found[0] == "sum", log_twice=found[1] == "log1p_relu")


def embedding_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """One vector a text.

    modules.json defines how states become a vector. Without that file, sentence-transformers takes the mean and does
    not normalise; so does this.
    """
    if not has_modules(parts.root):
        log.warning("%s: no modules.json says how to pool states; taking their mean", parts.root)
        return pooler_head("mean", normalise=False), input_limit(parts.path, config)
    modules, prompts = read_vector_modules(parts.root, config.state_width, parts.role), read_prompts(parts.root)
    check_network_settings(parts.path)
    return vector_head(modules, prompts, config.state_width), sentence_limit(parts.path, config)


def sentence_limit(folder: Path, config: ModelConfig) -> int:
    """The longest input in tokens of a Transformer module."""
    limit = read_sentence_config(folder).get("max_seq_length")
    return min(limit, config.max_positions) if type(limit) is int and limit > 0 else input_limit(folder, config)


def vector_head(modules: VectorModules, prompts: Mapping[str, str], width: int) -> HeadDescription:
    """The head of an embedder with these modules on states of `width`."""
    layers = modules.layers
    normalise = bool(layers) and isinstance(layers[-1], UnitSpec)
    layers = layers[:-1] if normalise else layers
    if modules.token_layers:
        message = "layers between the network and the pooling are not known here"
        raise UnsupportedError(message)
    pooling = "+".join(modules.poolings)
    if len(modules.poolings) == 1 and not layers:
        plain = pooler_head(modules.poolings[0], normalise, prompts)
        return replace(plain, excludes_prompt=not modules.include_prompt)

    def build(network: Transformer) -> nn.Module:  # noqa: ARG001 - every head is built for a network
        return EmbeddingHead(modules.poolings, layers, normalise=normalise)

    return HeadDescription(
        "embed",
        build,
        prompts=prompts,
        pooling=pooling,
        width=output_width(layers, len(modules.poolings) * width),
        excludes_prompt=not modules.include_prompt,
        own_entries={name: (f"head.layers.{ours}", entry) for name, (ours, entry) in (modules.entries or {}).items()},
    )


def read_prompts(root: Path) -> dict[str, str]:
    """The prompts that sentence-transformers puts before texts, by name; the one with the empty name is put before
    every text."""
    file = root / PROMPTS
    config = read_json(file, {})
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


def logit_score_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A relevance from a generator's logits for a yes and a no after a pair (sentence-transformers' LogitScore)."""
    newer = read_json(parts.root / PROMPTS, {}).get("activation_fn")
    closing: ScoreActivation = read_activation(parts.root / PROMPTS, newer) if newer else "sigmoid"
    name, matrix = find_output_matrix(parts, config)
    tokens = read_score_tokens(parts.root, matrix.shape[0])
    head = token_score_head(name, matrix, tokens, closing)
    return replace(head, pair_prompt=read_pair_prompt(parts, "text-generation")), sentence_limit(parts.path, config)


def answer_head(parts: FolderParts, config: ModelConfig, tokenizer: Tokenizer) -> tuple[HeadDescription, int]:
    """As `logit_score_head`, for a generator that answers in the prompt of a published reranker."""
    name, matrix = find_output_matrix(parts, config)
    tokens = find_answer_tokens(parts.path, parts.prompt, tokenizer)
    if max(tokens) >= matrix.shape[0]:
        message = f"its answer is token {max(tokens)}, and its output matrix has {matrix.shape[0]} rows"
        raise CheckpointError(message, file=str(matrix.file), tensor=name)
    head = token_score_head(name, matrix, tokens, "sigmoid")
    return replace(head, pair_prompt=build_pair_template(parts.prompt, tokenizer)), input_limit(parts.path, config)


def find_output_matrix(parts: FolderParts, config: ModelConfig) -> tuple[str, TensorEntry]:
    """The output matrix of a generator, or the token embedding to which it is tied. UnsupportedError unless its rows
    can be read one by one."""
    names = checkpoint_names(parts, config, (OUTPUT, TOKENS))
    name = names.get(TOKENS if is_tied(parts, config) else OUTPUT, "")
    if not name or config.logit_bias:
        what = "its output layer has a bias" if name else "it has no output matrix"
        raise UnsupportedError(f"{what}; a score of logits needs a plain one", file=str(parts.path / "config.json"))
    if type(matrix := parts.entries[name]) is not TensorEntry:
        raise UnsupportedError("a score of logits needs a matrix of floats", file=str(matrix.file), tensor=name)
    return name, matrix


def token_score_head(
    name: str, matrix: TensorEntry, tokens: tuple[int, ...], closing: ScoreActivation
) -> HeadDescription:
    """The head whose score is the logit of the first of `tokens`, less that of the second if there are two. Only their
    rows of the output matrix, which has this `name`, are read."""

    def build(network: Transformer) -> nn.Module:
        return LogitScoreHead(network.config, len(tokens), closing)

    rows = {
        f"{name}[{token}]": (f"head.output.{number}", entry_rows(matrix, range(token, token + 1)))
        for number, token in enumerate(tokens)
    }
    return HeadDescription("rank", build, ("LABEL_0",), ignored_names=(OUTPUT,), own_entries=rows)


def read_score_tokens(root: Path, vocabulary: int) -> tuple[int, ...]:
    """The token whose logit is the score, and the one whose logit is subtracted from it, if there is one."""
    last = read_modules(root)[-1]
    if [module.kind for module in read_modules(root)] != ["Transformer", LOGIT_SCORE]:
        message = "LogitScore is known directly after a Transformer only"
        raise UnsupportedError(message, file=str(root / MODULES))
    file = last.folder / "config.json"
    config = read_json(file)
    if (source := config.get("module_input_name") or "causal_logits") != "causal_logits":
        message = f"module_input_name {show_value(source)} is not known; known is causal_logits"
        raise UnsupportedError(message, file=str(file))
    found = [config.get("true_token_id"), config.get("false_token_id")]
    tokens = found if found[1] is not None else found[:1]
    for field, token in zip(("true_token_id", "false_token_id"), tokens, strict=False):
        if type(token) is not int or not 0 <= token < vocabulary:
            message = f"{field} is {show_value(token)}, which should be a token from 0 to {vocabulary - 1}"
            raise CheckpointError(message, file=str(file))
    return tuple(tokens)


def read_pair_prompt(parts: FolderParts, task: str) -> PairPrompt | None:
    """How a chat template gets a query and a document; None: they are read as a pair of texts.

    `task` is that of the Transformer module. UnsupportedError for settings of it that are not known.
    """
    file, config = parts.path / SENTENCE_CONFIG, read_sentence_config(parts.path)
    system = read_prompts(parts.root)[""]
    modes = read_object(file, config, "modality_config")
    if (found := config.get("transformer_task", task)) != task:
        message = f"transformer_task {show_value(found)} does not fit its head; known is {task}"
        raise UnsupportedError(message, file=str(file))
    if "message" not in modes:
        if system:
            raise UnsupportedError("a default prompt before a pair of texts is not known", file=str(file))
        return None
    message_mode = read_object(file, modes, "message")
    form = message_mode.get("format", "flat")
    if form not in ("flat", "structured") or message_mode.get("method_output_name", "logits") != "logits":
        raise UnsupportedError(f"modality_config.message {show_value(message_mode)} is not known", file=str(file))
    settings = read_object(file, config, "processing_kwargs")
    if unknown := [key for key in settings if key != "chat_template"]:
        message = f"processing_kwargs.{unknown[0]} is not known; known is chat_template"
        raise UnsupportedError(message, file=str(file))
    variables = {"add_generation_prompt": False, **read_object(file, settings, "chat_template")}
    if variables.pop("restore_suffix", True) is not True:
        raise UnsupportedError("processing_kwargs.chat_template.restore_suffix: only true is known", file=str(file))
    return PairPrompt(system, form == "structured", variables)


def pooler_head(pooling: Pooling, normalise: bool, prompts: Mapping[str, str] = NO_PROMPTS) -> HeadDescription:
    """The head of an embedder."""

    def build(network: Transformer) -> nn.Module:  # noqa: ARG001 - every head is built for a network
        return Pooler(pooling, normalise)

    return HeadDescription("embed", build, prompts=prompts, pooling=pooling)


def input_limit(path: Path, config: ModelConfig) -> int:
    """The longest input in tokens, special tokens included."""
    stored = read_json(path / "tokenizer_config.json", {}, limit=LARGE_JSON).get("model_max_length")
    sane = type(stored) in (int, float) and 1 <= stored < MAX_INPUT_LIMIT
    return min(int(stored), config.max_positions) if sane else config.max_positions


HEADS: dict[str, Callable[[FolderParts, ModelConfig], tuple[HeadDescription, int]]] = {
    "generate": generation_head,
    "classify": sequence_head,
    "choose": choice_head,
    "embed": embedding_head,
    "score": logit_score_head,
    "token_vectors": token_vector_head,
    "tag": tag_head,
    "span": span_head,
    "fill": mask_head,
    "translate": translation_head,
}
