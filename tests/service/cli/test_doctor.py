"""`polyhead doctor`: what it finds, what it advises, and its exit code."""

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead.service.cli import doctor
from polyhead.service.cli.main import app
from polyhead.service.core.version import VERSION


def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    found = json.loads(result.stdout)
    assert found["healthy"] == (result.exit_code == 0)
    return result.exit_code, {finding["subject"]: finding for finding in found["findings"]}


def test_it_names_what_is_installed_and_what_computes(tiny_classifier: Path) -> None:
    code, found = run("--port", "0", f"judge={tiny_classifier}")
    assert code == 0
    assert found["polyhead"]["found"] == VERSION
    assert found["compiled step"]["status"] in ("ok", "slow")
    assert "physical" in found["cores"]["found"]
    assert found["memory"]["status"] == "ok"


def test_a_port_in_use_is_an_error_with_another_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["doctor", "--port", str(port), "m=/some"])
    assert result.exit_code == 1
    assert f"BROKEN: cannot listen on 127.0.0.1 port {port}: it is in use" in result.stdout
    assert "-> for example --port " in result.stdout


def test_a_missing_compiled_step_is_slow_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "runnable_targets", list)
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    [finding] = doctor.examine_instructions()
    assert finding.status == "slow"
    assert "apt install g++" in finding.advice
    monkeypatch.setattr(doctor, "find_compiler", lambda: "c++")
    [finding] = doctor.examine_instructions()
    assert finding.advice == "python -m polyhead.models.native.build"


def test_a_slower_instruction_set_has_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "runnable_targets", lambda: ["portable"])
    monkeypatch.setattr(doctor, "load_library", lambda name: None)
    monkeypatch.setattr(doctor, "TARGETS", {"avx2": (), "portable": ()})
    monkeypatch.setattr(doctor, "processor_flags", lambda: {"fma"})
    [finding] = doctor.examine_instructions()
    assert (finding.status, finding.advice) == ("slow", "")
    assert finding.found == "portable runs; avx2 needs avx2, f16c, which this processor has not"
    monkeypatch.setattr(doctor, "processor_flags", lambda: {"fma", "avx2", "f16c"})
    monkeypatch.setattr(doctor, "LIBRARIES", tmp_path)
    [finding] = doctor.examine_instructions()
    assert "avx2 is not compiled" in finding.found
    assert finding.advice.startswith("a faster one can be compiled")


def test_torch_with_cuda_and_without_a_gpu_is_named() -> None:
    assert "--torch-backend cpu" in doctor.examine_torch("2.13.0", "13.0", has_gpu=False).advice
    assert not doctor.examine_torch("2.13.0+cpu", "", has_gpu=False).advice
    assert not doctor.examine_torch("2.13.0", "13.0", has_gpu=True).advice
    assert not doctor.examine_attention("").advice
    assert "apt install gcc" in doctor.examine_attention("RuntimeError: Failed to find C compiler").advice


def test_a_full_disk_and_a_closed_folder_are_errors_only_where_models_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "models"
    assert doctor.examine_models(folder, is_needed=True).status == "info"
    monkeypatch.setattr(doctor, "DISK_RESERVE", 1 << 62)
    assert doctor.examine_models(folder, is_needed=True).status == "broken"
    assert "MiB of disk are free" in doctor.examine_models(folder, is_needed=False).found
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in doctor.examine_models(folder, is_needed=True).found
