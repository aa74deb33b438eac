"""Files of checkpoints with random changes, and the process that tries to load them.

As a program it makes and loads the cases of a seed, one after the other, and prints the outcome of each: `python
mutations.py SEED COUNT FOLDER...`, COUNT for each file of each folder."""

import json
import random
import shutil
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from polyhead.models import checkpoint
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.core.errors import ModelError
from polyhead.service.runtime import tokenizer_check as vetting

SMALL = 1 << 28  # bytes of weights that are changed
HEAD = 1 << 14  # bytes of a GGUF file that are changed: its metadata
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 1 << 31, 1 << 40, 1 << 63, -(1 << 63), 10**30, 0.5, -0.5, 1e308, 1e-308,
    "", "a", "\0", "\ud800", "[CLS]", "../..", "/etc/passwd", "x" * 5000, [], {}, [[]], [None], {"": None}, [0] * 5000,
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside a JSON value."""
    yield way
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*way, key))


def edited(value: Any, chance: random.Random) -> Any:
    """A copy in which a value was changed, removed, duplicated or replaced by another."""
    ways = [way for way in places(value) if way]
    if not ways:
        return chance.choice(ODD)
    shallow = [way for way in ways if len(way) <= 2]
    way = chance.choice(shallow if shallow and chance.random() < 0.7 else ways)
    holder = value
    for key in way[:-1]:
        holder = holder[key]
    match chance.randrange(4):
        case 0:
            del holder[way[-1]]
        case 1 if isinstance(holder, list):
            holder.insert(0, holder[way[-1]])
        case 2:
            other = value
            for key in chance.choice(ways):
                other = other[key]
            holder[way[-1]] = json.loads(json.dumps(other))
        case _:
            holder[way[-1]] = chance.choice(ODD)
    return value


def scratched(content: bytes, chance: random.Random, head: int) -> bytes:
    """A few bytes near the beginning changed, removed or inserted."""
    raw = bytearray(content)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(max(min(len(raw), head), 1))
        match chance.randrange(4):
            case 0:
                raw[at : at + chance.randrange(1, 64)] = b""
            case 1:
                raw[at:at] = chance.randbytes(chance.randrange(1, 64))
            case 2:
                raw[at : at + 8] = struct.pack("<q", chance.choice((0, -1, 1 << 20, 1 << 31, 1 << 40, 1 << 62)))
            case _:
                raw[at : at + 1] = chance.randbytes(1)
    return bytes(raw)


def mutated(name: str, content: bytes, chance: random.Random) -> bytes:
    rough = chance.random() < 0.3
    if name.endswith(".safetensors") and not rough:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.dumps(edited(json.loads(content[8 : 8 + size]), chance)).encode()
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    if name.endswith(".json") and not rough:
        return json.dumps(edited(json.loads(content), chance)).encode()
    return scratched(content, chance, HEAD if name.endswith((".gguf", ".safetensors")) else len(content))


def cases(sources: list[Path], chance: random.Random, count: int) -> Iterator[tuple[str, Path, str, bytes]]:
    """The change, the source, the file in it, and its new content."""
    for source in sources:
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for file in files:
            name = file.name if source.is_file() else file.relative_to(source).as_posix()
            for number in range(count):
                yield f"{source.name}/{name} {number}", source, name, mutated(name, file.read_bytes(), chance)


def tried(source: Path, vet: vetting.TokenizerCheck) -> str:
    """Load a model and tokenise a text, or return the message of its error; any other exception is raised."""
    try:
        what = checkpoint.describe_source(str(source), folder_check=vet.check_folder)
        if estimate_load(what).weight_bytes(torch.float32) > SMALL:
            return "large"
        loaded = checkpoint.load(str(source))
        loaded.tokenizer.encode_batch(["a fox", ("a fox", "b")])
        loaded.tokenizer.decode(list(range(min(loaded.tokenizer.vocab_size, 400))))
        if loaded.chat is not None:
            loaded.chat.render([{"role": "user", "content": "hello"}])
    except ModelError as error:
        return f"refused: {str(error)[:200]}"
    return "loaded"


def main(seed: int, count: int, place: Path, sources: list[Path]) -> None:
    chance, vet = random.Random(seed), vetting.TokenizerCheck()
    vetting.CPU_SECONDS = 4
    for name, source, file, content in cases(sources, chance, count):
        copy = place / "case" if source.is_dir() else place / "case.gguf"
        if source.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy)
        (copy / file if source.is_dir() else copy).write_bytes(content)
        began, crashed = time.process_time(), ""
        try:
            outcome = tried(copy, vet)
        except BaseException:  # noqa: BLE001  its type is part of the output
            outcome, crashed = "crashed", traceback.format_exc()[-1500:]
        result = {"name": name, "outcome": outcome, "crashed": crashed, "seconds": time.process_time() - began}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    vet.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
