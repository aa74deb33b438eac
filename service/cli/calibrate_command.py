"""`polyhead calibrate`: fits the calibration of a model's decisions on labelled rows.

The questions are asked as clients ask them, of the model as it would be served, in this process or by a server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray

from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANY_SOURCE
from polyhead.models.core.errors import ModelError

from ..config.settings import Settings, read_settings
from ..core.calibration import CalibrationMethod
from ..decisions.calibration import digest_question
from ..decisions.calibration_file import (
    MAX_MAPS,
    AskedQuestion,
    CalibrationFile,
    FileMap,
    name_target,
    write_calibration_file,
)
from ..decisions.calibration_fit import (
    HAS_SKLEARN,
    MIN_ANSWERS,
    Fit,
    LabelledAnswers,
    allowed_methods,
    fit_answers,
    split_texts,
)
from ..decisions.question import Question, QuestionKind
from ..runtime import quickstart
from ..runtime.calibration_choice import NONE, find_neighbour, identify_weights
from ..runtime.placement import choose_placement
from ..runtime.self_test import apply_known_cost
from . import calibration_report as report
from . import plotting as canvas
from .checkpoint_source import describe_checked
from .client import error_message, expected_form
from .decision_client import read_pause
from .labelled_files import MAX_LISTED
from .labelled_questions import LabelledState, read_labelled_states
from .local_server import OPEN_SETTINGS, serve_locally, silence_logs
from .remote_server import connect_server

NAME = "model"  # of the model in this process
ASKED_AT_ONCE = 16  # rows
MAX_ATTEMPTS = 100  # of a row that a busy server does not take
OVERLOADED = 429
LOCAL_SETTINGS: Mapping[str, Any] = {
    **OPEN_SETTINGS,
    "max_requests": 256,
    "max_tokens_in_flight": 1 << 40,
    "explain": False,
    "drafts": {},
    "weights": {},
    "pools": {},
    "replicas": "1",
    "calibrations": {NAME: NONE},
}
INSTALL = "pip install 'polyhead[calibrate]'"

ProgressCallback = Callable[[str, int, int], None]
Grouping = Literal["type", "question"]


@dataclass(frozen=True)
class CalibrateArguments:
    """The arguments of `polyhead calibrate`. `url` "": the model is loaded in this process; else `name` is what the
    server calls it.
    """

    model: str
    rows: Path
    questions: Path | None
    method: CalibrationMethod | Literal["auto"]
    grouping: Grouping
    precisions: Sequence[float]
    output: Path | None
    url: str
    name: str
    key: str
    plot: Path | None
    as_json: bool


@dataclass(frozen=True)
class LabelledQuestions:
    """The questions of all rows, the numbers of their right options, and whether their texts are held out."""

    questions: Sequence[Question]
    labels: NDArray[np.int64]
    held_out: NDArray[np.bool_]


@dataclass(frozen=True)
class QuestionGroup:
    """Questions that get one map, by their numbers among all; `asked` is the question if there is only one."""

    kind: QuestionKind
    asked: AskedQuestion | None
    numbers: Sequence[int]


def calibrate_model(
    arguments: CalibrateArguments, print_text: Callable[[str], object], report_progress: ProgressCallback
) -> None:
    """Write the file and print the report. Raises ModelError if it cannot be done, SettingsError if settings are
    wrong.
    """
    check_arguments(arguments)
    defaults = read_settings({})
    source = quickstart.resolve_source(arguments.model, defaults.model_dir)
    path = find_output(source, arguments.output)
    states = read_labelled_states(arguments.rows, arguments.questions)
    labelled = collect_questions(states)
    groups, notes = group_questions(labelled, arguments)
    with silence_logs():
        settings = defaults if arguments.url else read_settings({**LOCAL_SETTINGS, "models": {NAME: source}})
        shares, precision = asyncio.run(ask_all(arguments, settings, states, report_progress))
        description = apply_known_cost(describe_checked(source), settings)
        precision = precision or choose_precision(settings, description)
        fits = [fit_group(group, labelled, shares, arguments) for group in groups]
        weights = identify_weights(description, settings, lambda: None)
    maps = [fit.as_file_map(arguments.precisions) for fit in fits]
    used = [each for each in maps if each is not None]
    write_calibration_file(path, CalibrationFile(weights=weights, precision=precision, maps=used))
    if arguments.plot:
        canvas.save_figure(report.draw_fits(fits), arguments.plot)
    print_text(format_result(fits, maps, [*notes, describe_output(path, used, arguments.url)], arguments))


def format_result(
    fits: Sequence[Fit], maps: Sequence[FileMap | None], notes: Sequence[str], arguments: CalibrateArguments
) -> str:
    if arguments.as_json:
        return json.dumps({"fits": report.fits_as_json(fits, maps), "notes": notes}, ensure_ascii=False)
    return "\n".join([report.format_fits(fits, arguments.precisions), "", *notes])


def describe_output(path: Path, used: Sequence[FileMap], url: str) -> str:
    where = f"wrote {path}"
    if not used:
        return f"{where}: it has no map, so answers are served as they are"
    return f"{where}; {'load the model again' if url else 'polyhead serve'} applies it"


def check_arguments(arguments: CalibrateArguments) -> None:
    """Raise ModelError for what can be known before the model is asked."""
    if arguments.method == "bias" and arguments.grouping != "question":
        raise ModelError("--method: bias is for the options of one question; add --by question")
    if arguments.method in ("platt", "isotonic", "bias") and not HAS_SKLEARN:
        raise ModelError(f"--method: {arguments.method} needs an extra: {INSTALL}")
    for precision in arguments.precisions:
        if not 0 < precision <= 1:
            raise ModelError(f"--precision: a share above 0 and up to 1 is expected, as in 0.99, not {precision:g}")
    if arguments.plot:
        canvas.check_plot_path(arguments.plot)


def find_output(source: str, output: Path | None) -> Path:
    """The file to write. Raises ModelError if its folder does not exist."""
    path = output or find_neighbour(source, ANY_SOURCE)
    if path is None:
        raise ModelError("--output: the model has no folder of its own here; name the file, and give it to serve")
    if not path.absolute().parent.is_dir():
        raise ModelError(f"--output: there is no folder {path.absolute().parent} to write to")
    return path


def choose_precision(settings: Settings, description: Description) -> str:
    """The precision in which serve would compute a model with these settings."""
    return choose_placement(settings, description.default_precision, description.decoder_config).precision


async def ask_all(
    arguments: CalibrateArguments,
    settings: Settings,
    states: Sequence[LabelledState],
    report_progress: ProgressCallback,
) -> tuple[list[Sequence[float]], str]:
    """The probabilities of all questions' options, and the precision of the model if it is known."""
    async with connect(arguments, settings) as (client, precision):
        return await ask_rows(client, arguments.name, states, report_progress), precision


