"""deploy/release.sh: it refuses versions that do not agree, names what is missing, and pushes nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

VERSION = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that the script reads, and its programs as stubs that write their arguments down."""
    for name in ("pyproject.toml", "CHANGELOG.md", "deploy/release.sh", "deploy/helm/polyhead/Chart.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "helm", "auditwheel", "patchelf", "c++"):
        stub(tmp_path, name, 'echo "${0##*/} $* $POLYHEAD_NATIVE" >>"$(dirname "$0")/asked"\n')
    return tmp_path


def stub(folder: Path, name: str, script: str) -> None:
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}")
    (folder / "bin" / name).chmod(0o755)


def release(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{folder / 'bin'}{os.pathsep}/usr/bin:/bin"}
    command = [str(folder / "deploy" / "release.sh"), *parts]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_versions_must_agree(copy: Path) -> None:
    assert release(copy, "sdist").returncode == 0
    chart = copy / "deploy/helm/polyhead/Chart.yaml"
    chart.write_text(re.sub(r"^version: .*", "version: 9.9.9", chart.read_text(), flags=re.MULTILINE))
    done = release(copy, "sdist")
    assert (done.returncode, "the chart is not of version" in done.stderr) == (1, True)
    (copy / "CHANGELOG.md").write_text("# Changelog\n")
    assert "CHANGELOG.md has no section for" in release(copy, "sdist").stderr


def test_parts_are_built_and_what_would_be_pushed_is_printed(copy: Path) -> None:
    assert VERSION is not None
    (copy / "dist").mkdir()
    (copy / "dist" / f"polyhead-{VERSION[1]}.tar.gz").write_text("an archive")
    done = release(copy, "wheel", "chart")
    assert done.returncode == 0, done.stderr
    asked = (copy / "bin" / "asked").read_text()
    assert "python3 -m build --wheel" in asked
    assert "auditwheel repair --wheel-dir dist" in asked
    assert "helm package --destination dist deploy/helm/polyhead" in asked
    assert "Nothing is pushed" in done.stdout
    assert re.search(rf"dist/polyhead-{VERSION[1]}\.tar\.gz .* to a package index", done.stdout)
    assert not re.search(r"upload|twine|login", (ROOT / "deploy/release.sh").read_text())


def test_a_missing_tool_is_named(copy: Path) -> None:
    (copy / "bin" / "auditwheel").unlink()
    done = release(copy, "wheel", "sdist")
    assert done.returncode == 1
    assert "wheel is left out: auditwheel is not here" in done.stderr
    assert "python3 -m build --sdist" in (copy / "bin" / "asked").read_text()
    assert release(copy, "tea").returncode == 1
