"""Which files of a repository on the hub are downloaded: those that are read; no pickles, no code, no second copies.

A repository with safetensors is a folder: its small files and the weights that its index names. A repository with GGUF
files holds one model in several quantisations, of which one is taken; its files may lie in subfolders, and a large one
is a split set of several files.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import MAX_VOCABULARY_BYTES, is_plain_name
from .unread_formats import FORMATS, GGUF, INDEX, ONNX_FILES, SAFE, SINGLE, explain_format

ADAPTER = "adapter_model.safetensors"
MODULES = "modules.json"  # of sentence-transformers, whose modules lie in subfolders
TEMPLATES = "additional_chat_templates"
SMALL_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".spm", ".tokenizer")
OTHER_FOLDERS = ("onnx", "openvino", "original", "coreml", "runs", "flax", "tf")  # the same model in other formats
DEFAULT_QUANTISATION = "Q4_K_M"
MAX_FILES = 4096  # files of one checkpoint
MAX_PATH_LENGTH = 1024  # characters of a file's name with its folders; longer ones are left out
MAX_FOLDERS = 16  # of a file inside each other
MAX_LABEL_LENGTH = 64  # characters at the end of a name in which a quantisation is looked for
MAX_NAMED = 30  # quantisations or files that a message names
SPLIT = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})$")
QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))$", re.IGNORECASE
)
NOT_A_MODEL = re.compile(
    r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE
)  # parts of a model, and statistics of one


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `digest` is its content's, in hexadecimal digits: SHA-256 of a large file, git's SHA-1
    of a small one; empty: the hub does not say.
    """

    name: str
    size: int = 0
    digest: str = ""

    @property
    def path(self) -> PurePosixPath:
        return PurePosixPath(self.name)


@dataclass(frozen=True)
class GgufSet:
    """One model in GGUF: one file, or the parts of a split set in their order."""

    quantisation: str  # in capitals; empty: its name has none
    parts: tuple[HubFile, ...]

    @property
    def label(self) -> str:
        return self.quantisation or self.parts[0].name


def is_usable_name(name: str) -> bool:
    """Whether a file stays inside of its folder, in few folders. The hub's answer is not trusted."""
    if not 0 < len(name) <= MAX_PATH_LENGTH or name.count("/") > MAX_FOLDERS:
        return False
    return all(is_plain_name(part) for part in name.split("/"))


def choose_small_files(files: Collection[HubFile]) -> list[HubFile]:
    """The descriptions, vocabularies and templates of a folder with safetensors."""
    names = {file.name for file in files}
    found = [
        file
        for file in files
        if file.path.suffix in SMALL_SUFFIXES
        and file.size <= MAX_VOCABULARY_BYTES
        and is_read_folder(file.path.parts[:-1], MODULES in names)
    ]
    return check_count(found)


def is_read_folder(folders: tuple[str, ...], has_modules: bool) -> bool:
    """Whether files in a subfolder are read: those of modules, and of further chat templates."""
    if len(folders) != 1:
        return not folders
    return folders[0] == TEMPLATES or (has_modules and folders[0] not in OTHER_FOLDERS)


def has_safetensors(files: Collection[HubFile]) -> bool:
    """Whether a repository is loaded as a folder with safetensors."""
    return any(file.path.suffix == SAFE and is_read_folder(file.path.parts[:-1], has_modules=True) for file in files)


def choose_weights(files: Collection[HubFile], shards: Collection[str]) -> list[HubFile]:
    """The safetensors of a folder. `shards` are the files that its index names; empty: it has no index.

    Further large files at the top are the same weights again (`consolidated.safetensors`); small ones may be heads.
    """
    names = {file.name for file in files}
    main = ({SINGLE} & names) or set(shards)  # as the folder's reader chooses
    chosen = []
    for file in files:
        if file.path.suffix != SAFE or not is_read_folder(file.path.parts[:-1], MODULES in names):
            continue
        if (
            file.name in main
            or file.name == ADAPTER
            or len(file.path.parts) > 1
            or (
                file.size <= MAX_VOCABULARY_BYTES
                and not SPLIT.match(file.path.stem)
                and not file.name.startswith("model.")
            )
        ):
            chosen.append(file)
    return check_count(chosen)


