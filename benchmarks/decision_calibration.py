"""Measure calibrations of decisions on labelled texts, each method by itself.

A part of benchmarks.decisions (`--figures accuracy`). Texts are split into halves, and maps are fitted, as
`polyhead calibrate` does it. Each half is calibrated by the map of the other one, so all texts are held out: the
calibration error by chance is smaller than that of a half. Rows `auto` are the map that the command would choose with
`--by question`:

| map | parameters |
|---|---|
| none | |
| temperature | one for all options |
| platt, isotonic | a function of one option's probability, the same for each option |
| bias | a temperature, and an addend to the logarithm of each option of a choice (Alexandari et al. 2020) |

Only the last one can take away a model's preference for an option, where there are more than two.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.decision_sets import LabelledSet
from polyhead.service.core.calibration import CalibrationMethod
from polyhead.service.decisions.calibration import Table
from polyhead.service.decisions.calibration_fit import (
    FITS,
    MIN_ANSWERS,
    LabelledAnswers,
    allowed_methods,
    apply_fit,
    fit_answers,
    split_texts,
)
from polyhead.service.decisions.calibration_measures import chance_error, judge_answers, measure_answers
from polyhead.service.decisions.question import OptionScores, QuestionKind

Row = dict[str, Any]
Fitting = Callable[[LabelledAnswers], Table]  # the calibrated probabilities of the answers that are held out
KINDS: dict[str, QuestionKind] = {"noul": "predicate", "choice": "choice", "score": "score"}


def compare_maps(labelled: LabelledSet, found: Sequence[OptionScores]) -> Iterator[Row]:
    """A row for each map; none if there are too few texts."""
    kind = KINDS[labelled.question["type"]]
    held_out = split_texts([each.text for each in labelled.examples])
    if min(held_out.sum(), (~held_out).sum()) < MIN_ANSWERS:
        return
    answers = LabelledAnswers(
        kind,
        np.array([each.probabilities for each in found]),
        np.array([each.answer for each in labelled.examples], np.int64),
        held_out,
    )
    chosen = dict.fromkeys(choose_map(each)[0] for each in halves(answers))
    fittings: dict[str, Fitting] = {
        "none": lambda it: it.part(held_out=True)[0],
        **{method: partial(apply_method, method) for method in allowed_methods(kind, of_one_question=True)},
        f"auto: {', '.join(chosen)}": lambda it: choose_map(it)[1],
    }
    for title, fitting in fittings.items():
        yield {"map": title, "held out": len(found), **measure_halves(answers, fitting)}


def halves(answers: LabelledAnswers) -> Sequence[LabelledAnswers]:
    """The answers with one half held out, then with the other."""
    return answers, replace(answers, held_out=~answers.held_out)


def measure_halves(answers: LabelledAnswers, fitting: Fitting) -> Row:
    shares = np.empty_like(answers.shares)
    for each in halves(answers):
        shares[each.held_out] = fitting(each)
    confidences, _ = judge_answers(shares, answers.labels)
    return measure_answers(shares, answers.labels).model_dump() | {"ece by chance": chance_error(confidences)}


def apply_method(method: CalibrationMethod, answers: LabelledAnswers) -> Table:
    fitted = FITS[method](answers.kind, *answers.part(held_out=False))
    return apply_fit(answers.kind, fitted, answers.part(held_out=True)[0])


def choose_map(answers: LabelledAnswers) -> tuple[str, Table]:
    """The method that `polyhead calibrate` chooses, and what it makes of the answers that are held out."""
    fit = fit_answers(answers, None, allowed_methods(answers.kind, of_one_question=True))
    name = fit.map.method if fit.map else "none"
    return name, apply_fit(answers.kind, fit.map, answers.part(held_out=True)[0])
