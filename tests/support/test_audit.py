"""The audit hook reports violations of every process, also by libraries, before they happen."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import audit_hook
import pytest

from tests.support import audit

CONNECT = "import socket; s = socket.socket(); s.setblocking(False); s.connect_ex((%r, 9))"
LOOK_UP = "import socket\ntry: socket.getaddrinfo(%r, 9)\nexcept OSError: pass"
UNPICKLE = "import pickle; pickle.loads(b'cos\\ngetcwd\\n.')"
TORCH = (
    "import io, torch; file = io.BytesIO(); torch.save({'a': torch.zeros(1)}, file)\n"
    "file.seek(0); torch.load(file, weights_only=%s)"
)


def violations_of(code: str, folder: Path) -> str:
    """The violations that are reported for a child that runs `code`."""
    file = folder / "heard"
    known = os.environ | {"AUDITED": str(file)}
    subprocess.run([sys.executable, "-c", code], env=known, check=True, timeout=60, stderr=subprocess.DEVNULL)
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (CONNECT % "192.0.2.1", "socket.connect ('192.0.2.1', 9)"),
        (LOOK_UP % "name.invalid", "socket.getaddrinfo name.invalid"),
        (UNPICKLE, "pickle.find_class os.getcwd"),
    ],
)
def test_violations_are_reported(code: str, expected: str, tmp_path: Path) -> None:
    assert expected in violations_of(code, tmp_path)


@pytest.mark.parametrize("code", [CONNECT % "127.0.0.1", LOOK_UP % "localhost", "import pickle; pickle.loads(b'N.')"])
def test_allowed_operations_are_not_reported(code: str, tmp_path: Path) -> None:
    assert violations_of(code, tmp_path) == ""


def test_loading_a_file_of_torch_as_pickle_is_reported(tmp_path: Path) -> None:
    assert "pickle.find_class" in violations_of(TORCH % False, tmp_path)


def test_violations_of_this_process_are_reported() -> None:
    pickle.loads(b"cos\ngetcwd\n.")
    assert [line for line in audit.take_violations() if "os.getcwd" in line]


def test_every_exception_is_still_needed() -> None:
    """An exception that is no longer needed would hide later violations."""
    assert not [place for place, why in audit_hook.KNOWN.items() if not why]
