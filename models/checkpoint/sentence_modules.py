"""Folders of sentence-transformers: modules.json lists modules, each in a folder of its own with a config.json and, if
it has weights, a model.safetensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import list_files, subfolder
from ..network.embedding_head import DenseSpec, LayerSpec, NormSpec, UnitSpec, output_width
from ..network.heads import Pooling
from .folder_files import JsonObject, Role, read_json
from .tensor_files import TensorEntry, read_safetensors
from .unread_formats import SINGLE

MODULES = "modules.json"
NETWORKS = ("Transformer", "MLMTransformer")
STATIC = "StaticEmbedding"
SPARSE = "SpladePooling"
LOGIT_SCORE = "LogitScore"
LAYER_KINDS = ("Dense", "LayerNorm", "Normalize")
ROUTERS, ROUTER_CONFIG = ("Router", "Asym"), "router_config.json"
SPARSE_TABLE = "SparseStaticEmbedding"
LATE_INTERACTION = ("ColBERT", "MultiVectorEncoder")  # kinds of models with a vector for each token
PROMPTS, SENTENCE_CONFIG = "config_sentence_transformers.json", "sentence_bert_config.json"
ARGUMENTS = {  # by their older and newer names, and the file where their settings belong
    **dict.fromkeys(("config_args", "config_kwargs", "model_args", "model_kwargs"), "config.json"),
    **dict.fromkeys(
        ("tokenizer_args", "tokenizer_kwargs", "processor_args", "processor_kwargs"), "tokenizer_config.json"
    ),
}
HARMLESS_ARGUMENTS = frozenset(  # they say where the files are, or how the same is computed; some are always replaced
    (
        *("attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage"),
        *("padding_side", "revision", "subfolder", "token", "torch_dtype", "trust_remote_code", "unpad_inputs"),
        *("add_pooling_layer", "use_cache", "use_fast", "use_flash_attn", "use_memory_efficient_attention"),
        *("use_safetensors", "weights_only"),
    )
)
OLDER_NETWORKS = ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
KNOWN = (
    *(*NETWORKS, STATIC, "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", SPARSE, LOGIT_SCORE),
    *("MultiVectorMask", SPARSE_TABLE, *ROUTERS),
)
OTHER_NETWORKS = {
    "WordEmbeddings": "looks up words of a vocabulary of its own",
    "BoW": "counts words",
    "CNN": "is a convolution over tokens",
    "LSTM": "is a recurrent network over tokens",
    "WordWeights": "weighs words of a vocabulary of its own",
    "WeightedLayerPooling": "mixes the states of all layers",
    "CLIPModel": "reads images",
    "SparseAutoEncoder": "is a sparse autoencoder",
}  # modules that are refused, and what they do
MAX_MODULES = 64
MAX_POOLINGS = 16
MAX_WIDTH = 1 << 16  # numbers of a layer's vectors; published ones have a few thousand
TOKEN_VECTORS, TEXT_VECTOR = "token_embeddings", "sentence_embedding"
LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # in the order in which their vectors are joined
POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted",
    "lasttoken": "last",
}
ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True)
class SentenceModule:
    """One entry of modules.json: the last part of its type, the whole type, and its folder."""

    kind: str
    type: Any
    folder: Path


@dataclass(frozen=True)
class VectorModules:
    """What turns a network's states into vectors: layers on the vectors of tokens, poolings, layers on that of a text.

    `entries` are the layers' tensors, by names for messages, each with its name below the layers (`0.linear.weight`).
    """

    token_layers: tuple[LayerSpec, ...] = ()
    poolings: tuple[Pooling, ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    include_prompt: bool = True
    token_entries: Mapping[str, tuple[str, TensorEntry]] | None = None
    entries: Mapping[str, tuple[str, TensorEntry]] | None = None


@dataclass(frozen=True)
class Routes:
    """The modules of a folder for documents, which are those of any text, and for queries."""

    documents: tuple[SentenceModule, ...]
    queries: tuple[SentenceModule, ...]


def has_modules(root: Path) -> bool:
    return (root / MODULES).is_file()


def read_modules(root: Path, role: Role = "documents") -> tuple[SentenceModule, ...]:
    """The modules of a folder in their order, where a Router leads to those for texts of a role. UnsupportedError for
    one that is not known."""
    routes = read_routes(root)
    return routes.queries if role == "queries" else routes.documents


def read_routes(root: Path) -> Routes:
    """The modules of a folder, with those that each Router leads to in its place. CheckpointError if none are for
    documents."""
    listed = list_modules(root)
    routers = {module.folder: read_router(module) for module in listed if module.kind in ROUTERS}

    def follow(role: Role) -> tuple[SentenceModule, ...]:
        parts = (getattr(routers[each.folder], role) if each.kind in ROUTERS else (each,) for each in listed)
        return tuple(module for part in parts for module in part)

    routes = Routes(follow("documents"), follow("queries"))
    if not routes.documents:
        raise CheckpointError("it lists no modules; the first should be a Transformer", file=str(root / MODULES))
    if max(map(len, (routes.documents, routes.queries))) > MAX_MODULES:
        raise CheckpointError(f"has more than {MAX_MODULES} modules, {MAX_MODULES} are the most", file=str(root))
    return routes


def read_router(router: SentenceModule) -> Routes:
    """The modules that a Router has for documents and for queries (its older name is Asym)."""
    file = router.folder / ROUTER_CONFIG
    file = file if file.is_file() else router.folder / "config.json"
    config = read_json(file)
    kinds, structure = read_object(file, config, "types"), read_object(file, config, "structure")
    settings = read_object(file, config, "parameters")
    if not 0 < len(structure) <= MAX_MODULES or len(kinds) > MAX_MODULES * len(structure):
        message = f"structure has {len(structure)} routes and types {len(kinds)} modules; 1 to {MAX_MODULES} are known"
        raise CheckpointError(message, file=str(file))

    def follow(*tasks: str) -> tuple[SentenceModule, ...]:
        names = structure[choose_route(file, settings, structure, tasks)]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("structure should hold lists of names of modules", file=str(file))
        return tuple(read_module(router.folder, {"type": kinds.get(name), "path": name}, file) for name in names)

    return Routes(follow("document", "doc"), follow("query"))


def choose_route(file: Path, settings: JsonObject, structure: JsonObject, tasks: Sequence[str]) -> str:
    """The route of texts with one of these tasks: as sentence-transformers chooses it, by `route_mappings`, by its name
    or by default."""
    mappings = read_object(file, settings, "route_mappings")
    keys = [*((task, kind) for task in tasks for kind in ("text", None)), (None, "text"), (None, None)]
    default = settings.get("default_route") or next(iter(structure))
    found = [mappings[str(key)] for key in keys if str(key) in mappings]
    found += [name for name in (*tasks, "text") if name in structure]
    route = next(iter(found), default)
    if not isinstance(route, str) or route not in structure:
        raise CheckpointError(f"route {show_value(route)} is not in structure", file=str(file))
    return route


def list_modules(root: Path) -> tuple[SentenceModule, ...]:
    """The entries of modules.json."""
    file = root / MODULES
    listed: Any = read_json(file, kind=list)
    if not all(isinstance(module, dict) for module in listed):
        raise CheckpointError("should hold a list of objects, one a module", file=str(file))
    if len(listed) > MAX_MODULES:
        raise CheckpointError(f"has {len(listed)} modules; {MAX_MODULES} are the most", file=str(file))
    return tuple(read_module(root, module, file) for module in listed)


def read_module(root: Path, module: JsonObject, file: Path) -> SentenceModule:
    """One module in a folder below `root`, as `file` lists it."""
    type_name, path = module.get("type"), module.get("path", "")
    kind = type_name.rpartition(".")[2] if isinstance(type_name, str) else ""
    if kind in OTHER_NETWORKS:
        message = f"module {show_value(type_name)} {OTHER_NETWORKS[kind]}, which is not computed here"
        raise UnsupportedError(f"{message}; known are {', '.join(KNOWN)}", file=str(file))
    if kind not in KNOWN:
        message = f"module {show_value(type_name)} is not known; known are {', '.join(KNOWN)}"
        raise UnsupportedError(message, file=str(file))
    if not isinstance(path, str):
        raise CheckpointError(f"path {show_value(path)} of {kind} is no string", file=str(file))
    return SentenceModule(kind, type_name, subfolder(root, "" if path == "." else path))


def network_folder(root: Path, role: Role = "documents") -> Path:
    """The folder of the network: that of the Transformer among the modules, or the folder itself."""
    if not has_modules(root):
        return root
    return next((module.folder for module in read_modules(root, role) if module.kind in NETWORKS), root)


def find_module_task(root: Path) -> Literal["", "embed", "score", "token_vectors"]:
    """What the modules make of states: vectors of texts or of tokens, or a score of logits. Empty: what the network's
    own head makes.

    UnsupportedError for a cross-encoder with modules that are not known.
    """
    if not has_modules(root):
        return ""
    kinds = [module.kind for module in read_modules(root)]
    if LOGIT_SCORE in kinds:
        return "score"
    if SPARSE in kinds:
        return ""
    model_type = read_json(root / PROMPTS, {}).get("model_type")
    if model_type in LATE_INTERACTION:
        return "token_vectors"
    if model_type != "CrossEncoder":
        return "embed"
    if kinds != ["Transformer"]:
        message = f"modules {', '.join(kinds)} of a cross-encoder are not known; known are a Transformer and LogitScore"
        raise UnsupportedError(message, file=str(root / MODULES))
    return ""


def read_sentence_config(folder: Path) -> JsonObject:
    """The settings of a Transformer module; older folders name the file by the kind of network."""
    names = (SENTENCE_CONFIG, *(f"sentence_{kind}_config.json" for kind in OLDER_NETWORKS))
    found = (config for name in names if (config := read_json(folder / name, {})))
    return next(found, {})


def check_network_arguments(folder: Path) -> None:
    """UnsupportedError for arguments that sentence-transformers gives to the network, its configuration or its
    tokenizer, and that change what they compute. They are not merged into the files here."""
    file, config = folder / SENTENCE_CONFIG, read_sentence_config(folder)
    for field, place in ARGUMENTS.items():
        for name, value in read_object(file, config, field).items():
            if name not in HARMLESS_ARGUMENTS:
                message = f"{field}.{name} is {show_value(value)}, which is not applied here; write it into {place}"
                raise UnsupportedError(f"{message} and remove it from {SENTENCE_CONFIG}", file=str(file))


def check_network_settings(folder: Path) -> None:
    """UnsupportedError for settings of a Transformer module that change what its states are."""
    file, config = folder / SENTENCE_CONFIG, read_sentence_config(folder)
    task = config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        message = f"transformer_task {show_value(task)} is not known for vectors; known is feature-extraction"
        raise UnsupportedError(message, file=str(file))
    modes = read_object(file, config, "modality_config")
    plain = {"method": "forward", "method_output_name": "last_hidden_state"}
    if "message" in modes or modes.get("text", plain) != plain:
        message = "modality_config: only texts that are read without a chat template are known, and their last states"
        raise UnsupportedError(message, file=str(file))


def read_object(file: Path, config: JsonObject, field: str) -> JsonObject:
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{field} is {show_value(value)}, which should be an object", file=str(file))
    return value


def read_vector_modules(root: Path, width: int, role: Role = "documents") -> VectorModules:
    """The modules after the network, whose states are `width` wide, for texts of this role."""
    return build_vector_modules(root / MODULES, read_modules(root, role), width)


def build_vector_modules(file: Path, modules: Sequence[SentenceModule], width: int) -> VectorModules:
    """The modules after the network, which is the first of them.

    CheckpointError if a module's input is not as wide as the output before it, UnsupportedError for an order of modules
    or a setting that is not known.
    """
    if not modules or modules[0].kind not in ("Transformer", STATIC):
        found = show_value(modules[0].type) if modules else "none"
        raise UnsupportedError(f"its first module is {found}; known is a Transformer", file=str(file))
    before, after = list[SentenceModule](), list[SentenceModule]()
    pooling: SentenceModule | None = None
    for module in modules[1:]:
        if module.kind == "Pooling" and pooling is None:
            pooling = module
        elif module.kind in LAYER_KINDS:
            (before if pooling is None else after).append(module)
        elif module.kind != "Dropout":  # which does nothing outside of training
            raise UnsupportedError(f"module {show_value(module.type)} is not known in this place", file=str(file))
    poolings: tuple[Pooling, ...] = ("mean",)
    include_prompt = True
    if pooling is not None:
        poolings, include_prompt = read_pooling(pooling.folder / "config.json")
    elif all(read_input_name(module) == TEXT_VECTOR for module in before):
        before, after = [], before
    token_layers, token_entries = read_layers(before, TOKEN_VECTORS)
    layers, entries = read_layers(after, TEXT_VECTOR)
    try:
        width = output_width(token_layers, width)
        output_width(layers, len(poolings) * width)
    except ValueError as error:
        raise CheckpointError(f"its modules do not fit together: {error}", file=str(file)) from None
    return VectorModules(token_layers, poolings, layers, include_prompt, token_entries, entries)


def read_layers(
    modules: Sequence[SentenceModule], vectors: str, default: str = TEXT_VECTOR
) -> tuple[tuple[LayerSpec, ...], dict[str, tuple[str, TensorEntry]]]:
    """The layers of modules on `vectors`, and their tensors. `default`: what a module without this setting reads."""
    specs, entries = list[LayerSpec](), dict[str, tuple[str, TensorEntry]]()
    for number, module in enumerate(modules):
        if (name := read_input_name(module, default)) != vectors:
            message = f"module_input_name {show_value(name)} of {module.kind} is not known here; known is {vectors}"
            raise UnsupportedError(message, file=str(module.folder / "config.json"))
        specs.append(read_layer(module))
        if module.kind == "Normalize":
            continue
        for tensor, entry in read_module_tensors(module.folder).items():
            ours = tensor if module.kind == "Dense" else tensor.removeprefix("norm.")
            entries[f"{module.folder.name}/{tensor}"] = f"{number}.{ours}", entry
    return tuple(specs), entries


def read_input_name(module: SentenceModule, default: str = TEXT_VECTOR) -> Any:
    """Which vectors a module reads, and writes."""
    config = read_json(module.folder / "config.json", {}) if module.kind != "Pooling" else {}
    name = config.get("module_input_name") or default
    if (output := config.get("module_output_name") or name) != name:
        message = f"module_output_name is {show_value(output)}, and its input is {show_value(name)}; known is the same"
        raise UnsupportedError(message, file=str(module.folder / "config.json"))
    return name


def read_layer(module: SentenceModule) -> LayerSpec:
    """The layer of a Dense, LayerNorm or Normalize module."""
    if module.kind == "Normalize":
        return UnitSpec()
    file = module.folder / "config.json"
    config = read_json(file)
    if module.kind == "LayerNorm":
        return NormSpec(read_width(file, config, "dimension"))
    return DenseSpec(
        inputs=read_width(file, config, "in_features"),
        outputs=read_width(file, config, "out_features"),
        bias=read_flag(file, config, "bias", default=True),
        activation=read_activation(file, config),
        residual=read_flag(file, config, "use_residual", default=False),
    )


def read_width(file: Path, config: JsonObject, field: str) -> int:
    value = config.get(field)
    if type(value) is not int or not 0 < value <= MAX_WIDTH:
        message = f"{field} is {show_value(value)}, which should be a whole number from 1 to {MAX_WIDTH}"
        raise CheckpointError(message, file=str(file))
    return value


def read_flag(file: Path, config: JsonObject, field: str, *, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{field} is {show_value(value)}, which should be true or false", file=str(file))
    return value


def read_activation(file: Path, config: JsonObject) -> str:
    """The activation of a Dense module; sentence-transformers' default is tanh."""
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.") else ""
    if kind not in ACTIVATIONS:
        message = f"activation_function {show_value(name)} is not known; known are torch's {', '.join(ACTIVATIONS)}"
        raise UnsupportedError(message, file=str(file))
    return ACTIVATIONS[kind]


