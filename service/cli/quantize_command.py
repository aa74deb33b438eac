"""`polyhead quantize`: writes a checkpoint folder with quantised weights.

int8 needs the weights only. int4 also needs text, for calibration.
"""

from collections import Counter
from collections.abc import Callable, Collection
from math import prod
from pathlib import Path

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint import merged_adapter as adapter
from polyhead.models.checkpoint import save_folder as save
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANY_SOURCE
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.quantization.quantize import HESSIAN_BYTES, Int4Matrix, calibrate

from ..resources.capacity import available_memory
from .checkpoint_source import describe_checked

SEQUENCE_TOKENS, SEQUENCE_COUNT = 512, 50  # tokens of a calibration sequence, and their number
CHARACTERS_PER_TOKEN = 16  # characters of text read per token; most tokens have fewer
MAX_INPUTS = 16  # of a matrix for each of its outputs; published networks have 8 at most
MIB = 1 << 20
ProgressCallback = Callable[[str, int, int], None]


def quantize(source: str, out: Path, precision: str, text: Path | None, report_progress: ProgressCallback) -> str:
    """Write `out`, and return a sentence with the sizes.  Raises ModelError if it cannot be done."""
    if out.is_symlink() and not out.exists():
        raise ModelError(f"{out} is a link to a missing path; name a folder that is new or empty")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists already; name a folder that is new or empty")
    if (text is not None) != (precision == "int4"):
        raise ModelError("int4 needs --text, a file of text similar to the model's input; int8 takes none")
    description = describe_source(source)
    names = save.find_coded_matrices(description, save.choose_scheme(description, precision))
    if precision == "int4":
        check_hessians(description, names)
    save.list_copied_files(Path(description.file).parent)
    grids = None if text is None else calibrate_matrices(source, description, text, report_progress)
    try:
        save.write_quantized(
            description, out, grids, lambda done, total: report_progress("tensors written", done, total)
        )
    except OSError as error:
        raise ModelError(f"{out}: the folder cannot be written: {error.strerror or error}") from None
    before = sum(entry.size for entry in description.entries.values() if entry.encoding)
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return f"{out}: weights of {after / MIB:.1f} MiB, {before / MIB:.1f} MiB before"


def describe_source(source: str) -> Description:
    path = ANY_SOURCE.locate(source)
    if path.is_file() or adapter.is_adapter(path):
        message = (
            "only a safetensors folder can be quantised, no GGUF file or adapter; name the folder it was made from"
        )
        raise UnsupportedError(message, file=str(path))
    description = describe_checked(str(path))
    if description.head.task == "translate":
        raise UnsupportedError("translation models are not quantised", file=description.file)
    return description


def check_hessians(description: Description, names: Collection[str]) -> None:
    """Raise UnsupportedError for a matrix of more inputs than calibration can take; `names` are those of the matrices.

    Memory grows with the square of the inputs, time with the cube.  A small file must not ask for any amount: a
    Hessian is compared with the matrices that share it, of all layers, and with the memory of the machine.
    """
    entries = [description.entries[name] for name in names]
    outputs = Counter[int]()
    for entry in entries:
        outputs[entry.shape[1]] += entry.shape[0]
    layers = 1 if description.config.shared else description.config.depth
    for entry in entries:
        inputs = entry.shape[1]
        if inputs * layers > MAX_INPUTS * outputs[inputs]:
            message = (
                f"it has {inputs} inputs for {entry.shape[0]} outputs; {MAX_INPUTS} for each are the most that int4"
            )
            raise UnsupportedError(f"{message} is calibrated for; choose int8", file=str(entry.file), tensor=entry.name)
    widest = max(entries, key=lambda entry: entry.shape[1])
    need = HESSIAN_BYTES * widest.shape[1] ** 2 + 4 * sum(prod(each.shape) for each in description.entries.values())
    if need > (free := min(available_memory(), default=need)):
        message = f"int4 takes {need // MIB} MiB of memory, as it has {widest.shape[1]} inputs; {free // MIB} are free"
        raise UnsupportedError(f"{message}: choose int8", file=str(widest.file), tensor=widest.name)


def calibrate_matrices(
    source: str, description: Description, text: Path, report_progress: ProgressCallback
) -> dict[str, Int4Matrix]:
    """Return the calibrated int4 matrices by name."""
    loaded = checkpoint.load_described(
        source,
        description,
        dtype=torch.float32,
        device="cpu",
        progress=lambda done, total: report_progress("bytes read", done, total),
    )
    calibration = read_sequences(loaded, text)
    head = save.untied_head(loaded.network, loaded.head)
    return calibrate(
        loaded.network, head, calibration, lambda done, total: report_progress("layers calibrated", done, total)
    )


def read_sequences(loaded: Checkpoint, text: Path) -> list[list[int]]:
    """Cut the file's first tokens into sequences, each with the special tokens of a text."""
    try:
        with text.open(encoding="utf-8", errors="replace") as file:
            read = file.read(SEQUENCE_TOKENS * SEQUENCE_COUNT * CHARACTERS_PER_TOKEN)
    except OSError as error:
        raise ModelError(f"--text: {text} cannot be read: {error}") from None
    opening, closing = loaded.tokenizer.boundary_tokens
    width = min(SEQUENCE_TOKENS, loaded.max_tokens) - len(opening) - len(closing)
    if width < 1:
        most = f"{loaded.max_tokens} tokens are the most that the model reads"
        raise ModelError(f"{most}, and its special tokens are {len(opening) + len(closing)}; int4 needs text: use int8")
    ids = loaded.tokenizer.encode(read, special=False).ids
    starts = range(0, len(ids) - width + 1, width)[:SEQUENCE_COUNT]
    if not starts:
        raise ModelError(
            f"--text: {text} has {len(ids)} tokens, and at least {width} are needed; {SEQUENCE_COUNT * width} are best"
        )
    return [opening + ids[start : start + width] + closing for start in starts]
