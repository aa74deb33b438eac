"""A checkpoint folder in the layout of Hugging Face: config.json, safetensors in one or several files, tokenizer files.
Everything unsupported is refused from the small files and headers, before a tensor is read."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from torch import Tensor

from ..architectures import FAMILIES, Family, HeadSpec, rename_weight
from ..architectures.family import NamedTensors, no_decoder
from ..architectures.field_names import STACKS, unify_names
from ..architectures.published_architectures import explain_model_type
from ..chat import ChatTemplate
from ..chat.pair_prompt import PairPrompt
from ..core.errors import CheckpointError, ModelError, UnsupportedError, show_value
from ..core.files import MAX_TEMPLATE_BYTES, is_plain_name, read_text, subfolder
from ..core.json_files import INDEX_JSON, LARGE_JSON
from ..network.encoder_decoder import SharedTextTransformer
from ..network.model_config import ModelConfig
from ..tokenizer import Tokenizer
from .description import Description, HeadDescription, NamedPieces, check_config_fields, most_tensors
from .folder_files import (
    MAX_STOP_TOKENS,
    FolderCheck,
    FolderParts,
    JsonObject,
    Role,
    accept_folder,
    build_chat_template,
    parse_config,
    read_json,
    valid_tokens,
)
from .head_config import EMBEDDING_COPIES, HEADS, answer_head, read_both_sides
from .late_interaction import FIRST_ARCHITECTURE, read_late_interaction
from .more_outputs import add_outputs
from .onnx_weights import read_onnx
from .published_rerankers import (
    FOLDER_TASK,
    TASK_MARK,
    WantedTask,
    describe_choices,
    find_prompt,
    is_ranking_card,
)
from .quantized.config_fields import CONFIG
from .quantized.formats import read_quantization
from .query_route import add_query_route, check_query_network, has_query_network
from .rotation_fields import check_rotation_fields
from .sampling_defaults import read_folder_sampling
from .sentence_modules import (
    MODULES,
    check_network_arguments,
    find_module_task,
    has_modules,
    network_folder,
    read_sentence_config,
)
from .tensor_files import TensorEntry, check_tensor_count, read_safetensors
from .unread_formats import INDEX, SINGLE, check_folder, find_onnx, missing_weights_error

BuildNetwork = Callable[[], Any]

log = getLogger(__name__)
DECODER_FIELD = "decoder.is_causal"
LIST_HINT = "polyhead families lists what is loaded"


def open_folder(root: Path, wanted: WantedTask = FOLDER_TASK, role: Role = "documents") -> FolderParts:
    """Read the small files and the tensor headers of the network for texts of this role. CheckpointError or
    UnsupportedError names the problem."""
    path = network_folder(root, role)
    check_folder(path)
    config = parse_config(str(path / "config.json"), partial(unify_names, read_json(path / "config.json")))
    check_config(path / "config.json", config)
    check_named_weights(path, config)
    family = find_family(path / "config.json", config)
    spec = choose_head_spec(root, path / "config.json", config, family, wanted)
    prompt = choose_prompt(root, config, spec, wanted)
    entries = list_tensors(path, count_most_tensors(family, config))
    if quantised := config.get(CONFIG):
        entries = read_quantization(path / "config.json", quantised)(entries)
    return FolderParts(root, path, config, family, spec, entries, prompt, role)


def count_most_tensors(family: Family, config: JsonObject) -> float:
    """The most tensors that the files of a network have; infinity for a configuration that cannot be read, which is
    refused before a tensor is looked at."""
    try:
        shape = parse_config("config.json", partial(family.config, config))
    except ModelError:
        return math.inf
    return most_tensors((shape, shape))  # the second may be a decoder


def describe_folder(parts: FolderParts, folder_check: FolderCheck = accept_folder) -> Description:
    """The description of a checkpoint folder. `folder_check` is called before the tokenizer is read."""
    file = str(parts.path / "config.json")
    config = apply_causality(parts, parse_config(file, partial(parts.family.config, parts.config)))
    config = replace(config, global_tokens=parts.spec.global_tokens)
    check_config_fields(file, config)
    if config.position == "rotary":
        check_rotation_fields(file, parts.family, parts.config, config)
    if has_modules(parts.root):
        check_network_arguments(parts.path)
    tokenizer = load_tokenizer(parts.path, folder_check)
    if read_sentence_config(parts.path).get("do_lower_case"):
        tokenizer = tokenizer.lower_case()
    head, limit = choose_head(parts, config, tokenizer)
    head = add_query_route(parts, config, head, tokenizer, partial(load_tokenizer, folder_check=folder_check))
    queries = describe_queries(parts, head, folder_check)
    late = read_late_interaction(parts, config, tokenizer) if parts.spec.task == "token_vectors" else None
    if late is not None:
        config = replace(config, hides_rows=late.hides_expansion)
    generates, in_chat = head.task == "generate", isinstance(head.pair_prompt, PairPrompt)
    build: BuildNetwork | None = None
    if parts.spec.reads_decoder:
        config = replace(config, has_cross_attention=True)
        both = read_both_sides(parts, config)
        head = replace(head, decoder_configs=(both.decoder,), ignored_names=(*head.ignored_names, *EMBEDDING_COPIES))
        build = partial(SharedTextTransformer, both)
    chat = load_chat_template(parts.path, tokenizer) if generates or in_chat else None
    if in_chat and chat is None:
        raise UnsupportedError("its pairs are read by a chat template, and there is none", file=str(parts.path))
    return Description(
        file=file,
        family=parts.family.name,
        config=config,
        head=head,
        entries=list_entries(parts, head),
        translate=weight_translation(parts, head),
        build_network=build,
        tokenizer=tokenizer,
        chat=chat,
        stop_tokens=read_stop_tokens(parts, tokenizer, config.vocab_size) if generates else frozenset(),
        max_tokens=limit,
        parts=parts,
        late=late,
        sampling=read_sampling(parts) if generates else {},
        queries=None
        if queries is None
        else check_query_network(parts.root / MODULES, queries, config, head, tokenizer),
    )


def describe_queries(parts: FolderParts, head: HeadDescription, folder_check: FolderCheck) -> Description | None:
    """The description of a network of its own for queries; None: there is none."""
    if parts.role == "queries" or head.task != "embed" or not has_query_network(parts.root):
        return None
    return describe_folder(open_folder(parts.root, role="queries"), folder_check)


def apply_causality(parts: FolderParts, config: ModelConfig) -> ModelConfig:
    """The configuration with what `is_causal` says: if it is false, tokens of a decoder see those after them, as in
    transformers. UnsupportedError where it says another thing than the network does, and where the network has a part
    for which that is not known."""
    file, stacks = str(parts.path / "config.json"), {name: parts.config.get(name) for name in STACKS}
    named = {f"{name}.is_causal": stack.get("is_causal") for name, stack in stacks.items() if isinstance(stack, dict)}
    named["is_causal"] = parts.config.get("is_causal")
    for name, is_causal in named.items():
        if not isinstance(is_causal, bool | None):
            raise CheckpointError(f"{name} is {show_value(is_causal)}, which should be true or false", file=file)
    top, has_decoder = named.pop("is_causal"), parts.spec.decoder is not no_decoder
    if has_decoder and top is not None:
        raise UnsupportedError(f"is_causal is {show_value(top)}, which is not known of encoder-decoders", file=file)
    wrong = {name: each for name, each in named.items() if each not in (None, config.causal or name == DECODER_FIELD)}
    if top and not config.causal:
        wrong["is_causal"] = top
    for name, is_causal in wrong.items():
        message = f"{name} is {show_value(is_causal)}, and in this network tokens "
        message += "see those before them only" if name == DECODER_FIELD or config.causal else "see those after them"
        raise UnsupportedError(message, file=file)
    if top is not False or not config.causal:
        return config
    if config.window or config.is_recurrent or config.has_distance_scores:
        message = "is_causal is false, which is known only of full attention without biases by distance"
        raise UnsupportedError(message, file=file)
    return replace(config, causal=False)


def translate_weight(family: Family, spec: HeadSpec, name: str, tensor: Tensor) -> NamedTensors:
    """As `rename_weight`. A decoder whose states a head reads belongs to the network."""
    pieces = rename_weight(family, spec.renames, name, tensor)
    if not spec.reads_decoder:
        return pieces
    return [(re.sub(r"^head\.(decoder\.)", r"\1", ours), piece) for ours, piece in pieces]


def describe_changed(parts: FolderParts, known: Description) -> Description:
    """The description of a folder that differs from a known one in tensors and head only; its other files are not read
    again."""
    head, limit = choose_head(parts, known.config, known.tokenizer)
    translate, entries = weight_translation(parts, head), list_entries(parts, head)
    return replace(known, head=head, entries=entries, translate=translate, max_tokens=limit, parts=parts)


def choose_head(parts: FolderParts, config: ModelConfig, tokenizer: Tokenizer) -> tuple[HeadDescription, int]:
    """The head of a folder, and the longest input in tokens."""
    if parts.prompt:
        return answer_head(parts, config, tokenizer)
    head, limit = HEADS[parts.spec.task](parts, config)
    if parts.spec.reads_decoder:  # it reads the same text
        limit = min(limit, read_both_sides(parts, config).decoder.max_positions)
    has_outputs = parts.spec.task == "embed" and parts.role == "documents"
    return add_outputs(parts, config, tokenizer, head) if has_outputs else head, limit


def list_entries(parts: FolderParts, head: HeadDescription) -> dict[str, TensorEntry]:
    """The tensors of the network's files and those of the head's own."""
    return {**parts.entries, **{name: entry for name, (_, entry) in head.own_entries.items()}}


def weight_translation(parts: FolderParts, head: HeadDescription) -> Callable[[str, Tensor], NamedPieces]:
    """The function from a tensor of the files to tensors under our names."""
    own = {name: ours for name, (ours, _) in head.own_entries.items()}

    def translate(name: str, tensor: Tensor) -> NamedPieces:
        if name in own:
            return [(own[name], tensor)]
        return translate_weight(parts.family, parts.spec, name, tensor)

    return translate


def check_config(file: Path, config: JsonObject) -> None:
    """UnsupportedError for a quantisation that is not supported."""
    if quantised := config.get(CONFIG):
        read_quantization(file, quantised)


def check_named_weights(path: Path, config: JsonObject) -> None:
    """UnsupportedError for a configuration that names another file of weights than the one that is read."""
    named, read = config.get("transformers_weights"), SINGLE if (path / SINGLE).is_file() else INDEX
    if named not in (None, read):
        message = f"transformers_weights is {show_value(named)}, and the weights are read from {read}; "
        raise UnsupportedError(f"{message}give the file of weights this name", file=str(path / "config.json"))


def find_family(file: Path, config: JsonObject) -> Family:
    """The family of a configuration. Code that comes with a checkpoint is never run: the classes that `auto_map` names
    must be ones that the family computes."""
    name = config.get("model_type")
    known = FAMILIES.get(name) if isinstance(name, str) else None
    family = parse_config(str(file), partial(known.variant, known, config)) if known else None
    if "auto_map" in config:
        check_auto_map(file, config, family)
    if family is None:
        message = f"model_type {show_value(name)} is not known here: {explain_model_type(name, FAMILIES)}. {LIST_HINT}"
        raise UnsupportedError(message, file=str(file))
    return family


def check_auto_map(file: Path, config: JsonObject, family: Family | None) -> None:
    """UnsupportedError unless all classes of networks in `auto_map` are known."""
    auto_map, model_type = config["auto_map"], config.get("model_type")
    classes = auto_map.items() if isinstance(auto_map, dict) else ()
    named = [value if isinstance(value, str) else "" for key, value in classes if str(key).startswith("AutoModel")]
    names = [value.rpartition(".")[2] for value in named]
    known = family.heads.keys() | family.published_classes if family else frozenset[str]()
    if family is None or not names or not all(name in known or name.endswith("PreTrainedModel") for name in names):
        reason = (
            f"classes of {family.name} that are read without it: {', '.join(sorted(known))}"
            if family
            else f"model_type {show_value(model_type)} is not known here: {explain_model_type(model_type, FAMILIES)}"
        )
        message = (
            f"auto_map asks to run code that comes with the checkpoint, which is never done; {reason}. {LIST_HINT}"
        )
        raise UnsupportedError(message, file=str(file))


def choose_head_spec(root: Path, file: Path, config: JsonObject, family: Family, wanted: WantedTask) -> HeadSpec:
    """The head that modules.json asks for, or else that of the network's class; this one where it is to generate."""
    task = find_module_task(root) if wanted.task != "generate" else ""
    if task in ("embed", "token_vectors"):
        return HeadSpec(task)
    if config.get("architectures") == [FIRST_ARCHITECTURE]:
        return HeadSpec("token_vectors")
    spec = find_head_spec(file, config, family)
    if task == "score" and spec.task != "generate":
        raise UnsupportedError("LogitScore needs the logits of a causal language model", file=str(file))
    return replace(spec, task=task) if task == "score" else spec


