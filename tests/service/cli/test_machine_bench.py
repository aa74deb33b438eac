"""The measurements of a machine: every figure is there, is plausible, and can be read as JSON."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from polyhead.models.native.library import runnable_targets
from polyhead.service.cli import machine_bench as bench
from polyhead.service.cli import main as cli
from polyhead.service.cli.machine_bench import BenchFigure, MachineReport


@pytest.fixture(scope="module")
def found() -> MachineReport:
    """With two threads and short runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "MIN_SECONDS", 0.0)
        patch.setattr(bench, "MIN_TRIES", 1)
        patch.setattr(bench, "MAX_MEMORY_BYTES", 16 << 20)
        patch.setattr(bench, "MAX_CACHED_BYTES", 4 << 20)
        patch.setattr(bench.machine, "core_limits", lambda: [2, 3])
        return bench.measure_machine()


def test_every_figure_is_plausible(found: MachineReport) -> None:
    expected = {(what, by, threads) for threads in (1, 2) for what, by in kinds()}
    assert {(f.what, f.by, f.threads) for f in found.figures if f.threads} == expected
    for figure in found.figures:
        assert 0.01 < figure.value < 1e7, figure  # no machine is outside of these limits
    assert found.usable_cores == 2
    assert found.kernels == runnable_targets()


def kinds() -> list[tuple[str, str]]:
    plain = [("memory", "torch.sum"), ("last-level cache", "torch.sum")]
    products = [("float32", "torch.mm"), ("bfloat16", "torch.mm"), ("int8", "torch._int_mm")]
    return plain + products + ([("float32", "compiled step"), ("int8", "compiled step")] if runnable_targets() else [])


def test_threads_are_left_as_they_were(found: MachineReport) -> None:
    assert found.figures
    assert torch.get_num_threads() == 1


def test_figures_are_amounts_divided_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If everything takes a hundredth of a second: so many bytes and operations in a hundredth of a second."""
    monkeypatch.setattr(bench, "best_seconds", lambda work: 0.01)
    monkeypatch.setattr(bench, "time_once", lambda work: 0.0)
    monkeypatch.setattr(bench, "MAX_MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(bench, "last_cache_bytes", lambda: 32 << 20)
    monkeypatch.setattr(bench.machine, "spendable_memory", lambda device: 1 << 30)
    values = {(f.what, f.by): f.value for f in bench.measure_processor(1)}
    torch.set_num_threads(1)
    assert values["memory", "torch.sum"] == pytest.approx((64 << 20) * 100 / 1e9)
    assert values["last-level cache", "torch.sum"] == pytest.approx((16 << 20) * 100 / 1e9)
    assert values["float32", "torch.mm"] == pytest.approx(2 * 2048**3 * 100 / 1e9)
    if runnable_targets():
        assert values["int8", "compiled step"] == pytest.approx(2 * 512 * 2048**2 * 100 / 1e9)


@pytest.mark.parametrize(("pace", "side"), [(1e-10, 2048), (2e-10, 1024), (1e-6, 256)])
def test_slow_products_are_measured_with_smaller_matrices(
    pace: float, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pace`: seconds of a product, by the numbers of a matrix times its side."""
    sides: list[int] = []

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        sides.append(len(a))

    def took(work: Callable[[], object]) -> float:
        work()
        return pace * sides[-1] ** 3

    monkeypatch.setattr(bench, "time_once", took)
    monkeypatch.setattr(bench, "best_seconds", took)
    assert bench.measure_operations(torch.zeros(2048, 2048), multiply) == pytest.approx(2 / pace / 1e9)
    assert sides[-1] == side


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_threads_go_up_to_all_cores(cores: int, counts: list[int]) -> None:
    assert bench.thread_counts(cores) == counts


def test_the_best_of_several_ways_counts() -> None:
    figures = [BenchFigure("int8", by, 2, value, "GOPS") for by, value in (("a", 3.0), ("b", 5.0))]
    machine = MachineReport("p", 2, 2, 1.0, 1.0, [], "none", "", [*figures, BenchFigure("int8", "a", 1, 9.0, "GOPS")])
    assert machine.best_value("int8", 2) == 5.0
    with pytest.raises(ValueError):  # noqa: PT011
        machine.best_value("int8", 4)


def test_the_command_prints_text_and_json(monkeypatch: pytest.MonkeyPatch, found: MachineReport) -> None:
    monkeypatch.setattr(bench, "measure_machine", lambda: found)
    result = json.loads(CliRunner().invoke(cli.app, ["bench", "machine", "--json"]).stdout)
    assert result["usable_cores"] == 2
    assert [BenchFigure(**figure) for figure in result["figures"]] == found.figures
    said = CliRunner().invoke(cli.app, ["bench", "machine"]).stdout
    assert found.processor in said
    for figure in found.figures:
        assert f"{figure.value:,.1f} {figure.unit}" in said


def test_the_list_of_measurements_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from polyhead.service.cli.main import app\n"
        "assert 'machine' in CliRunner().invoke(app, ['bench', '--help']).stdout\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
