"""Files of calibrations: written and read unchanged; hostile ones are refused with the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polyhead.models.core.errors import CheckpointError, ModelError
from polyhead.models.core.json_files import JsonLimit
from polyhead.service.decisions import calibration_file
from polyhead.service.decisions.calibration_file import (
    MAX_MAPS,
    CalibrationFile,
    calibration_path,
    read_calibration_file,
    write_calibration_file,
)
from tests.support.calibrations import HIGH_BINS, LOW_BIN, MEASURES, one_map, whole

BIASES = {"method": "bias", "temperature": 1.5, "biases": [-1.0, 0.0, 1.0]}
ASKED = {"name": "q", "digest": "0" * 32}
KNOTS = {"method": "isotonic", "x": [0, 0.5, 1], "y": [0.1, 0.2, 0.9]}


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    asked = {"name": "refund?", "digest": "a" * 32}
    maps = (one_map(), one_map(kind="predicate", map=KNOTS), one_map(question=asked, map=KNOTS))
    content = CalibrationFile.model_validate(whole(*maps, one_map(question=ASKED, map=BIASES)))
    write_calibration_file(tmp_path / "c.json", content)
    assert read_calibration_file(tmp_path / "c.json") == content
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    first, second, third, fourth = content.as_calibration().maps
    assert first.parameters == (1.5,)
    assert [(each.confidence, each.accuracy, each.answers) for each in first.after.bins] == [
        (0.5, 0.5, 20),
        (0.62, 0.6, 30),
    ]
    assert second.parameters == (0, 0.5, 1, 0.1, 0.2, 0.9)
    assert (fourth.method, fourth.parameters) == ("bias", (1.5, -1.0, 0.0, 1.0))
    assert (third.question, third.question_name) == ("a" * 32, "refund?")
    assert [each.name.rpartition(":")[0] for each in (first, second, third)] == [
        "choice:temperature",
        "predicate:isotonic",
        "refund?:isotonic",
    ]


def test_a_file_of_as_many_maps_as_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knots = {"method": "isotonic", "x": [i / 255 for i in range(256)], "y": [0.001 + i / 300 for i in range(256)]}
    asked = [{"name": "q", "digest": f"{number:032x}"} for number in range(MAX_MAPS)]
    maps = [one_map(kind="predicate", map=knots, question=question) for question in asked]
    content = CalibrationFile.model_validate(whole(*maps))
    write_calibration_file(tmp_path / "c.json", content)
    assert read_calibration_file(tmp_path / "c.json") == content
    monkeypatch.setattr(calibration_file, "CALIBRATION_JSON", JsonLimit(1 << 25, 1000))
    with pytest.raises(ModelError, match=r"at most .* 1000 values: calibrate fewer questions"):
        write_calibration_file(tmp_path / "d.json", content)
    assert not (tmp_path / "d.json").exists()


def test_another_fit_has_another_name() -> None:
    def name(**changes: Any) -> str:
        content = CalibrationFile.model_validate(
            whole(one_map(map={"method": "temperature", "temperature": 2} | changes))
        )
        return content.as_calibration().maps[0].name

    assert name() == name() != name(temperature=2.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (whole(version=2), "version"),
        (whole(more=1), "more"),
        (whole(weights="x"), "weights"),
        (whole(precision=""), "precision"),
        (whole(one_map(kind="essay")), r"maps\.0\.kind"),
        (whole(one_map(), one_map()), "two maps are for the same"),
        (whole(*[one_map(question={"name": "", "digest": f"{n:032x}"}) for n in range(MAX_MAPS + 1)]), "at most 1000"),
        (whole(one_map(question={"name": "x" * 257, "digest": "0" * 32})), r"question\.name"),
        (whole(one_map(map={"method": "temperature", "temperature": 0})), "temperature"),
        (whole(one_map(map={"method": "temperature", "temperature": 1e400})), "finite"),
        (whole(one_map(map={"method": "temperature", "temperature": "2"})), "valid number"),
        (whole(one_map(map={"method": "temperature", "temperature": True})), "valid number"),
        (whole(one_map(map={"method": "platt", "slope": -1, "intercept": 0})), "slope"),
        (whole(one_map(map={"method": "platt", "slope": 1, "intercept": 2000})), "intercept"),
        (whole(one_map(map={"method": "magic"})), "magic"),
        (whole(one_map(map=BIASES)), "options of one question"),
        (whole(one_map(map=BIASES, kind="predicate", question=ASKED)), "options of one question"),
        (whole(one_map(map=BIASES | {"biases": [0.0] * 256}, question=ASKED)), "at most 255"),
        (whole(one_map(map=BIASES | {"biases": [0.0, 1e9]}, question=ASKED)), "biases"),
        (whole(one_map(map=KNOTS | {"x": [0, 1]})), "x has 2 knots and y 3"),
        (whole(one_map(map=KNOTS | {"x": [0, 0, 1]})), "must increase"),
        (whole(one_map(map=KNOTS | {"y": [0.9, 0.2, 0.1]})), "must increase"),
        (whole(one_map(map=KNOTS | {"x": [0.1, 0.5, 1]})), "begin with 0"),
        (whole(one_map(map=KNOTS | {"y": [0, 0.2, 0.9]})), r"y\.0"),
        (whole(one_map(map=KNOTS | {"x": [i / 999 for i in range(1000)]})), "at most 256"),
        (whole(one_map(kind="score", map=KNOTS)), "calibrated by a temperature"),
        (whole(one_map(confidences=[0.2] * 10)), "sum to 1"),
        (whole(one_map(confidences=[1.0])), "at least 10"),
        (whole(one_map(before=MEASURES | {"ece": float("nan")})), "ece"),
        (whole(one_map(after=MEASURES | {"bins": [LOW_BIN | {"answers": 0}]})), r"after\.bins\.0\.answers"),
        (whole(one_map(after=MEASURES | {"bins": [LOW_BIN | {"accuracy": 1.5}]})), r"after\.bins\.0\.accuracy"),
        (whole(one_map(after=MEASURES | {"bins": HIGH_BINS[::-1]})), "bins must have increasing confidences"),
        (whole(one_map(before=MEASURES | {"bins": [LOW_BIN]})), "before.bins must have as many answers as held_out"),
        (whole(one_map(before=MEASURES | {"bins": [LOW_BIN] * 16})), "at most 15"),
    ],
)
def test_hostile_files_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=message) as refused:
        read_calibration_file(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 1500


def test_long_files_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_calibration_file(tmp_path / "missing.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_calibration_file(tmp_path)
    (tmp_path / "long.json").write_bytes(b" " * (33 << 20))
    with pytest.raises(CheckpointError, match="longer than 32 MiB"):
        read_calibration_file(tmp_path / "long.json")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="link that leads out"):
        read_calibration_file(tmp_path / "link.json")


def test_unknown_fields_are_refused_at_the_first() -> None:
    """Each error of pydantic takes about a kilobyte: those of a million fields took a gigabyte."""
    many = dict.fromkeys(map(str, range(5000)), 0)
    for content in (whole(**many), whole(one_map(**many))):
        with pytest.raises(ValidationError, match="'0' is not a known field; there are: ") as refused:
            CalibrationFile.model_validate(content)
        assert refused.value.error_count() == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/c\.json cannot be written: .*--output"):
        write_calibration_file(tmp_path / "nowhere" / "c.json", CalibrationFile.model_validate(whole()))


@pytest.mark.parametrize("exists", [True, False])
def test_links_in_the_folder_are_not_written_through(exists: bool, tmp_path: Path) -> None:
    """The folder may be a stranger's: a link of any name that could be foreseen leads to a file of the user."""
    path, outside = calibration_path(tmp_path), tmp_path.with_name(f"{tmp_path.name}-outside")
    if exists:
        outside.write_text("kept")
    for name in (path.name, f".{path.name}.part", path.with_suffix(".new").name):
        (tmp_path / name).symlink_to(outside)
    write_calibration_file(path, CalibrationFile.model_validate(whole()))
    assert outside.exists() == exists
    assert not exists or outside.read_text() == "kept"
    assert read_calibration_file(path) == CalibrationFile.model_validate(whole())


def test_a_calibration_lies_in_the_folder_or_beside_the_file(tmp_path: Path) -> None:
    assert calibration_path(tmp_path) == tmp_path / "polyhead_calibration.json"
    assert calibration_path(tmp_path / "m.gguf") == tmp_path / "m.gguf.calibration.json"