@asynccontextmanager
async def connect(arguments: CalibrateArguments, settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client of the server, or of the model in this process with its precision."""
    if not arguments.url:
        async with serve_locally(settings) as ([model, *_], client):
            yield client, model.dtype
        return
    async with connect_server(arguments.url, arguments.key) as client:
        yield client, ""


async def ask_rows(
    client: httpx.AsyncClient, name: str, states: Sequence[LabelledState], report_progress: ProgressCallback
) -> list[Sequence[float]]:
    """Ask ASKED_AT_ONCE rows at a time, and return all in their order. The first error ends all."""
    answers: dict[int, list[Sequence[float]]] = {}
    waiting = iter(enumerate(states))
    done = count(1)

    async def work() -> None:
        for number, state in waiting:
            answers[number] = await ask_row(client, name, state)
            report_progress("rows", next(done), len(states))

    tasks = [asyncio.create_task(work()) for _ in range(min(ASKED_AT_ONCE, len(states)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [shares for number in range(len(states)) for shares in answers[number]]


async def ask_row(client: httpx.AsyncClient, name: str, state: LabelledState) -> list[Sequence[float]]:
    """The probabilities of the options of each question of a row. Raises ModelError, which names the line."""
    body = {**state.body, **({"model": name} if name else {})}
    for _ in range(MAX_ATTEMPTS):
        response = await client.post("/v1/systemone", json=body)
        if response.status_code != OVERLOADED:
            break
        pause = read_pause(response.headers.get("Retry-After", ""))
        await asyncio.sleep(1 if pause is None else pause)
    where = f"{state.row.file}, line {state.row.line}"
    if response.is_error:
        raise ModelError(f"{where}: {error_message(response)}")
    answers = list[Sequence[float]]()
    with expected_form(client.base_url):
        found = response.json()["answers"]
        for question, label in state.questions:
            given = found[question.name]
            if "calibration" in given:
                message = f"the server applies the calibration {given['calibration']} already"
                raise ModelError(f"{where}: {message}; start it with --calibrations MODEL={NONE}")
            answers.append([float(share) for share in given["probabilities"].values()])
            if label >= len(answers[-1]):
                raise ValueError(f"{question.name} has {len(answers[-1])} probabilities")
    return answers


def collect_questions(states: Sequence[LabelledState]) -> LabelledQuestions:
    """The questions in the order in which they are asked."""
    asked = [(question, label, state.text) for state in states for question, label in state.questions]
    return LabelledQuestions(
        [question for question, _, _ in asked],
        np.array([label for _, label, _ in asked], np.int64),
        split_texts([text for _, _, text in asked]),
    )


def group_questions(
    labelled: LabelledQuestions, arguments: CalibrateArguments
) -> tuple[list[QuestionGroup], list[str]]:
    """The groups that get a map each, and notes about those that have too few answers and get none.

    Raises ModelError if all of them have too few, or if there are too many groups.
    """
    numbers: dict[tuple[QuestionKind, str], list[int]] = {}
    for number, question in enumerate(labelled.questions):
        digest = digest_question(question) if arguments.grouping == "question" else ""
        numbers.setdefault((question.kind, digest), []).append(number)
    groups, notes = list[QuestionGroup](), list[str]()
    for (kind, digest), members in numbers.items():
        asked = AskedQuestion(name=labelled.questions[members[0]].name, digest=digest) if digest else None
        held_out = int(labelled.held_out[members].sum())
        fewest = min(held_out, len(members) - held_out)
        if fewest < MIN_ANSWERS:
            target = name_target(kind, asked)
            notes.append(f"{target}: {fewest} answers in a half are too few, at least {MIN_ANSWERS} are needed")
        else:
            groups.append(QuestionGroup(kind, asked, members))
    if not groups:
        raise ModelError("; ".join(notes[:MAX_LISTED]))
    if len(groups) > MAX_MAPS:
        raise ModelError(f"--by: there are {len(groups)} questions, at most {MAX_MAPS} can be calibrated one by one")
    if arguments.method == "auto" and not HAS_SKLEARN:
        notes.append(f"only temperatures were fitted; for platt and isotonic: {INSTALL}")
    return groups, notes


def fit_group(
    group: QuestionGroup,
    labelled: LabelledQuestions,
    shares: Sequence[Sequence[float]],
    arguments: CalibrateArguments,
) -> Fit:
    table = np.full((len(group.numbers), max(len(shares[number]) for number in group.numbers)), np.nan)
    for row, number in zip(table, group.numbers, strict=True):
        row[: len(shares[number])] = shares[number]
    members = [*group.numbers]
    answers = LabelledAnswers(group.kind, table, labelled.labels[members], labelled.held_out[members])
    return fit_answers(answers, group.asked, choose_methods(group, arguments))


def choose_methods(group: QuestionGroup, arguments: CalibrateArguments) -> Sequence[CalibrationMethod]:
    """The methods to try: the one that was asked for, where this group can have it."""
    allowed = allowed_methods(group.kind, of_one_question=group.asked is not None)
    return (arguments.method,) if arguments.method in allowed else allowed
