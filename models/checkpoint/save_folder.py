"""Saves a checkpoint folder again with quantised matrices (saved_codes.py). The header is written
first, since shapes are known in advance; then one tensor after the other is written at its place, so only one matrix is
in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import orjson
import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError, UnsupportedError
from ..core.files import copy_file, read_copyable, subfolder
from ..native.packed_network import INT8_WIDE, rounded_format
from ..network.heads import LanguageHead
from ..quantization.quantize import INT4_GROUP, Int4Matrix
from . import folder
from . import saved_codes as codes
from . import unread_formats as formats
from .description import Description, build_on_meta, match_entries, translate_shape
from .folder_files import read_json
from .quantized.config_fields import CONFIG
from .quantized.quantized_entry import QuantizedEntry
from .saved_codes import SavedScheme
from .tensor_files import TensorEntry

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # widest first: tensors are stored in this order, so that each starts at a multiple of its item size
COPIED_PATTERNS = (
    *("*.json", "*.jinja", "*.txt", "*.model", "[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"),
    "*_linear.safetensors",  # of further outputs
    "additional_chat_templates/*.jinja",
)
MAX_COPIED_BYTES = 256 << 20  # bytes of all copied files; links may name one file many times
ROUNDED_ROWS = 1024  # rows of a matrix rounded at a time
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # by tensor: its kind and shape in the file


def ignore_saved(done: int, total: int) -> None:
    """The default progress callback: does nothing."""


def choose_scheme(description: Description, precision: str) -> SavedScheme:
    """The scheme in which `write_quantized` saves a folder: groups of int8 are those to which the network's weights are
    rounded in memory.
    """
    if precision == "int4":
        return SavedScheme(4, INT4_GROUP)
    return SavedScheme(8, codes.WIDE_GROUP if rounded_format(description.config) == INT8_WIDE else codes.INT8_GROUP)


def find_coded_matrices(description: Description, scheme: SavedScheme) -> dict[str, str]:
    """Our names of the matrices that are written as codes, by the file's names: those of the blocks, and an untied
    output matrix.

    UnsupportedError if they are quantised already, or if the file's layout cannot be stored in this format.
    """
    if description.parts is not None and description.parts.path != description.parts.root:
        message = f"its network lies in {description.parts.path.name}; only folders with it at the top are saved again"
        raise UnsupportedError(message, file=str(description.parts.root))
    network, head = build_on_meta(description)
    entries = match_entries(description, network, head)
    if graph := next((entry.file for entry in entries.values() if entry.file.suffix == ".onnx"), None):
        message = (
            "its weights are in an ONNX graph, and only safetensors are saved again; serve it with --precision int8"
        )
        raise UnsupportedError(message, file=str(graph))
    if done := next((name for name, entry in entries.items() if isinstance(entry, QuantizedEntry)), ""):
        message = "it is quantised already; name the folder it was made from"
        raise UnsupportedError(message, file=description.file, tensor=done)
    linears, found = linear_names(network, head), dict[str, str]()
    for name, entry in entries.items():
        match translate_shape(description, name, entry):
            case [(ours, piece)] if ours in linears and piece.is_contiguous():
                found[name] = ours
    if missing := linears - set(found.values()):
        message = f"{description.family} stores matrices transposed or fused, which this format cannot represent"
        raise UnsupportedError(message, file=description.file, tensor=min(missing))
    for name in found:
        if entries[name].shape[1] % scheme.group:
            message = (
                f"its {entries[name].shape[1]} inputs are no multiple of {scheme.group}, so many share a scale; "
                "serve the checkpoint as it is with --precision int8"
            )
            raise UnsupportedError(message, file=description.file, tensor=name)
    return found


def linear_names(network: nn.Module, head: nn.Module) -> set[str]:
    names = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    return names | ({"head.output.weight"} if untied_head(network, head) else set())


def untied_head(network: nn.Module, head: nn.Module) -> LanguageHead | None:
    """The head of a generator whose output matrix is not tied to the token embedding; else None."""
    tokens = {id(parameter) for parameter in network.parameters()}
    return head if isinstance(head, LanguageHead) and id(head.output.weight) not in tokens else None


def write_quantized(
    description: Description,
    out: Path,
    grids: Mapping[str, Int4Matrix] | None = None,
    progress: Callable[[int, int], None] = ignore_saved,
) -> None:
    """Save the folder that `description` describes into the folder `out`: as int8, or as the int4 matrices in `grids`,
    by our names.

    config.json is written last: without it a folder is no checkpoint.
    """
    scheme = choose_scheme(description, "int8" if grids is None else "int4")
    source, names = Path(description.file).parent, find_coded_matrices(description, scheme)
    entries = {name: entry for name, entry in folder.list_tensors(source).items() if entry.encoding is not None}
    config = read_json(source / "config.json")
    unchanged = list_copied_files(source)
    out.mkdir(parents=True, exist_ok=True)
    for path in unchanged:
        (out / path).parent.mkdir(exist_ok=True)
        copy_file(source / path, out / path)
    shapes: Shapes = {}
    for name, entry in entries.items():
        shapes |= coded_shapes(name, entry, scheme) if name in names else {name: (entry.kind, entry.shape)}
    write_tensors(
        out / formats.SINGLE, shapes, build_tensors(entries, names, scheme if grids is None else grids, progress)
    )
    config.pop("transformers_weights", None)  # the name of another file
    config[CONFIG] = codes.build_config(scheme, list_float_modules(description, entries, names))
    (out / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def list_copied_files(source: Path) -> list[Path]:
    """Paths, relative to the folder, of the files that are copied unchanged. CheckpointError if one of them could not
    be loaded: a link that leads out of the folder, a device, a file that is too long. Or if all have more than
    MAX_COPIED_BYTES."""
    found = sorted({path.relative_to(source) for pattern in COPIED_PATTERNS for path in source.glob(pattern)})
    found = [path for path in found if path.name != formats.INDEX and path != Path("config.json")]
    size = 0
    for path in found:
        subfolder(source, "" if path.parent == Path() else path.parent.name)
        size += len(read_copyable(source / path))
        if size > MAX_COPIED_BYTES:
            message = f"with it, the files to copy have more than {MAX_COPIED_BYTES >> 20} MiB"
            raise CheckpointError(
                f"{message}; leave out of the folder what a model does not need", file=str(source / path)
            )
    return found


def list_float_modules(
    description: Description, entries: Mapping[str, TensorEntry], names: Mapping[str, str]
) -> list[str]:
    """Modules whose matrices stay floats, a tied output layer included."""
    kept = [
        name.removesuffix(".weight") for name, each in entries.items() if len(each.shape) == 2 and name not in names
    ]
    tied = description.head.task == "generate" and not {"lm_head.weight", *kept} & {*names, "lm_head"}
    return [*kept, "lm_head"] if tied else kept


def coded_shapes(name: str, entry: TensorEntry, scheme: SavedScheme) -> Shapes:
    """The tensors in the file that a matrix becomes."""
    count, inputs = entry.shape
    groups = inputs // scheme.group
    if scheme.bits == 8:
        return {name: ("I8", entry.shape), f"{name}_scale": ("F32", (count, groups))}
    return {
        f"{name}_packed": ("I32", (count, inputs // 8)),
        f"{name}_scale": ("F16", (count, groups)),
        f"{name}_shape": ("I64", (2,)),
    }


def build_tensors(
    entries: Mapping[str, TensorEntry],
    names: Mapping[str, str],
    coded: SavedScheme | Mapping[str, Int4Matrix],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the file, one after the other. `coded`: how matrices are rounded to 8 bits, or those of 4 bits."""
    cpu = torch.device("cpu")
    for done, (name, entry) in enumerate(entries.items(), 1):
        if name not in names:
            yield name, entry.read(DTYPES[entry.kind], cpu)
        elif isinstance(coded, SavedScheme):
            rows = torch.split(entry.read(torch.float32, cpu), ROUNDED_ROWS)
            parts = [codes.quantize_int8(some, coded.group) for some in rows]
            yield name, torch.cat([part for part, _ in parts])
            yield f"{name}_scale", torch.cat([scales for _, scales in parts])
        else:
            grid = coded[names[name]]
            yield f"{name}_packed", codes.pack_int4(grid.codes)
            yield f"{name}_scale", grid.scales
            yield f"{name}_shape", torch.tensor(entry.shape)
        progress(done, len(entries))


def write_tensors(file: Path, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file of `tensors`, which may come in any order."""
    kinds, starts, end = list(DTYPES), dict[str, int](), 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (kind, shape) in sorted(shapes.items(), key=lambda item: (kinds.index(item[1][0]), item[0])):
        starts[name], end = end, end + prod(shape) * DTYPES[kind].itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [starts[name], end]}
    head = orjson.dumps(header)
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, tensor in tensors:
            out.seek(8 + len(head) + starts[name])
            out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
