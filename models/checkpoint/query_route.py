"""What a folder has for queries alone, where sentence-transformers' Router leads queries and documents to modules of
their own. Both are read by one network, or queries by a network of their own, or by a table of weights (Geng et al.
2024, arXiv:2411.04403), which is a tensor or `idf.json`, an object with a weight for each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import SourceFile, is_plain_name
from ..core.json_files import LARGE_JSON
from ..network.embedding_head import EmbeddingHead, TokenTableHead, UnitSpec, output_width
from ..network.model_config import ModelConfig
from ..network.transformer import Transformer
from ..tokenizer import Tokenizer
from .default_precision import DefaultPrecision
from .description import Description, HeadDescription
from .folder_files import FolderParts, read_json
from .sentence_modules import (
    MODULES,
    SPARSE_TABLE,
    SentenceModule,
    build_vector_modules,
    has_modules,
    read_module_tensors,
    read_routes,
)
from .tensor_files import FLOAT_ENCODINGS, TensorEntry, ignore_bytes

LISTED = "idf.json"
PROBES = ("", "A 2nd  Café, naïve\nQUERY: 東京!")  # whose tokens two tokenizers that read texts alike agree on
MAX_WEIGHT = torch.finfo(torch.float32).max
ReadTokenizer = Callable[[Path], Tokenizer]


@dataclass(frozen=True)
class ListedWeights(TensorEntry):
    """Weights of tokens, [V], out of a JSON file that has some of them; the others are 0."""

    weights: Mapping[int, float]

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        out = torch.zeros(self.shape)
        out[list(self.weights)] = torch.tensor(list(self.weights.values()), dtype=torch.float32)
        report_bytes(self.size)
        return out.to(device, dtype)


def add_query_route(
    parts: FolderParts, config: ModelConfig, head: HeadDescription, tokenizer: Tokenizer, read_tokenizer: ReadTokenizer
) -> HeadDescription:
    """The head with what it has for queries. UnsupportedError if these are read by something that is not known."""
    if parts.role == "queries":
        return head
    if not has_modules(parts.root):
        file = parts.root / LISTED
        if head.task != "fill" or not file.is_file():
            return head
        return add_table(LISTED, read_listed_weights(file, config, tokenizer), config, head, tokenizer)
    routes = read_routes(parts.root)
    if routes.queries == routes.documents:
        return head
    if [module.kind for module in routes.queries] == [SPARSE_TABLE] and head.task == "fill":
        folder = routes.queries[0].folder
        if not read_tokenizer(folder).has_same_tokens(tokenizer):
            message = "its tokenizers of queries and of documents have different tokens"
            raise UnsupportedError(message, file=str(parts.root / MODULES))
        entry = find_weights(parts.root, folder, config, tokenizer)
        return add_table(f"{folder.name}/{entry.name}", entry, config, head, tokenizer)
    if head.task == "embed" and has_query_network(parts.root):
        return replace(head, has_queries=True)
    if head.task != "embed" or routes.queries[:1] != routes.documents[:1]:
        kinds = show_value(", ".join(module.kind for module in routes.queries))
        message = f"its Router leads queries to {kinds}; known are layers after the same network, another Transformer"
        raise UnsupportedError(f"{message} for vectors, and {SPARSE_TABLE}", file=str(parts.root / MODULES))
    return add_layers(parts.root / MODULES, routes.queries, config, head)


def has_query_network(root: Path) -> bool:
    """Whether queries are read by a Transformer of their own."""
    if not has_modules(root):
        return False
    routes = read_routes(root)
    first = routes.queries[:1]
    return first != routes.documents[:1] and [module.kind for module in first] == ["Transformer"]


def check_query_network(
    file: Path, queries: Description, config: ModelConfig, head: HeadDescription, tokenizer: Tokenizer
) -> Description:
    """The description of the network of queries, which is computed in float32 by default: no test measures what less
    costs it. UnsupportedError unless its vectors and tokens are like those of documents."""
    same = (
        ("vectors", "numbers", queries.vector_width, head.width or config.state_width),
        ("network", "tokens", queries.config.vocab_size, config.vocab_size),
    )
    for what, unit, own, theirs in same:
        if own != theirs:
            message = f"{what} of queries: {own} {unit}, of documents: {theirs}; known are equal numbers"
            raise UnsupportedError(message, file=str(file))
    if not queries.tokenizer.has_same_tokens(tokenizer) or any(
        queries.tokenizer.encode(text).ids != tokenizer.encode(text).ids for text in PROBES
    ):
        raise UnsupportedError("its tokenizers of queries and of documents have different tokens", file=str(file))
    if queries.head.excludes_prompt != head.excludes_prompt:
        raise UnsupportedError("include_prompt: false for one of queries and documents is not known", file=str(file))
    if head.more_forms:
        forms = ", ".join(head.more_forms)
        message = f"further outputs ({forms}) of a network that reads documents only are not known"
        raise UnsupportedError(message, file=str(file))
    reason = "what int8 costs the network of queries is not measured"
    return replace(queries, preferred_precision=DefaultPrecision("float32", reason))


def find_weights(root: Path, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> TensorEntry:
    """The weights of a module's tokens: its tensor, or the JSON file that its configuration names. That name may be one
    on the hub; the file is looked for in the module's folder and in `root`."""
    named = read_json(folder / "config.json", {}).get("path")
    if named is not None:
        name = named.rpartition("/")[2] if isinstance(named, str) else ""
        name = name if name.endswith(".json") and is_plain_name(name) else LISTED
        file = next((place / name for place in (folder, root) if (place / name).is_file()), None)
        if file is None:
            message = f"path is {show_value(named)}, and {name} is neither in this folder nor in that of the model"
            raise CheckpointError(message, file=str(folder / "config.json"))
        return read_listed_weights(file, config, tokenizer)
    tensors = read_module_tensors(folder)
    if tensors.keys() != {"weight"} or tensors["weight"].shape != (config.vocab_size,):
        message = f"{SPARSE_TABLE} should have the one tensor weight, of {config.vocab_size} numbers, one a token"
        raise CheckpointError(message, file=str(folder))
    return tensors["weight"]


