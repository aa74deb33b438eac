"""Whether the patterns of a vocabulary can be followed at all.  Knows no file and no text of anybody's.

The one idea: a tokenizer.json brings regular expressions and replacements that run over every text a client sends.
The library gives up a search that goes astray, by a panic, after a fraction of a second; what does so on a few short
texts is refused before it is served, and so is what makes long texts of short ones.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from models.errors import CheckpointError
from models.tokenizer.panics import followed, refused

TRIED = tuple(f"{character * 48}{end}" for character in ("a", "A", "0", " ", "\n", ".", "é") for end in ("", "!", "z"))
MOST_GROWTH = 256  # characters that a character may become


def refuse_runaway(backend: Tokenizer) -> None:
    """CheckpointError for a vocabulary that would hold up whoever tokenizes with it."""
    grown = 1.0
    for step in _steps(json.loads(backend.normalizer.__getstate__()) if backend.normalizer else {}):
        grown *= _growth(step)
        if grown > MOST_GROWTH:
            raise CheckpointError(f"its normalizer makes more than {MOST_GROWTH} characters of one")
    followed(lambda: backend.encode(""), refused())  # what it panics on even then is no pattern
    for text in TRIED:
        astray = CheckpointError(f"a pattern of its tokenizer goes astray on a text as short as {text!r}")
        followed(lambda text=text: backend.encode(text), lambda _, astray=astray: astray)  # type: ignore[misc]


def _steps(normalizer: Any) -> Iterator[dict[str, Any]]:
    if normalizer.get("type") == "Sequence":
        for each in normalizer["normalizers"]:
            yield from _steps(each)
    else:
        yield normalizer


def _growth(step: dict[str, Any]) -> float:
    """How many characters one may become; what stands before every text counts as if it stood before each."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)}:
            return max(1.0, len(content) / max(1, len(found)))
        case {"type": "Replace", "content": str(content)}:
            return len(content) + 1.0
        case {"type": "Prepend", "prepend": str(prepended)}:
            return 1.0 if len(prepended) <= MOST_GROWTH else len(prepended)
        case {"type": "Precompiled", "precompiled_charsmap": str(told)}:
            raw = base64.b64decode(told)  # the bytes of an index, the index, then what it leads to, each with a zero
            texts = raw[4 + int.from_bytes(raw[:4], "little") :]
            return max(1.0, *map(len, texts.split(b"\0")))
    return 1.0
