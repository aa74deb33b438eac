"""The programs of examples/ against a server with tiny networks under the names of the quick start; the files of
examples/monitoring by promtool. `make docs-check` runs them against the quick start itself."""

import importlib.util
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.support import checkpoints
from tests.support.places import ROOT
from tests.support.processes import Process
from tests.support.prometheus import DEPLOYED, promtool

EXAMPLES = ROOT / "examples"
MONITORING = EXAMPLES / "monitoring"
MOST_LINES = 60
Run = Callable[..., list[str]]


@pytest.fixture
def run(tiny_quick_start: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in this process and returns the lines of its output."""

    def run_example(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, "--url", tiny_quick_start.url, *arguments])
        load(name).main()
        return capsys.readouterr().out.splitlines()

    return run_example


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.*")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    if path.suffix == ".py":
        assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES
        assert f"]({path.name})" in (EXAMPLES / "README.md").read_text("utf-8")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_without_a_server_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--url", "http://127.0.0.1:9"])
    monkeypatch.setattr(sys, "stdin", Lines("one"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the official client tries again
    with pytest.raises(SystemExit, match="No server answers"):
        runpy.run_path(str(path), run_name="__main__")


def test_a_question_is_answered_from_a_document(run: Run) -> None:
    question, source, answer, *_ = run("rag", "Who?")
    assert question == "question  Who?"
    assert source.removeprefix("source    ") in load("rag").DOCUMENTS
    assert answer.startswith("answer    ")


def test_texts_are_sorted_by_two_thresholds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    label = "--label", checkpoints.LABELS[0]
    monkeypatch.setattr(sys, "stdin", Lines("one", "", "two"))
    assert [line.split()[0] for line in run("moderate", *label, "--hold", "0", "--refuse", "1.1")] == ["hold"] * 2
    monkeypatch.setattr(sys, "stdin", Lines("one"))
    [line] = run("moderate", *label, "--hold", "1.1", "--refuse", "1.2")
    assert line.startswith("publish ")
    assert line.endswith("  one")
    decide = load("moderate").decide
    assert [decide(share, 0.5, 0.9) for share in (0.4, 0.5, 0.9)] == ["publish", "hold", "refuse"]


class Lines(list[str]):
    """Standard input that is no terminal, with these lines."""

    def __init__(self, *lines: str) -> None:
        super().__init__(f"{line}\n" for line in lines)

    def isatty(self) -> bool:
        return False


def test_a_question_is_answered_or_left_to_a_person(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Lines("one", "", "two"))
    answers = [line.split() for line in run("decide", "--least", "0")]
    assert [words[2] for words in answers] == ["one", "two"]
    for label, confidence, _ in answers:
        assert label in ("POSITIVE", "NEGATIVE")
        assert 0 < float(confidence) <= 1
    monkeypatch.setattr(sys, "stdin", Lines("one"))
    assert run("decide", "--least", "1") == ["a person       one"]


def test_requests_are_led_to_the_most_similar_department_or_a_person(run: Run) -> None:
    route = load("route")
    assert route.choose({"billing": 0.1, "shipping": 0.3}, 0.2) == "shipping"
    assert route.choose({"billing": 0.1, "shipping": 0.15}, 0.2) == "a person"
    [first, second] = run("route", "--least", "-1", "Where is it?", "What?")
    assert first.split()[0] in route.DEPARTMENTS
    assert "What?  (billing " in second


def test_the_call_of_a_tool_fits_its_schema_whatever_the_network_says(run: Run) -> None:
    call, answer = run("agent")[:2]
    weather = load("agent").WEATHER
    assert call in {f'call    get_weather({{"city": "{city}"}}) = {result}' for city, result in weather.items()}
    assert answer.startswith("answer  ")


def test_promtool_accepts_the_configuration_with_the_deployed_rules(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "prometheus.yml", tmp_path)
    shutil.copytree(DEPLOYED / "rules", tmp_path / "rules")
    assert "SUCCESS: 3 rule files found" in promtool("check", "config", str(tmp_path / "prometheus.yml"))
    [job] = yaml.safe_load((MONITORING / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert job == {"job_name": "polyhead", "static_configs": [{"targets": ["127.0.0.1:8000"]}]}


def test_compose_of_the_example_names_files_that_exist_and_the_images_of_the_deployment() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text("utf-8"))["services"]
    deployed = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    for name, service in services.items():
        assert service["image"] == deployed[name]["image"]
        mounted = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((MONITORING / source).exists() for source in mounted if source.startswith("."))
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    source = yaml.safe_load((MONITORING / "datasource.yml").read_text("utf-8"))["datasources"][0]
    assert source["url"] == "http://127.0.0.1:9090"
