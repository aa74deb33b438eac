"""The calibration that a model is served with: beside it, named, of other weights, of an adapter."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.models import checkpoint
from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.core.calibration import NO_CALIBRATION, Calibration
from polyhead.service.core.model import LoadState
from polyhead.service.decisions.calibration_file import calibration_path
from polyhead.service.fleet.frames import pack_model, unpack_model
from polyhead.service.runtime.calibration_choice import identify_weights
from polyhead.service.runtime.registry import ModelRegistry
from tests.models.checkpoint.test_merged_adapter import adapted, classifier
from tests.service.runtime.test_registry import serving
from tests.support.calibrations import write_calibration

NAME = "choice:temperature:"


@pytest.fixture(autouse=True)
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of weights are kept there."""
    monkeypatch.setenv("POLYHEAD_MODEL_DIR", str(tmp_path / "kept"))


def loaded(models: Mapping[str, Any], **settings: Any) -> tuple[dict[str, Calibration], dict[str, LoadState]]:
    """The calibrations of models that could be loaded, and the states of all."""

    async def act(served: ModelRegistry) -> Any:
        await served.load_all()
        for model in served.models():  # as an ingress gets it
            data = pack_model(model)[1]
            assert unpack_model(data, model.created).calibration == model.calibration
        return {model.name: model.calibration for model in served.models()}, dict(served.states())

    found: tuple[dict[str, Calibration], dict[str, LoadState]] = serving(dict(models), act, **settings)
    return found


@pytest.fixture
def folder(tiny_classifier: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_classifier, tmp_path / "judge")
    return tmp_path / "judge"


def test_a_calibration_beside_the_model_or_named_is_applied(folder: Path, tmp_path: Path) -> None:
    beside = write_calibration(calibration_path(folder), folder)
    named = write_calibration(tmp_path / "named.json", folder)
    models = {"beside": folder, "named": folder, "none": folder}
    calibrations = {"named": str(named), "none": "none"}
    found, _ = loaded(models, calibrations=calibrations)
    assert found["none"] == NO_CALIBRATION
    assert found["beside"] == found["named"]
    [map] = found["beside"].maps
    assert map.name.startswith(NAME)
    assert map.parameters == (1.5,)
    beside.unlink()
    assert loaded({"beside": folder})[0]["beside"] == NO_CALIBRATION


def test_a_calibration_of_other_weights_is_ignored_beside_the_model_and_refused_by_name(
    folder: Path, tiny_ranker: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_calibration(calibration_path(folder), tiny_ranker)
    other = write_calibration(tmp_path / "other.json", folder, precision="int8")
    models = {"beside": folder, "weights": folder, "precision": folder, "missing": folder}
    named = {"weights": calibration_path(folder), "precision": other, "missing": tmp_path / "nowhere.json"}
    found, states = loaded(models, calibrations={name: str(path) for name, path in named.items()})
    assert found == {"beside": NO_CALIBRATION}
    assert "beside is served without a calibration" in caplog.text
    assert "for other weights than those of weights; run polyhead calibrate again" in states["weights"].reason
    assert "is for the precision int8, and precision is computed in float32" in states["precision"].reason
    assert "there is no such file of a calibration" in states["missing"].reason


def test_an_unreadable_file_beside_the_model_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibration_path(folder).write_text("{}")
    assert loaded({"judge": folder})[0]["judge"] == NO_CALIBRATION
    assert "polyhead_calibration.json: weights: Field required" in caplog.text


def test_an_adapter_has_a_calibration_of_its_own(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapted(classifier(folder), adapter, target_modules=["query"], task_type="SEQ_CLS")
    write_calibration(calibration_path(folder), folder)
    models = {"judge": folder, "judge:tone": adapter, "merged": f"{folder}+{adapter}"}
    found, states = loaded(models)
    assert [name for name, each in found.items() if each.maps] == ["judge"], states
    write_calibration(calibration_path(adapter), f"{folder}+{adapter}")
    found, _ = loaded(models)
    assert [name for name, each in found.items() if each.maps] == ["judge", "judge:tone", "merged"]


def test_the_identity_of_weights_includes_labels(tiny_classifier: Path) -> None:
    described = checkpoint.describe_source(str(tiny_classifier))
    renamed = replace(described, head=replace(described.head, labels=("a", "b", "c")))
    one, other = (identify_weights(each, Settings(), lambda: None) for each in (described, renamed))
    assert one != other


def test_only_served_models_have_calibrations(folder: Path) -> None:
    with pytest.raises(SettingsError, match="calibrations: no model is called 'x'; there are: judge"):
        loaded({"judge": folder}, calibrations={"x": "none"})
