"""`polyhead quantize`: writes a checkpoint folder with quantised weights.

int8 needs the weights only. int4 also needs text, for calibration.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint import merged_adapter as adapter
from polyhead.models.checkpoint import save_folder as save
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANY_SOURCE
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.quantization.quantize import Int4Matrix, calibrate

from .checkpoint_source import describe_checked

SEQUENCE_TOKENS, SEQUENCE_COUNT = 512, 50  # tokens of a calibration sequence, and their number
CHARACTERS_PER_TOKEN = 16  # characters of text read per token; most tokens have fewer
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
    save.find_coded_matrices(description, save.SCHEMES[precision])
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
    ids = loaded.tokenizer.encode(read, special=False).ids
    starts = range(0, len(ids) - width + 1, width)[:SEQUENCE_COUNT]
    if not starts:
        raise ModelError(
            f"--text: {text} has {len(ids)} tokens, and at least {width} are needed; {SEQUENCE_COUNT * width} are best"
        )
    return [opening + ids[start : start + width] + closing for start in starts]
