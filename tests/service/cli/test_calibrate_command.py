"""`polyhead calibrate`: fits on labelled rows, writes a file beside the model, and a server applies it."""

import asyncio
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polyhead.service.cli import main as cli
from polyhead.service.cli.calibrate_command import ask_row
from polyhead.service.cli.labelled_questions import read_labelled_states
from polyhead.service.decisions.calibration_file import calibration_path, read_calibration_file
from polyhead.service.decisions.calibration_fit import HAS_SKLEARN
from tests.support.processes import Process

CHOICE = {"type": "choice", "instructions": "Where is it?", "criteria": {"north": None, "south": "warm", "east": None}}
NOUL = {"type": "noul", "instructions": "Is it so?"}
SCORE = {"type": "score", "instructions": "How good?", "criteria": ["bad", "fair", "good"]}
QUESTIONS = {"where": CHOICE, "so": NOUL, "good": SCORE}


def polyhead(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["calibrate", *map(str, arguments)])


def write_rows(path: Path, count: int = 80, **fields: Any) -> Path:
    """Rows whose labels do not depend on the text, so a model that is certain of one is wrong to be so."""
    source = random.Random(7)

    def row(number: int) -> Mapping[str, Any]:
        answers = {
            "where": source.choices(["north", "south", "east"], [5, 3, 2])[0],
            "so": source.random() < 0.3,
            "good": source.choices([0, 1, 2], [2, 5, 3])[0],
        }
        return {"state": f"the place {number}", "questions": QUESTIONS, "answers": answers} | fields

    path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))
    return path


