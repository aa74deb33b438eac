"""A checkpoint folder made smaller: the work of `polyhead quantize`.

Knows checkpoints and tokens, no arithmetic.  The one idea: eight bits need nothing but the weights; four bits need
text, to see which errors show.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint import merged_adapter as adapter
from polyhead.models.checkpoint import save_folder as save
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANYWHERE
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.quantization.quantize import Grid, calibrate

LENGTH, COUNT = 512, 50  # tokens of a sequence to calibrate by, and sequences
CHARACTERS = 16  # of text that are read for a token; there are fewer in most
MIB = 1 << 20
Say = Callable[[str, int, int], None]


def quantize(source: str, out: Path, precision: str, text: Path | None, say: Say) -> str:
    """Write `out` and say what became of the weights.  ModelError where it cannot be done."""
    if out.is_symlink() and not out.exists():
        raise ModelError(f"{out} is a link to what is not there; name a folder that is new or empty")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already; name a folder that is new or empty")
    if (text is not None) != (precision == "int4"):
        raise ModelError("int4 needs --text, a file of text like that it will see; int8 takes none")
    what = described(source)
    save.matrices(what, save.SCHEMES[precision])
    save.copied(Path(what.file).parent)
    grids = None if text is None else calibrated(source, what, text, say)
    try:
        save.write(what, out, grids, lambda done, total: say("tensors written", done, total))
    except OSError as error:
        raise ModelError(f"{out}: the folder cannot be written: {error.strerror or error}") from None
    before = sum(entry.size for entry in what.entries.values() if entry.encoding)
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return f"{out}: weights of {after / MIB:.1f} MiB, {before / MIB:.1f} MiB before"


def described(source: str) -> Description:
    path = ANYWHERE.place(source)
    if path.is_file() or adapter.is_adapter(path):
        message = (
            "only a safetensors folder is quantised, no GGUF file and no adapter; name the folder it was made from"
        )
        raise UnsupportedError(message, file=str(path))
    what = checkpoint.describe(str(path))
    if what.head.task == "translate":
        raise UnsupportedError("it reads one text and writes another, and such are not quantised", file=what.file)
    return what


def calibrated(source: str, what: Description, text: Path, say: Say) -> dict[str, Grid]:
    """The matrices of four bits by their names."""
    loaded = checkpoint.read(
        source, what, dtype=torch.float32, device="cpu", progress=lambda done, total: say("bytes read", done, total)
    )
    shown = sequences(loaded, text)
    head = save.own_output(loaded.network, loaded.head)
    return calibrate(loaded.network, head, shown, lambda done, total: say("layers calibrated", done, total))


def sequences(loaded: Checkpoint, text: Path) -> list[list[int]]:
    """The file's first tokens, cut into sequences with the special tokens of a text around each."""
    try:
        with text.open(encoding="utf-8", errors="replace") as file:
            read = file.read(LENGTH * COUNT * CHARACTERS)
    except OSError as error:
        raise ModelError(f"--text: {text} cannot be read: {error}") from None
    opening, closing = loaded.tokenizer.ends
    width = min(LENGTH, loaded.max_tokens) - len(opening) - len(closing)
    ids = loaded.tokenizer.encode(read, special=False).ids
    starts = range(0, len(ids) - width + 1, width)[:COUNT]
    if not starts:
        raise ModelError(
            f"--text: {text} has {len(ids)} tokens, and at least {width} are needed; {COUNT * width} are best"
        )
    return [opening + ids[start : start + width] + closing for start in starts]