def read_module_tensors(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of a module's folder. UnsupportedError if they are pickled."""
    if (folder / SINGLE).is_file():
        return read_safetensors(folder / SINGLE)
    if found := list_files(folder, {".bin", ".pt", ".pth"}):
        message = (
            f"only pickled weights ({', '.join(found)}), which can run code when opened and are never opened here; "
            "convert them where you trust them: "
            "sentence_transformers.SentenceTransformer(folder).save_pretrained(other) writes safetensors"
        )
        raise UnsupportedError(message, file=str(folder))
    raise CheckpointError(f"no weights: {SINGLE} is not there", file=str(folder))


def read_pooling(file: Path) -> tuple[tuple[Pooling, ...], bool]:
    """The poolings whose vectors are joined, and whether the tokens of a prompt are pooled: from the newer
    `pooling_mode` or from the older form with one boolean a mode."""
    config = read_json(file)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else [] if mode is None else mode
    if not isinstance(modes, list) or not all(isinstance(each, str) for each in modes):
        message = f"pooling_mode is {show_value(mode)}, which should be a string or a list of strings"
        raise UnsupportedError(message, file=str(file))
    flags = {key: read_flag(file, config, key, default=False) for key in config if key.startswith("pooling_mode_")}
    modes = modes or [LEGACY_POOLINGS.get(key, key) for key in (*LEGACY_POOLINGS, *flags) if flags.pop(key, False)]
    unknown = [each for each in modes if each not in POOLINGS]
    if unknown or not 0 < len(modes) <= MAX_POOLINGS:
        shown = show_value(unknown[0]) if unknown else f"of {len(modes)} kinds" if modes else "none"
        message = f"pooling {shown} is not known; known are {', '.join(POOLINGS)}, {MAX_POOLINGS} at most"
        raise UnsupportedError(message, file=str(file))
    include_prompt = read_flag(file, config, "include_prompt", default=True)
    if not include_prompt and "weightedmean" in modes:
        message = "include_prompt: false with weightedmean is not known: the weights would count the prompt's tokens"
        raise UnsupportedError(message, file=str(file))
    return tuple(POOLINGS[each] for each in modes), include_prompt
