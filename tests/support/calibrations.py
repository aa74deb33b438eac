"""Files of calibrations for checkpoints."""

from pathlib import Path
from typing import Any

from polyhead.models import checkpoint
from polyhead.service.config.settings import Settings
from polyhead.service.core.calibration import CalibrationMap
from polyhead.service.decisions.calibration_file import CalibrationFile, write_calibration_file
from polyhead.service.runtime.calibration_choice import identify_weights

MEASURES = {"accuracy": 0.7, "brier": 0.4, "ece": 0.1, "log_loss": 0.9}
LOW_BIN = {"confidence": 0.5, "accuracy": 0.5, "answers": 20}
HIGH_BINS = [LOW_BIN, {"confidence": 0.9, "accuracy": 0.6, "answers": 30}]


def one_map(**changes: Any) -> dict[str, Any]:
    """A map as the file has it."""
    return {
        "kind": "choice",
        "question": None,
        "map": {"method": "temperature", "temperature": 1.5},
        "fitted_answers": 50,
        "held_out_answers": 50,
        "before": MEASURES | {"bins": HIGH_BINS},
        "after": MEASURES | {"bins": [LOW_BIN, HIGH_BINS[1] | {"confidence": 0.62}]},
        "confidences": [0.1] * 10,
        "thresholds": [{"precision": 0.9, "confidence": 0.8, "share": 0.5, "right": 0.91}],
    } | changes


def whole(*maps: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The content of a file."""
    known = {"format": "polyhead-calibration", "version": 1, "weights": "0" * 64, "precision": "float32"}
    return known | {"maps": list(maps)} | changes


def served_map(**changes: Any) -> CalibrationMap:
    """A map as it is applied."""
    [applied] = CalibrationFile.model_validate(whole(one_map(**changes))).as_calibration().maps
    return applied


def write_calibration(path: Path, source: object, *maps: dict[str, Any], precision: str = "float32") -> Path:
    """Write a file with these maps, or one, for the weights of a checkpoint."""
    settings = Settings(model_dir=path.parent / "kept")  # hashes of weights
    weights = identify_weights(checkpoint.describe_source(str(source)), settings, lambda: None)
    content = whole(*(maps or (one_map(),)), weights=weights, precision=precision)
    write_calibration_file(path, CalibrationFile.model_validate(content))
    return path