def read_listed_weights(file: Path, config: ModelConfig, tokenizer: Tokenizer) -> ListedWeights:
    """The weights in a JSON object by token. What is no token is the unknown one, as in sentence-transformers."""
    weights, given = dict[int, float](), read_json(file, limit=LARGE_JSON)
    for name, weight in given.items():
        if type(weight) not in (int, float) or not abs(weight) <= MAX_WEIGHT:
            message = f"the weight of {show_value(name)} is {show_value(weight)}, which should be a number"
            raise CheckpointError(message, file=str(file))
        token = tokenizer.token_id(name)
        token = tokenizer.unk_id if token is None else token
        if token is not None and not token < config.vocab_size:
            message = f"{show_value(name)} is token {token}, and the network has {config.vocab_size} tokens"
            raise CheckpointError(message, file=str(file))
        if token is not None:
            weights[token] = float(weight)
    shape, encoding = (config.vocab_size,), FLOAT_ENCODINGS["F32"]
    source = SourceFile(file, ())  # which is not opened again
    return ListedWeights(source, file.name, "F32", shape, 0, encoding, weights)


def add_table(
    name: str, entry: TensorEntry, config: ModelConfig, head: HeadDescription, tokenizer: Tokenizer
) -> HeadDescription:
    """The head with a weight for each token of a query; `name` is that of the entry in messages."""
    skipped = frozenset(token for side in tokenizer.boundary_tokens for token in side)
    build_main = head.build

    def build(network: Transformer) -> nn.Module:
        main = build_main(network)
        main.add_module("query_words", TokenTableHead(config.vocab_size, skipped))
        return main

    entries = {**head.own_entries, name: ("head.query_words.weight", entry)}
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
