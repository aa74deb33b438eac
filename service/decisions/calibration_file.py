"""The file of a calibration: JSON, strictly checked, since it may come with a stranger's model.

It names the weights, by a fingerprint, and the precision that the answers were computed with: for others its maps are
wrong.
"""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polyhead.models.core.errors import CheckpointError, ModelError, show_value
from polyhead.models.core.files import replace_file
from polyhead.models.core.json_files import SMALL_JSON, JsonLimit, count_values, parse_json, read_json_bytes

from ..core.calibration import (
    CONFIDENCE_BINS,
    Calibration,
    CalibrationMap,
    CalibrationMethod,
    Reliability,
    ReliabilityBin,
)
from .question import QuestionKind

FILE_NAME = "polyhead_calibration.json"  # in the folder of a checkpoint
FILE_SUFFIX = ".calibration.json"  # after the name of a GGUF file
MAX_MAPS = 1000  # maps of a file
CALIBRATION_JSON = JsonLimit(32 << 20, 1 << 20)  # 1000 isotonic maps of 256 knots have 17 MB and 682,006 values
RELIABILITY_BINS = 15  # bins of a reliability diagram, each with as many answers
MIN_KNOTS, MAX_KNOTS = 2, 256  # knots of an isotonic map
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_SLOPE, MAX_INTERCEPT = 100.0, 1000.0
MAX_BIAS, MAX_BIASES = 50.0, 255  # of one option; options of a question
MIN_SHARE = 1e-6  # the least probability at a knot
SUM_TOLERANCE = 1e-6  # of shares that sum to 1

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]


class FileObject(BaseModel):
    """An object of the file: no other fields, no conversions, only finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, value: object) -> object:
        """Refuses at the first unknown field: an error for each of a million would take seconds and a gigabyte."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    known = ", ".join(cls.model_fields)
                    raise ValueError(f"{show_value(name)} is not a known field; there are: {known}")
        return value


class Temperature(FileObject):
    """Log-probabilities are divided by it."""

    method: Literal["temperature"] = "temperature"
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]

    @property
    def parameters(self) -> tuple[float, ...]:
        return (self.temperature,)


class Platt(FileObject):
    """A logistic function of the logit."""

    method: Literal["platt"] = "platt"
    slope: Annotated[float, Field(gt=0, le=MAX_SLOPE)]
    intercept: Annotated[float, Field(ge=-MAX_INTERCEPT, le=MAX_INTERCEPT)]

    @property
    def parameters(self) -> tuple[float, ...]:
        return self.slope, self.intercept


class Isotonic(FileObject):
    """A piecewise linear function through the points (x, y), which increases from x = 0 to x = 1."""

    method: Literal["isotonic"] = "isotonic"
    x: Annotated[list[Share], Field(min_length=MIN_KNOTS, max_length=MAX_KNOTS)]
    y: Annotated[
        list[Annotated[float, Field(ge=MIN_SHARE, le=1 - MIN_SHARE)]],
        Field(min_length=MIN_KNOTS, max_length=MAX_KNOTS),
    ]

    @property
    def parameters(self) -> tuple[float, ...]:
        return *self.x, *self.y

    @model_validator(mode="after")
    def check_knots(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"x has {len(self.x)} knots and y {len(self.y)}; they must be as many")
        if self.x[0] != 0 or self.x[-1] != 1:
            raise ValueError("x must begin with 0 and end with 1")
        if any(left >= right for values in (self.x, self.y) for left, right in pairwise(values)):
            raise ValueError("x and y must increase from knot to knot")
        return self


class Bias(FileObject):
    """Log-probabilities are divided by a temperature, and each option of the question has an addend."""

    method: Literal["bias"] = "bias"
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
    biases: Annotated[
        list[Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], Field(min_length=2, max_length=MAX_BIASES)
    ]

    @property
    def parameters(self) -> tuple[float, ...]:
        return self.temperature, *self.biases


class FileBin(FileObject):
    """Answers of similar confidence: their mean confidence, and the share of them that is right."""

    confidence: Share
    accuracy: Share
    answers: Annotated[int, Field(ge=1, le=1 << 40)]


class Measures(FileObject):
    """Of labelled answers. `brier` is summed over the options of an answer, `log_loss` in nats."""

    accuracy: Share
    brier: Annotated[float, Field(ge=0, le=2)]
    ece: Share
    log_loss: Annotated[float, Field(ge=0)]
    bins: Annotated[list[FileBin], Field(max_length=RELIABILITY_BINS)] = []

    @model_validator(mode="after")
    def check_order(self) -> Self:
        if any(left.confidence > right.confidence for left, right in pairwise(self.bins)):
            raise ValueError("bins must have increasing confidences")
        return self

    def as_reliability(self) -> Reliability:
        bins = tuple(ReliabilityBin(each.confidence, each.accuracy, each.answers) for each in self.bins)
        return Reliability(self.accuracy, self.brier, self.ece, self.log_loss, bins)


class Threshold(FileObject):
    """The answers whose confidence is at least `confidence` are a `share` of all, and `right` of them are right."""

    precision: Share  # that was asked for
    confidence: Share
    share: Share
    right: Share


