"""Weight formats that are not supported: the reason, and what to do instead. A format is recognised by the suffix of a
file's name; no file is opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CheckpointError, UnsupportedError
from ..core.files import list_files

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAFE, GGUF = ".safetensors", ".gguf"
ONNX_FILES = ("model.onnx", "onnx/model.onnx")


@dataclass(frozen=True)
class UnreadFormat:
    """`name` is what its files hold, `reason` why they are not read, `remedy` what to do instead."""

    name: str
    reason: str
    remedy: str


PICKLE = UnreadFormat(
    "pickled weights",
    "which can run code when opened and are never opened here",
    "convert them where you trust them: transformers' AutoModel.from_pretrained(folder).save_pretrained(folder) "
    "writes safetensors (use the Auto class of the head)",
)
ONNX = UnreadFormat(
    "an ONNX graph",
    "which is read only as model.onnx or onnx/model.onnx beside the config.json of its network",
    "put that file there, or name the safetensors folder or the GGUF file of the model that it was exported from",
)
KERAS = UnreadFormat(
    "weights of TensorFlow",
    "which can hold code and are not read",
    "convert them to safetensors: transformers 4 does with AutoModel.from_pretrained(folder, from_tf=True)"
    ".save_pretrained(folder) (use the Auto class of the head)",
)
FLAX = UnreadFormat(
    "weights of Flax",
    "which are not read",
    "convert them to safetensors: transformers 4 does with AutoModel.from_pretrained(folder, from_flax=True)"
    ".save_pretrained(folder) (use the Auto class of the head)",
)
FORMATS: Mapping[str, UnreadFormat] = {
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pickle", ".pkl"), PICKLE),
    ".onnx": ONNX,
    ".h5": KERAS,
    ".msgpack": FLAX,
}


def check_file(path: Path) -> None:
    """UnsupportedError for a source that is a file, unless it is a GGUF file."""
    if path.suffix == GGUF:
        return
    if path.suffix == SAFE:
        message = "a safetensors file alone does not describe a model; name the folder that has its config.json, too"
        raise UnsupportedError(message, file=str(path))
    if found := FORMATS.get(path.suffix):
        message = f"{explain_format(found, ())}. If it is a GGUF file, its name has to end in {GGUF}"
        raise UnsupportedError(message, file=str(path))
    raise UnsupportedError("a file is loaded only if it is a .gguf; otherwise name the folder", file=str(path))


def check_folder(path: Path) -> None:
    """UnsupportedError for a folder that has weights in unsupported formats only."""
    if (path / INDEX).is_file() or (path / SINGLE).is_file() or list_files(path, {SAFE, GGUF}):
        return
    if find_onnx(path) is not None:
        return
    for found in (PICKLE, ONNX, KERAS, FLAX):
        if names := list_files(path, {suffix for suffix, each in FORMATS.items() if each is found}):
            raise UnsupportedError(explain_format(found, names), file=str(path))


def find_onnx(path: Path) -> Path | None:
    """The ONNX graph of a folder whose weights are read: one beside a config.json, under the name that exporters give
    it."""
    if not (path / "config.json").is_file():
        return None
    found = (file for file in ONNX_FILES if (path / file).is_file() and not (path / file).parent.is_symlink())
    return next((path / file for file in found), None)


def missing_weights_error(path: Path) -> CheckpointError:
    """The error for a folder without readable weights."""
    others = list_files(path, {SAFE, GGUF})
    hint = f"; there is only {', '.join(others)}" if others else ""
    return CheckpointError(f"no weights: neither {SINGLE} nor {INDEX} is there{hint}", file=str(path))


def explain_format(found: UnreadFormat, names: Sequence[str]) -> str:
    """A clause about a format. `names` are files of that format in a folder; empty: the source itself is such a
    file."""
    what = f"only {found.name} ({', '.join(names)})" if names else found.name
    return f"{what}, {found.reason}; {found.remedy}"