def choose_prompt(root: Path, config: JsonObject, spec: HeadSpec, wanted: WantedTask) -> str:
    """The prompt of a generator that ranks, a key of published_rerankers.RERANKERS; empty: it is none. UnsupportedError
    if the source says a task and this is no generator."""
    if wanted.task and spec.task not in ("generate", "score"):
        message = f"{TASK_MARK}{wanted.task} after a source is for generators, and this is none"
        raise UnsupportedError(message, file=str(root))
    if spec.task != "generate":
        return ""
    prompt = find_prompt(root, config, wanted)
    if prompt:
        log.info("%s: ranks in the prompt %s; #generate after the source serves it as a generator", root, prompt)
    elif not wanted.task and is_ranking_card(root):
        log.warning(
            "%s: its card says that it ranks texts, and its name is that of no known reranker; it is served as a "
            "generator. After the source its prompt may be named: %s",
            root,
            describe_choices(),
        )
    return prompt


def find_head_spec(file: Path, config: JsonObject, family: Family) -> HeadSpec:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else "(none)"
    spec = family.heads.get(name) if isinstance(name, str) else None
    if spec is None:
        heads = ", ".join(family.heads)
        shown = name if isinstance(name, str) else show_value(name)
        message = f"architecture {shown} is not known; {family.name} checkpoints are loaded as {heads}"
        raise UnsupportedError(message, file=str(file))
    return spec


