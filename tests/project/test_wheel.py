"""The wheel: one package, beside other packages named `models` or `service`; its compiled step needs no compiler."""

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

from polyhead.models.native import build
from tests.support.places import ROOT

OTHER_PACKAGE = 'raise ImportError("this is another package of this name")\n'
COMMAND = "serve", "--port", "0", "--host", "127.0.0.1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "POLYHEAD_NATIVE"}
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True, env=variables)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, its dependencies, and packages that have the names of the repository's folders."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]  # the environment has none: to unpack one takes seconds
    subprocess.run([*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheel)], check=True)
    for name in ("models", "service", "training"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(OTHER_PACKAGE)
    # A line of a .pth file is a folder to import from. The .pth files in that folder, such as that of an editable
    # install of this repository, are not read.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder


def installed_variables(installed: Path) -> dict[str, str]:
    """The environment's variables, without PYTHONPATH, which would hide the package, and without a compiler."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": str(installed / "bin")}


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
    assert not [name for name in names if name.endswith(".pyc")]


def test_it_contains_the_compiled_step(wheel: Path) -> None:
    steps = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    if build.find_compiler():
        assert steps == build.TARGETS.keys()
        assert wheel.stem.endswith(sysconfig.get_platform().replace("-", "_").replace(".", "_"))
    else:
        assert not steps
        assert wheel.stem.endswith("-none-any")


@pytest.mark.thorough
def test_it_serves_beside_packages_named_as_the_folders(installed: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [installed / "bin" / "polyhead", *COMMAND, f"judge={tiny_classifier}"],
        stderr=subprocess.PIPE,
        text=True,
        env=installed_variables(installed),
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
    subprocess.run([installed / "bin" / "python", "-P", "-c", code], check=True, env=installed_variables(installed))


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_its_step_runs_without_a_compiler(installed: Path) -> None:
    command = [installed / "bin" / "polyhead", "doctor"]
    found = subprocess.run(command, env=installed_variables(installed), capture_output=True, text=True, check=False)
    assert re.search(r"^compiled step +\w+ runs", found.stdout, flags=re.MULTILINE), found.stdout + found.stderr


@pytest.mark.thorough
def test_pip_installs_it_with_all_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment, from the package index of this machine."""
    venv.create(tmp_path / "empty", with_pip=True, symlinks=True)
    python, constraints = tmp_path / "empty" / "bin" / "python", ROOT / "constraints.txt"
    variables = installed_variables(tmp_path / "empty")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel], check=True, env=variables)
    subprocess.run([python, "-m", "pip", "check"], check=True, env=variables)
    code = "from polyhead.models.native.library import runnable_targets as found; assert found(), found()"
    if build.find_compiler():
        subprocess.run([python, "-c", code], check=True, env=variables, cwd=tmp_path)
