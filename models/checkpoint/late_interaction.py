"""Folders of late-interaction models, which have a vector for each token: those of PyLate, of sentence-transformers'
MultiVectorEncoder, and of the first ColBERT implementation (architecture HF_ColBERT)."""

import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.late_interaction import LateInteraction, TextRole
from ..network.embedding_head import DenseSpec, LayerSpec, TokenVectorHead, UnitSpec, output_width
from ..network.model_config import ModelConfig
from ..tokenizer import Tokenizer
from .description import HeadDescription
from .folder_files import FolderParts, JsonObject, read_json
from .sentence_modules import (
    LAYER_KINDS,
    MAX_WIDTH,
    MODULES,
    PROMPTS,
    SENTENCE_CONFIG,
    TOKEN_VECTORS,
    SentenceModule,
    has_modules,
    read_flag,
    read_layers,
    read_modules,
    read_object,
    read_sentence_config,
)

FIRST_ARCHITECTURE = "HF_ColBERT"
METADATA = "artifact.metadata"
MASK_MODULE = "MultiVectorMask"
PROJECTION = "linear.weight"  # of the first implementation
QUERY_TOKENS, DOCUMENT_TOKENS = 32, 180  # defaults of ColBERT and of PyLate
MAX_SKIPPED, MAX_SKIPPED_LENGTH = 4096, 256  # words without a vector, and characters of one
MAX_PREFIX_LENGTH = 4096  # characters


def token_vector_head(parts: FolderParts, config: ModelConfig) -> tuple[HeadDescription, int]:
    """A vector for each token: the states through the Dense modules, scaled to length one."""
    layers, entries = read_projection(parts) if has_modules(parts.root) else read_first_projection(parts, config)
    try:
        width = output_width(layers, config.state_width)
    except ValueError as error:
        raise CheckpointError(f"its modules do not fit together: {error}", file=str(parts.root / MODULES)) from None
    head = HeadDescription(
        "embed",
        lambda _: TokenVectorHead(layers),
        pooling="tokens",
        width=width,
        own_entries={name: (f"head.layers.{ours}", entry) for name, (ours, entry) in entries.items()},
    )
    return head, config.max_positions


def read_projection(parts: FolderParts) -> tuple[tuple[LayerSpec, ...], Mapping[str, Any]]:
    """The layers of the modules after the network."""
    first, *rest = read_modules(parts.root)
    file = str(parts.root / MODULES)
    layers = [module for module in rest if module.kind in LAYER_KINDS]
    others = [module for module in rest if module.kind not in (*LAYER_KINDS, MASK_MODULE, "Dropout")]
    if first.kind != "Transformer" or others:
        found, known = show_value((others or [first])[0].type), ", ".join(("Transformer", *LAYER_KINDS, MASK_MODULE))
        raise UnsupportedError(f"module {found} is not known for vectors of tokens; known are {known}", file=file)
    specs, entries = read_layers(layers, TOKEN_VECTORS, default=TOKEN_VECTORS)
    closed = specs if specs and isinstance(specs[-1], UnitSpec) else (*specs, UnitSpec())
    return closed, entries


def read_first_projection(parts: FolderParts, config: ModelConfig) -> tuple[tuple[LayerSpec, ...], Mapping[str, Any]]:
    """The projection of the first implementation, which is in the network's own file."""
    entry = parts.entries.get(PROJECTION)
    if entry is None or len(entry.shape) != 2 or not 0 < entry.shape[0] <= MAX_WIDTH:
        message = f"{PROJECTION} is missing, or no matrix of at most {MAX_WIDTH} rows"
        raise CheckpointError(message, file=str(parts.path))
    dense = DenseSpec(config.state_width, entry.shape[0], bias=False, activation="none")
    return (dense, UnitSpec()), {PROJECTION: (f"0.{PROJECTION}", entry)}


def read_late_interaction(parts: FolderParts, config: ModelConfig, tokenizer: Tokenizer) -> LateInteraction:
    """How queries and documents are read. UnsupportedError for a setting that is not known."""
    if not has_modules(parts.root):
        return read_first_settings(parts.path, config, tokenizer)
    file = parts.root / PROMPTS
    given = read_json(file, {})
    if given.get("model_type") == "ColBERT":
        return read_pylate_settings(file, given, config, tokenizer)
    return read_sentence_settings(parts, given, config, tokenizer)


