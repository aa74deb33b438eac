"""The tests' own watch hears what it should: by every process, whoever does it, before it is done."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import audit_hook
import pytest

from tests.support import watched

CONNECT = "import socket; s = socket.socket(); s.setblocking(False); s.connect_ex((%r, 9))"
LOOK_UP = "import socket\ntry: socket.getaddrinfo(%r, 9)\nexcept OSError: pass"
UNPICKLE = "import pickle; pickle.loads(b'cos\\ngetcwd\\n.')"
TORCH = (
    "import io, torch; file = io.BytesIO(); torch.save({'a': torch.zeros(1)}, file)\n"
    "file.seek(0); torch.load(file, weights_only=%s)"
)


def heard(code: str, folder: Path) -> str:
    """What a child is heard to do that runs `code`."""
    file = folder / "heard"
    known = os.environ | {"AUDITED": str(file)}
    subprocess.run([sys.executable, "-c", code], env=known, check=True, timeout=60, stderr=subprocess.DEVNULL)
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (CONNECT % "192.0.2.1", "socket.connect ('192.0.2.1', 9)"),
        (LOOK_UP % "name.invalid", "socket.getaddrinfo name.invalid"),
        (UNPICKLE, "pickle.find_class os.getcwd"),
    ],
)
def test_what_is_not_allowed_is_heard(code: str, said: str, tmp_path: Path) -> None:
    assert said in heard(code, tmp_path)


@pytest.mark.parametrize("code", [CONNECT % "127.0.0.1", LOOK_UP % "localhost", "import pickle; pickle.loads(b'N.')"])
def test_what_is_allowed_is_not(code: str, tmp_path: Path) -> None:
    assert heard(code, tmp_path) == ""


def test_torch_s_own_files_are_pickles_and_heard(tmp_path: Path) -> None:
    assert "pickle.find_class" in heard(TORCH % False, tmp_path)


def test_this_process_is_watched_too() -> None:
    pickle.loads(b"cos\ngetcwd\n.")
    assert [line for line in watched.taken() if "os.getcwd" in line]


def test_every_exception_is_still_needed() -> None:
    """One that nobody needs any more would hide what somebody does later."""
    assert not [place for place, why in audit_hook.KNOWN.items() if not why]