class AskedQuestion(FileObject):
    """The question that a map is for. The digest identifies it (`digest_question`), the name is for people."""

    name: Annotated[str, Field(max_length=256)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class FileMap(FileObject):
    """A map with what it was fitted and measured on."""

    kind: Literal["predicate", "choice", "score"]
    question: AskedQuestion | None = None  # none: all questions of the kind
    map: Annotated[Temperature | Platt | Isotonic | Bias, Field(discriminator="method")]
    fitted_answers: Count
    held_out_answers: Count
    before: Measures
    after: Measures
    confidences: Annotated[list[Share], Field(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)]
    thresholds: Annotated[list[Threshold], Field(max_length=100)] = []

    @model_validator(mode="after")
    def check_sums(self) -> Self:
        if abs(sum(self.confidences) - 1) > SUM_TOLERANCE:
            raise ValueError("confidences must sum to 1")
        for title, measures in (("before", self.before), ("after", self.after)):
            if measures.bins and sum(each.answers for each in measures.bins) != self.held_out_answers:
                raise ValueError(f"{title}.bins must have as many answers as held_out_answers, {self.held_out_answers}")
        if self.kind == "score" and self.map.method != "temperature":
            raise ValueError(f"levels of a score are calibrated by a temperature, not by the method {self.map.method}")
        if self.map.method == "bias" and (self.question is None or self.kind != "choice"):
            raise ValueError("biases are those of the options of one question, a choice")
        return self


class CalibrationFile(FileObject):
    """The whole file."""

    format: Literal["polyhead-calibration"] = "polyhead-calibration"
    version: Literal[1] = 1  # raised when the fields change, or what a model reads for a question
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    precision: Annotated[str, Field(min_length=1, max_length=32)]
    maps: Annotated[list[FileMap], Field(max_length=MAX_MAPS)]

    @model_validator(mode="after")
    def check_targets(self) -> Self:
        targets = {(each.kind, each.question.digest if each.question else "") for each in self.maps}
        if len(targets) < len(self.maps):
            raise ValueError("two maps are for the same question, or for the same kind of question")
        return self

    def as_calibration(self) -> Calibration:
        """The maps alone, each with a name that tells whose it is, its method and which fit."""
        return Calibration(
            tuple(
                CalibrationMap(
                    name=f"{name_target(each.kind, each.question)}:{each.map.method}:{self._version_of(each)}",
                    kind=each.kind,
                    question=each.question.digest if each.question else "",
                    question_name=each.question.name if each.question else "",
                    method=each.map.method,
                    parameters=each.map.parameters,
                    confidences=tuple(each.confidences),
                    fitted_answers=each.fitted_answers,
                    held_out_answers=each.held_out_answers,
                    before=each.before.as_reliability(),
                    after=each.after.as_reliability(),
                )
                for each in self.maps
            )
        )

    def _version_of(self, each: FileMap) -> str:
        """A few digits that differ between the fits of a map, and between questions of the same name."""
        fit = self.weights, each.question.digest if each.question else "", each.map.parameters
        return hashlib.blake2b(repr(fit).encode(), digest_size=4).hexdigest()


def name_target(kind: QuestionKind, question: AskedQuestion | None) -> str:
    return question.name if question and question.name else kind


def read_calibration_file(path: Path) -> CalibrationFile:
    """Read a file. Raises CheckpointError, which names the file and the field, and FileNotFoundError."""
    try:
        raw = read_json_bytes(path, CALIBRATION_JSON)
        if len(raw) <= SMALL_JSON.bytes and count_values(raw) <= SMALL_JSON.values:
            return CalibrationFile.model_validate_json(raw)
        return CalibrationFile.model_validate(parse_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        shown = (
            "" if first["type"] in ("value_error", "json_invalid", "missing") else f", got {show_value(first['input'])}"
        )
        raise CheckpointError(f"{field}: {message}{shown}" if field else f"{message}{shown}", file=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is no valid JSON: {error}", file=str(path)) from None


def write_calibration_file(path: Path, content: CalibrationFile) -> None:
    """Write a file whole or not at all. Raises ModelError if it cannot be written, or not be read again."""
    raw = f"{content.model_dump_json(indent=1)}\n".encode()
    size, most = (len(raw), count_values(raw)), (CALIBRATION_JSON.bytes, CALIBRATION_JSON.values)
    if size[0] > most[0] or size[1] > most[1]:
        message = "the calibration has {} bytes and {} values; at most are {} bytes and {} values"
        raise ModelError(f"{message.format(*size, *most)}: calibrate fewer questions")
    try:
        replace_file(path, raw)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}; name another file with --output") from None


def calibration_path(source: Path) -> Path:
    """Where the calibration of a checkpoint lies: in its folder, or beside its file."""
    return source / FILE_NAME if source.is_dir() else source.with_name(source.name + FILE_SUFFIX)


CALIBRATION_METHODS: tuple[CalibrationMethod, ...] = get_args(CalibrationMethod)