def list_tensors(path: Path, most: float = math.inf) -> dict[str, TensorEntry]:
    """Every tensor of the folder by name, from its one safetensors file or else from its index: the order of
    transformers, in a folder that has both. CheckpointError for more tensors than `most`."""
    if (path / SINGLE).is_file():
        return read_safetensors(path / SINGLE, most)
    if (path / INDEX).is_file():
        return list_sharded_tensors(path, most)
    check_folder(path)
    if (graph := find_onnx(path)) is not None:
        return read_onnx(graph)
    raise missing_weights_error(path)


def list_sharded_tensors(path: Path, most: float = math.inf) -> dict[str, TensorEntry]:
    places = read_json(path / INDEX, limit=INDEX_JSON).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError("it has no weight_map", file=str(path / INDEX))
    shards: dict[str, list[str]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(
                f"shard {show_value(shard)} is not a file of this folder", file=str(path / INDEX), tensor=name
            )
        if shard not in shards and not (path / shard).is_file():
            raise CheckpointError(f"shard {shard} is missing", file=str(path / INDEX), tensor=name)
        shards.setdefault(shard, []).append(name)
    found, count = dict[str, TensorEntry](), 0
    for shard, names in shards.items():
        tensors = read_safetensors(path / shard, most)
        count += len(tensors)
        check_tensor_count(path / INDEX, count, most)
        for name in names:
            if name not in tensors:
                raise CheckpointError(f"{INDEX} places it here, but it is not", file=str(path / shard), tensor=name)
            found[name] = tensors[name]
    return {name: found[name] for name in places}


def load_tokenizer(path: Path, folder_check: FolderCheck = accept_folder) -> Tokenizer:
    try:
        return Tokenizer.from_folder(path, folder_check(path, {}))
    except CheckpointError as error:
        raise error if error.file else type(error)(str(error), file=str(path)) from None


def load_chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template, chosen as transformers' tokenizers do: that of files of their own, which leave out what
    tokenizer_config.json has; then the latter's. That of processors, chat_template.json, is taken where neither is."""
    more = subfolder(path, "additional_chat_templates")
    files = {"default": path / "chat_template.jinja"}
    files |= {name: more / f"{name}.jinja" for name in ("default", "tool_use") if (more / f"{name}.jinja").is_file()}
    present = {name: file for name, file in files.items() if file.is_file()}
    if sources := {name: read_text(file, MAX_TEMPLATE_BYTES, errors="replace") for name, file in present.items()}:
        return build_chat_template(str(path), sources, tokenizer)
    source = read_json(path / "tokenizer_config.json", {}, limit=LARGE_JSON).get("chat_template")
    if not source:
        source = read_json(path / "chat_template.json", {}).get("chat_template")
    if isinstance(source, list):
        templates = (each for each in source if isinstance(each, dict) and isinstance(each.get("name"), str))
        source = {each["name"]: each.get("template") for each in templates}
    named = source if isinstance(source, dict) else {"default": source}
    return build_chat_template(str(path), named, tokenizer)


def read_sampling(parts: FolderParts) -> dict[str, float]:
    """The sampling options that the folder suggests."""
    file = parts.path / "generation_config.json"
    return read_folder_sampling(str(file), read_json(file, {}))


def read_stop_tokens(parts: FolderParts, tokenizer: Tokenizer, vocab_size: int) -> frozenset[int]:
    """Every end token that any of the files names; ids outside of the vocabulary are left out.

    CheckpointError if a file lists too many.
    """
    stops: list[Any] = [tokenizer.eos_id]
    for file, config in (
        (parts.path / "generation_config.json", read_json(parts.path / "generation_config.json", {})),
        (parts.path / "config.json", parts.config),
    ):
        ids = config.get("eos_token_id")
        listed = ids if isinstance(ids, list) else [ids]
        if len(listed) > MAX_STOP_TOKENS:
            message = f"eos_token_id has {len(listed)} tokens; {MAX_STOP_TOKENS} are the most"
            raise CheckpointError(message, file=str(file))
        stops += listed
    return valid_tokens(stops, vocab_size)