def choose_onnx(files: Collection[HubFile]) -> list[HubFile]:
    """The ONNX graph whose weights are read, with the files that hold its larger tensors; empty if there is none beside
    a config.json."""
    known = {file.name: file for file in files}
    graph = next((name for name in ONNX_FILES if name in known), "")
    if not graph or "config.json" not in known:
        return []
    return check_count([file for file in files if file.name in (graph, f"{graph}_data", f"{graph}.data")])


def check_count(files: list[HubFile]) -> list[HubFile]:
    if len(files) > MAX_FILES:
        raise CheckpointError(f"the repository has {len(files)} files to download; {MAX_FILES} are the most")
    return files


def choose_gguf(files: Collection[HubFile], quantisation: str, file: str) -> GgufSet:
    """The GGUF model of a repository with this quantisation, or in this file; if both are empty, the only one or
    DEFAULT_QUANTISATION.

    CheckpointError says what there is.
    """
    sets = list_gguf_sets(files)
    if file:
        found = [each for each in sets if file in {part.name for part in each.parts}]
        return only_set(found, sets, f"it has no file {show_value(file)}")
    models = [each for each in sets if not NOT_A_MODEL.search(each.parts[0].path.stem)]
    if not quantisation and len(models) == 1:
        return models[0]
    wanted = (quantisation or DEFAULT_QUANTISATION).upper()
    for ending in (wanted, f"UD-{wanted}"):  # some makers write UD- before their own mixtures
        if found := [each for each in models if each.quantisation == ending]:
            return only_set(found, models, "")
    problem = f"it has no GGUF file of the quantisation {wanted}"
    return only_set([], models, problem if quantisation else f"{problem}, which is taken if none is named")


def only_set(found: list[GgufSet], known: list[GgufSet], problem: str) -> GgufSet:
    """The one set among `found`. CheckpointError if there is none, or more than one."""
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(each.parts[0].name for each in found[:MAX_NAMED])
        raise CheckpointError(f"several files are of that quantisation; name one, ORGANIZATION/NAME/FILE: {names}")
    if not known:
        raise CheckpointError(f"{problem}; it has no GGUF files of models at all")
    labels = ", ".join(dict.fromkeys(each.label for each in known[:MAX_NAMED]))
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    raise CheckpointError(f"{problem}; there are {labels}{more} (named as ORGANIZATION/NAME:QUANTISATION)")


def list_gguf_sets(files: Collection[HubFile]) -> list[GgufSet]:
    """The GGUF models of a repository by name. CheckpointError for a split set that lacks parts."""
    whole: list[GgufSet] = []
    split: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if file.path.suffix != GGUF:
            continue
        if parts := SPLIT.match(file.path.stem):
            stem = str(file.path.parent / parts["stem"])
            split.setdefault((stem, int(parts["count"])), {})[int(parts["part"])] = file
        else:
            whole.append(GgufSet(find_quantisation(file.path), (file,)))
    for (stem, count), found in split.items():
        if len(found) == count and all(part in found for part in range(1, count + 1)):
            path = PurePosixPath(f"{stem}{GGUF}")
            whole.append(GgufSet(find_quantisation(path), tuple(found[part] for part in sorted(found))))
    return sorted(whole, key=lambda each: each.parts[0].name)


def find_quantisation(path: PurePosixPath) -> str:
    """The quantisation that a file's name ends in, or else its folder's name; in capitals, empty if there is none."""
    for name in (path.stem, path.parent.name):
        if found := QUANTISATION.search(name, max(len(name) - MAX_LABEL_LENGTH, 0)):
            return found[1].upper().replace("FP16", "F16").replace("FP32", "F32")
    return ""


def unread_weights_error(names: Collection[str]) -> CheckpointError:
    """The error for a repository without weights that are read here."""
    for found in dict.fromkeys(FORMATS.values()):
        of_format = sorted(name for name in names if FORMATS.get(PurePosixPath(name).suffix) is found)[:3]
        if of_format:
            return UnsupportedError(f"it has {explain_format(found, of_format)}")
    return CheckpointError(f"it has no weights: neither {SINGLE}, nor {INDEX}, nor a {GGUF} file")


def index_shards(index: Mapping[str, object]) -> set[str]:
    """The files that an index of safetensors names; the folder's reader checks the rest of it."""
    places = index.get("weight_map")
    return {name for name in places.values() if isinstance(name, str)} if isinstance(places, dict) else set()
