"""The wheel installs only the package `polyhead`, which works beside other packages named `models` or `service`."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.places import ROOT

OTHER_PACKAGE = 'raise ImportError("this is another package of this name")\n'
COMMAND = "serve", "--port", "0", "--host", "127.0.0.1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, env=os.environ | {"POLYHEAD_NATIVE": "aside"})
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, its dependencies, and packages that have the names of the repository's folders."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    for name in ("models", "service", "training"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(OTHER_PACKAGE)
    # A line of a .pth file is a folder to import from. The .pth files in that folder, such as that of an editable
    # install of this repository, are not read.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


def without_path() -> dict[str, str]:
    """The environment without PYTHONPATH, which would hide the installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_it_contains_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub(r"^polyhead-.*\.dist-info$", "dist-info", name.split("/")[0]) for name in names} == {
        "polyhead",
        "dist-info",
    }
    tracked = subprocess.run(
        ["git", "ls-files", "models", "service", "training"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    inside = {name.removeprefix("polyhead/") for name in names}
    assert {name for name in tracked if (ROOT / name).exists()} <= inside
    assert not [name for name in names if name.endswith((".so", ".pyc"))], "the wheel contains compiled files"


def test_it_serves_beside_packages_named_as_the_folders(installed: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [installed / "bin" / "polyhead", *COMMAND, f"judge={tiny_classifier}"],
        stderr=subprocess.PIPE,
        text=True,
        env=without_path(),
        cwd=tmp_path,
    )
    try:
        assert process.stderr is not None
        lines = list[str]()
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("".join(lines))
        with httpx.Client(base_url=address[0], timeout=120) as client:
            while client.get("/readyz").status_code != 200:
                assert process.poll() is None
            answer = client.post("/predict", json={"inputs": "a fox"})
        assert answer.status_code == 200, answer.text
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_modules_have_the_installed_name(installed: Path) -> None:
    code = (
        "import sys, polyhead.service.cli.main, polyhead.service.server.assembly\n"
        "import polyhead.training.recipes.commands\n"
        "assert not {'models', 'service', 'training'} & set(sys.modules)\n"
        f"assert sys.modules['polyhead'].__file__.startswith({str(installed)!r})\n"
    )
    subprocess.run([installed / "bin" / "python", "-P", "-c", code], check=True, env=without_path())