def read_first_settings(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> LateInteraction:
    """The settings of the first implementation."""
    file = folder / METADATA
    found = read_json(file, {})
    settings = {
        "query_prefix": found.get("query_token_id") or "[unused0]",
        "document_prefix": found.get("doc_token_id") or "[unused1]",
        "query_length": found.get("query_maxlen") or QUERY_TOKENS,
        "document_length": found.get("doc_maxlen") or DOCUMENT_TOKENS,
        "attend_to_expansion_tokens": bool(found.get("attend_to_mask_tokens")),
        "skiplist_words": list(string.punctuation) if found.get("mask_punctuation", True) else [],
    }
    return read_pylate_settings(file, settings, config, tokenizer)


def read_pylate_settings(file: Path, given: JsonObject, config: ModelConfig, tokenizer: Tokenizer) -> LateInteraction:
    """PyLate's settings, with its defaults: a prefix token for each role, queries filled up with mask tokens."""
    lengths = {
        "query": read_length(file, given, "query_length", QUERY_TOKENS, config),
        "document": read_length(file, given, "document_length", DOCUMENT_TOKENS, config),
    }
    expands = given.get("do_query_expansion") is None or read_flag(file, given, "do_query_expansion", default=True)
    attends = bool(given.get("attend_to_expansion_tokens"))
    words = given.get("skiplist_words")
    skipped = find_tokens(file, list(string.punctuation) if words is None else words, tokenizer)
    prompts = {name: text or "" for name, text in read_object(file, given, "prompts").items()}
    roles = {}
    for role, default in (("query", "[Q] "), ("document", "[D] ")):
        prefix = given.get(f"{role}_prefix", default)
        prefix = default if prefix is None else prefix
        text = prompts.get(role, "")
        check_text(file, f"{role}_prefix", prefix)
        check_text(file, "prompts", text)
        token = tokenizer.token_id(prefix) if prefix else None
        roles[role] = TextRole(
            prompt=text if token is not None else prefix + text,
            prefix=-1 if token is None else token,
            max_tokens=lengths[role],
            expanded=lengths[role] if role == "query" and expands else 0,
            skipped=skipped if role == "document" else frozenset(),
        )
    filler = expansion_token(file, tokenizer) if expands else -1
    return LateInteraction(roles["query"], roles["document"], filler, expands and not attends, averages=False)


def read_sentence_settings(
    parts: FolderParts, given: JsonObject, config: ModelConfig, tokenizer: Tokenizer
) -> LateInteraction:
    """The settings of sentence-transformers' MultiVectorEncoder."""
    file, settings = parts.path / SENTENCE_CONFIG, read_sentence_config(parts.path)
    expansion = read_object(file, settings, "query_expansion")
    if expansion and expansion.get("strategy") not in ("fixed", "min"):
        raise UnsupportedError(f"query_expansion {show_value(expansion)} is not known", file=str(file))
    longest = read_length(file, settings, "max_seq_length", config.max_positions, config)
    query = read_length(file, settings, "query_length", longest, config)
    document = read_length(file, settings, "document_length", longest, config)
    expanded = read_length(file, expansion, "length", QUERY_TOKENS, config) if expansion else 0
    if expansion.get("strategy") == "fixed":
        query = expanded
    words, tasks = read_mask(parts.root)
    skipped = find_tokens(parts.root / MODULES, words, tokenizer)
    similarity = given.get("similarity_fn_name") or "maxsim"
    if similarity not in ("maxsim", "meanmaxsim"):
        message = f"similarity_fn_name {show_value(similarity)} is not known; known are maxsim, meanmaxsim"
        raise UnsupportedError(message, file=str(parts.root / PROMPTS))
    prompts = read_object(parts.root / PROMPTS, given, "prompts")
    roles = {}
    for role, most in (("query", max(query, expanded)), ("document", document)):
        text = prompts.get(role) or ""
        check_text(parts.root / PROMPTS, "prompts", text)
        roles[role] = TextRole(
            prompt=text,
            prefix=-1,
            max_tokens=most,
            expanded=expanded if role == "query" else 0,
            skipped=skipped if role in tasks else frozenset(),
        )
    filler = expansion_token(file, tokenizer, expansion.get("token")) if expansion else -1
    attends = read_flag(file, expansion, "attend", default=False)
    hides = bool(expansion) and not attends
    return LateInteraction(roles["query"], roles["document"], filler, hides, averages=similarity == "meanmaxsim")


def read_mask(root: Path) -> tuple[list[Any], list[Any]]:
    """The words without a vector, and the roles in which they have none, from the MultiVectorMask module."""
    masks: list[SentenceModule] = [module for module in read_modules(root) if module.kind == MASK_MODULE]
    file = (masks[0].folder if masks else root) / "config.json"
    config = read_json(file, {}) if masks else {}
    if config.get("keep_only_token_ids"):
        raise UnsupportedError("keep_only_token_ids is not known; all tokens of a text are kept", file=str(file))
    words, tasks = config.get("skiplist_words") or [], config.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(words, list) or not isinstance(tasks, list):
        raise CheckpointError("skiplist_words and skiplist_tasks should be lists of strings", file=str(file))
    return words, tasks


def find_tokens(file: Path, words: object, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that are exactly these words; words that are no token are left out, as sentence-transformers does."""
    known = isinstance(words, list) and len(words) <= MAX_SKIPPED
    if not known or not all(isinstance(word, str) and len(word) <= MAX_SKIPPED_LENGTH for word in as_list(words)):
        message = f"skiplist_words should be a list of at most {MAX_SKIPPED} strings of {MAX_SKIPPED_LENGTH} characters"
        raise CheckpointError(message, file=str(file))
    return frozenset(token for word in as_list(words) if (token := tokenizer.token_id(word)) is not None)


def as_list(words: object) -> Iterable[Any]:
    return words if isinstance(words, list) else ()


def expansion_token(file: Path, tokenizer: Tokenizer, name: object = None) -> int:
    """The token that fills up a query: the named one, or else the mask token, or the end token."""
    if name is not None:
        token = tokenizer.token_id(name) if isinstance(name, str) else None
        if token is None:
            raise CheckpointError(f"query_expansion.token {show_value(name)} is no token", file=str(file))
        return token
    for found in (tokenizer.mask_id, tokenizer.eos_id):
        if found is not None:
            return found
    raise UnsupportedError("queries are filled up, and the vocabulary has no mask token and no end", file=str(file))


def read_length(file: Path, config: JsonObject, field: str, default: int, network: ModelConfig) -> int:
    """A number of tokens, at most as many as the network takes."""
    value = default if config.get(field) is None else config[field]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{field} is {show_value(value)}, which should be a positive number", file=str(file))
    return min(value, network.max_positions)


def check_text(file: Path, field: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > MAX_PREFIX_LENGTH:
        message = f"{field} has {show_value(text)}, which should be a string of at most {MAX_PREFIX_LENGTH} characters"
        raise CheckpointError(message, file=str(file))
