"""The row of panels about questions about texts: how many, how many were refused, how certain the answers are, and
whether their calibration is still right.

Of confidence and label mass the low percentiles are shown: these are the answers that should not be trusted.
"""

from panel import ASKED, Panel, largest, per_second, percentiles

QUESTIONS = "polyhead_decision_questions_total"
LOW = (10, 50)
LARGE_DRIFT = 0.25  # as in the alert PolyheadConfidenceDrift

DECISIONS: list[Panel] = [
    Panel(
        "Questions",
        "reqps",
        "Questions about texts by their kind: yes or no (predicate), choice, score.",
        [(per_second(QUESTIONS, "model, question", ASKED), "{{model}} {{question}}")],
        stacked=True,
        width=8,
    ),
    Panel(
        "Refused questions",
        "percentunit",
        "Share of questions whose answer is less certain than the request's min_confidence.",
        [
            (
                per_second(QUESTIONS, "model, question", f'{ASKED},outcome="refused"')
                + f" / {per_second(QUESTIONS, 'model, question', ASKED)}",
                "{{model}} {{question}}",
            )
        ],
        width=8,
    ),
    Panel(
        "Confidence",
        "percentunit",
        "The probability of the chosen option; one answer in ten is below p10.",
        percentiles("polyhead_decision_confidence_ratio", LOW, "model, question", ASKED),
        width=8,
    ),
    Panel(
        "Label mass",
        "percentunit",
        "The probability of all options together.  Where it is low, the likeliest answers are none of the options.",
        percentiles("polyhead_decision_label_mass_ratio", LOW, "model, question", ASKED),
        width=12,
    ),
    Panel(
        "Drift of confidence",
        "none",
        "How far confidences of calibrated answers are from those that the calibration was fitted for (population "
        "stability index).  Below 0.1 there is none, above 0.25 calibrate again.",
        [(largest("polyhead_decision_confidence_drift_ratio", "model, question", ASKED), "{{model}} {{question}}")],
        width=12,
        red=LARGE_DRIFT,
    ),
]
