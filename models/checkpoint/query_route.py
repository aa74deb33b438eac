"""What a folder has for queries alone, where sentence-transformers' Router leads queries and documents to modules of
their own. Both are read by one network, or queries by a table of weights (Geng et al. 2024, arXiv:2411.04403)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..network.embedding_head import EmbeddingHead, TokenTableHead, UnitSpec, output_width
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .description import HeadDescription
from .folder_files import FolderParts
from .sentence_modules import (
    MODULES,
    SPARSE_TABLE,
    SentenceModule,
    build_vector_modules,
    has_modules,
    read_module_tensors,
    read_routes,
)

ReadTokenizer = Callable[[Path], Tokenizer]


def add_query_route(
    parts: FolderParts, config: ModelConfig, head: HeadDescription, tokenizer: Tokenizer, read_tokenizer: ReadTokenizer
) -> HeadDescription:
    """The head with what it has for queries. UnsupportedError if queries are read by a network of their own."""
    if not has_modules(parts.root):
        return head
    routes = read_routes(parts.root)
    if routes.queries == routes.documents:
        return head
    if [module.kind for module in routes.queries] == [SPARSE_TABLE] and head.task == "fill":
        return add_table(parts.root / MODULES, routes.queries[0], config, head, (tokenizer, read_tokenizer))
    if head.task != "embed" or routes.queries[:1] != routes.documents[:1]:
        kinds = show_value(", ".join(module.kind for module in routes.queries))
        message = (
            f"its Router leads queries to {kinds}, a network of their own; known are layers after the same network"
        )
        raise UnsupportedError(f"{message}, and {SPARSE_TABLE}", file=str(parts.root / MODULES))
    return add_layers(parts.root / MODULES, routes.queries, config, head)


def add_table(
    file: Path,
    module: SentenceModule,
    config: ModelConfig,
    head: HeadDescription,
    tokenizers: tuple[Tokenizer, ReadTokenizer],
) -> HeadDescription:
    """The head with a weight for each token of a query. `tokenizers`: that of documents, and how to read that of
    queries."""
    tensors, known = read_module_tensors(module.folder), tokenizers[0]
    if tensors.keys() != {"weight"} or tensors["weight"].shape != (config.vocab_size,):
        message = f"{SPARSE_TABLE} should have the one tensor weight, of {config.vocab_size} numbers, one a token"
        raise CheckpointError(message, file=str(module.folder))
    if not tokenizers[1](module.folder).has_same_tokens(known):
        raise UnsupportedError("its tokenizers of queries and of documents have different tokens", file=str(file))
    skipped = frozenset(token for side in known.boundary_tokens for token in side)
    build_main = head.build

    def build(network: Transformer) -> nn.Module:
        main = build_main(network)
        main.add_module("query_words", TokenTableHead(config.vocab_size, skipped))
        return main

    entries = {**head.own_entries, f"{module.folder.name}/weight": ("head.query_words.weight", tensors["weight"])}
    return replace(head, build=build, own_entries=entries, has_queries=True)


def add_layers(
    file: Path, modules: Sequence[SentenceModule], config: ModelConfig, head: HeadDescription
) -> HeadDescription:
    """The head with the poolings and layers of queries."""
    own = build_vector_modules(file, modules, config.state_width)
    width = output_width(own.layers, len(own.poolings) * config.state_width)
    if own.token_layers or width != (head.width or config.state_width):
        message = f"vectors of queries have {width} numbers, those of documents {head.width or config.state_width}"
        raise UnsupportedError(f"{message}; known are equal ones", file=str(file))
    if head.excludes_prompt == own.include_prompt:
        raise UnsupportedError("include_prompt: false for one of queries and documents is not known", file=str(file))
    normalises = bool(own.layers) and isinstance(own.layers[-1], UnitSpec)
    layers, build_main = own.layers[:-1] if normalises else own.layers, head.build

    def build(network: Transformer) -> nn.Module:
        main = build_main(network)
        main.add_module("query_vector", EmbeddingHead(own.poolings, layers, normalise=normalises))
        return main

    added = {
        f"{name} (of queries)": (f"head.query_vector.layers.{ours}", entry)
        for name, (ours, entry) in (own.entries or {}).items()
    }
    return replace(head, build=build, own_entries={**head.own_entries, **added}, has_queries=True)
