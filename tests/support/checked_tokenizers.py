"""Remembers what the check of a tokenizer found, so that one which many tests load is tried once and not by each load.

A check takes a child process, 0.3 s of a processor: a third of what a server of a tiny network takes. Only tokenizers
that passed are remembered, under a hash of everything that the child reads. Servers of the fork server read the same
folder. Tests of the check itself ask for the fixture `every_tokenizer_is_checked`."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyhead.service.runtime import tokenizer_check
from polyhead.service.runtime.tokenizer_check import TokenizerCheck, TokenizerMemory, write_question

VARIABLE = "CHECKED_TOKENIZERS"  # the folder
MOST = 4 << 20  # bytes of a file that is hashed
WEIGHTS = (".safetensors", ".bin", ".npz")  # the child does not read them
ask_child = TokenizerCheck._ask_child


def key_of(source: Path, fields: Mapping[str, Any]) -> str:
    """A hash of the files or fields, and of the limits; empty where a file is too long or is no file."""
    limits = [(name, value) for name, value in vars(tokenizer_check).items() if isinstance(value, int | float)]
    found = hashlib.sha256(repr(sorted(limits)).encode())
    if not source.is_dir():
        found.update(write_question({"source": ""}, fields))
        return found.hexdigest()
    for path in sorted(source.rglob("*")):
        if path.is_dir() or path.suffix in WEIGHTS:
            continue
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST:
            return ""
        found.update(repr((path.relative_to(source).as_posix(), path.read_bytes())).encode())
    return found.hexdigest()


def ask_once(check: TokenizerCheck, source: Path, fields: Mapping[str, Any]) -> TokenizerMemory:
    key = key_of(source, fields)
    known = Path(os.environ[VARIABLE]) / (key or "none")
    if known.exists():
        return TokenizerMemory(**json.loads(known.read_text()))
    memory = ask_child(check, source, fields)
    if key:
        growing = known.with_suffix(f".{os.getpid()}")
        growing.write_text(json.dumps(asdict(memory)))
        growing.replace(known)
    return memory


def remember() -> None:
    """Remember from here on, in this process and in those of its fork server."""
    if VARIABLE not in os.environ:  # otherwise it is that of the process that started this one
        os.environ[VARIABLE] = tempfile.mkdtemp(prefix="tokenizers-")
        atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)
    TokenizerCheck._ask_child = ask_once  # type: ignore[method-assign]