@pytest.fixture(scope="module", autouse=True)
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hashes of weights are kept there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYHEAD_MODEL_DIR", str(tmp_path_factory.mktemp("kept")))
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def folder(tiny_generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a calibration beside it."""
    made = tmp_path_factory.mktemp("calibrated") / "model"
    shutil.copytree(tiny_generator, made)
    return made


@pytest.fixture(scope="module")
def result(folder: Path, rows: Path) -> Any:
    return polyhead(folder, rows, "--precision", "0.4", "--precision", "1", "--plot", folder.parent / "out.svg")


@pytest.fixture(scope="module")
def server(result: Any, folder: Path, tiny_generator: Path) -> Iterator[Process]:
    process = Process(f"calibrated={folder}", f"plain={tiny_generator}")
    process.ready()
    yield process
    process.stop()


def test_the_report_has_measures_thresholds_and_a_diagram(result: Any, folder: Path) -> None:
    assert result.exit_code == 0, result.output
    said = result.stdout
    assert re.search(r"^fitted on 40 answers, measured on 40 answers about other texts$", said, re.MULTILINE)
    assert len(re.findall(r"^ECE +0\.\d{4} +0\.\d{4}   \(0\.\d{4} by chance", said, re.MULTILINE)) == 3
    assert re.search(r"^for a precision of 0\.4: confidence of at least 0\.\d{4}, which \d", said, re.MULTILINE)
    assert re.search(r"^ +0\.\d{4} [01]\.\d{4}  =*", said, re.MULTILINE)
    assert f"wrote {calibration_path(folder)}; polyhead serve applies it" in said
    assert ("only temperatures were fitted; for platt and isotonic: pip" in said) is not HAS_SKLEARN
    assert '<g id="reliability-0-after"' in (folder.parent / "out.svg").read_text()


def test_the_held_out_log_loss_is_lower(result: Any, folder: Path) -> None:
    found = read_calibration_file(calibration_path(folder))
    assert found.precision == "float32"
    assert {each.kind for each in found.maps} == {"choice", "predicate", "score"}
    for each in found.maps:
        assert each.after.log_loss < each.before.log_loss
        assert (each.fitted_answers, each.held_out_answers) == (40, 40)
        assert sum(each.confidences) == pytest.approx(1)
        assert all(threshold.right >= threshold.precision for threshold in each.thresholds)
        assert each.kind == "predicate" or each.after.accuracy == each.before.accuracy


def test_a_server_applies_it_and_its_answers_name_it(server: Process, folder: Path) -> None:
    names = {each.kind: each.name for each in read_calibration_file(calibration_path(folder)).as_calibration().maps}

    def ask(model: str) -> Any:
        body = {"model": model, "state": "the place", "questions": QUESTIONS}
        response = httpx.post(f"{server.url}/v1/systemone", json=body)
        assert response.status_code == 200, response.text
        return response.json()["answers"]

    calibrated, plain = ask("calibrated"), ask("plain")
    for question, kind in (("where", "choice"), ("so", "predicate"), ("good", "score")):
        assert calibrated[question]["calibration"] == names[kind]
        assert "calibration" not in plain[question]
        shares = calibrated[question]["probabilities"].values()
        assert sum(shares) == pytest.approx(1)
        assert calibrated[question]["confidence"] == pytest.approx(max(shares))
    body = {
        "model": "calibrated",
        "input": "the place",
        "questions": [{"type": "predicate", "instructions": "Is it so?", "name": "so"}],
    }
    [answer] = httpx.post(f"{server.url}/v1/decisions", json=body).json()["answers"]
    assert answer["calibration"] == names["predicate"]
    assert answer["probability"] == pytest.approx(calibrated["so"]["probabilities"]["yes"])
    assert (
        'confidence_drift_ratio{model="calibrated",question="predicate"} 0.0' in httpx.get(f"{server.url}/metrics").text
    )


def test_a_server_shows_the_reliability_that_was_measured(server: Process, folder: Path) -> None:
    written = {each.kind: each for each in read_calibration_file(calibration_path(folder)).maps}
    path = "v1/decisions/calibration"
    shown = httpx.get(f"{server.url}/models/calibrated/{path}").json()["maps"]
    assert {each["kind"] for each in shown} == written.keys()
    for each in shown:
        for side in ("before", "after"):
            measures = each[side]
            assert measures == getattr(written[each["kind"]], side).model_dump()
            assert len(measures["bins"]) > 1
            gaps = [part["answers"] * abs(part["confidence"] - part["accuracy"]) for part in measures["bins"]]
            assert sum(gaps) / each["held_out_answers"] == pytest.approx(measures["ece"])
    assert httpx.get(f"{server.url}/models/plain/{path}").json()["maps"] == []


def test_a_server_can_be_asked(server: Process, folder: Path, tiny_generator: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = polyhead(tiny_generator, rows, "--url", server.url, "--name", "plain", "--output", out, "--json")
    assert asked.exit_code == 0, asked.output
    found, beside = read_calibration_file(out), read_calibration_file(calibration_path(folder))
    assert (found.weights, found.precision) == (beside.weights, beside.precision)
    for one, other in zip(found.maps, beside.maps, strict=True):
        assert one.map.parameters == pytest.approx(other.map.parameters, rel=1e-3)
    report = json.loads(asked.stdout)
    assert [each["kind"] for each in report["fits"]] == [each.kind for each in found.maps]
    assert report["fits"][0]["map"]["method"] == found.maps[0].map.method
    asked = polyhead(tiny_generator, rows, "--url", server.url, "--name", "calibrated", "--output", out)
    assert asked.exit_code == 1
    assert "the server applies the calibration choice:" in asked.stderr
    assert "start it with --calibrations MODEL=none" in asked.stderr
    asked = polyhead(tiny_generator, rows, "--url", "http://127.0.0.1:9", "--output", out)
    assert asked.exit_code == 1
    assert "does not answer" in asked.stderr


def test_a_row_that_a_busy_server_refuses_is_sent_again(rows: Path) -> None:
    state, *_ = read_labelled_states(rows, None)
    found = {"where": [0.5, 0.3, 0.2], "so": [0.9, 0.1], "good": [0.1, 0.2, 0.7]}
    answers = {name: {"probabilities": dict(enumerate(shares))} for name, shares in found.items()}
    waiting = [httpx.Response(429, headers={"Retry-After": "0"}), httpx.Response(200, json={"answers": answers})]

    async def run() -> list[Sequence[float]]:
        transport = httpx.MockTransport(lambda _: waiting.pop(0))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await ask_row(client, "", state)

    assert asyncio.run(run()) == [*found.values()]
    assert not waiting


def test_one_question_has_a_map_of_its_own_with_questions_of_a_file(tiny_classifier: Path, tmp_path: Path) -> None:
    """An encoder answers with its labels; rows have no questions, and some no answer to one of them."""
    (tmp_path / "q.yaml").write_text(
        "mood: {type: choice, criteria: {negative: null, positive: null}}\n"
        'bad: {type: noul, instructions: negative, criteria: {true: "", false: ""}}\n'
    )
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(60):
            answers = {"mood": "positive" if number % 3 else "negative"} | ({"bad": True} if number < 20 else {})
            file.write(json.dumps({"state": f"film {number}", "answers": answers}) + "\n")
    out = tmp_path / "out.json"
    found = polyhead(
        *(tiny_classifier, tmp_path / "rows.jsonl", "--questions", tmp_path / "q.yaml", "--by", "question"),
        *("--method", "temperature", "--output", out),
    )
    assert found.exit_code == 0, found.output
    assert re.search(r"^bad: \d+ answers in a half are too few, at least 20 are needed$", found.stdout, re.MULTILINE)
    names = [each.question.name for each in read_calibration_file(out).maps if each.question]
    assert names == ["mood"] or "mood: a map makes the log loss higher" in found.stdout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answers": {"where": "west"}}, "answers.where: one of north, south, east is expected, not 'west'"),
        ({"answers": {"so": 1}}, "answers.so: true or false is expected, not 1"),
        ({"answers": {"good": 3}}, "answers.good: a level from 0 to 2 is expected, not 3"),
        ({"answers": {"good": True}}, "answers.good: a level from 0 to 2 is expected, not True"),
        ({"answers": {"else": 1}}, "answers.else: there is no question of this name; there are: where, so, good"),
        ({"answers": {}}, "answers: is empty"),
        ({"answers": []}, "answers: is empty"),
        ({"answers": [1]}, "answers: an object is expected, not [1]"),
        ({"label": 1}, "'label': is not a known field; there are: state, instructions, questions, answers"),
        ({"state": ""}, "state: is required"),
        (
            {"questions": {"where": {"type": "essay"}}, "answers": {"where": 1}},
            'questions.where.type: "essay" is not supported',
        ),
    ],
)
def test_errors_of_rows_name_the_line_and_the_field(
    fields: Mapping[str, Any], message: str, tiny_generator: Path, tmp_path: Path
) -> None:
    found = polyhead(tiny_generator, write_rows(tmp_path / "rows.jsonl", 1, **fields))
    assert found.exit_code == 1
    assert "rows.jsonl, line 1: " in found.stderr
    assert message in found.stderr
    assert "Traceback" not in found.output


def test_what_cannot_be_done_is_said_before_the_model_is_loaded(rows: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["org/name", rows], "--output: the model has no folder of its own here"),
        ([tmp_path, rows, "--output", tmp_path / "no" / "f.json"], "--output: there is no folder"),
        ([tmp_path, rows, "--precision", "2"], "--precision: a share above 0 and up to 1"),
        ([tmp_path, rows, "--plot", tmp_path / "out.jpeg"], "--plot: "),
        ([tmp_path, tmp_path / "none.jsonl"], "none.jsonl cannot be read"),
        ([tmp_path, rows, "--questions", tmp_path / "none.yaml"], "--questions: "),
    ):
        found = polyhead(*arguments)
        assert found.exit_code == 1, found.output
        assert message in found.stderr


def test_too_few_rows_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    found = polyhead(tmp_path, write_rows(tmp_path / "rows.jsonl", 4), "--output", tmp_path / "out.json")
    assert found.exit_code == 1
    assert "choice: 2 answers in a half are too few, at least 20 are needed" in found.stderr
    assert not (tmp_path / "out.json").exists()
