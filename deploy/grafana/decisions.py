"""The row of panels about questions about texts: how many, how many were refused, and how certain the answers are.

Of confidence and label mass the low percentiles are shown: these are the answers that should not be trusted.
"""

from panel import ASKED, Panel, per_second, percentiles

QUESTIONS = "polyhead_decision_questions_total"
LOW = (10, 50)

DECISIONS: list[Panel] = [
    Panel(
        "Questions",
        "reqps",
        "Questions about texts by their kind: yes or no (predicate), choice, score.",
        [(per_second(QUESTIONS, "model, question", ASKED), "{{model}} {{question}}")],
        stacked=True,
        width=6,
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
        width=6,
    ),
    Panel(
        "Confidence",
        "percentunit",
        "The probability of the chosen option; one answer in ten is below p10.",
        percentiles("polyhead_decision_confidence_ratio", LOW, "model, question", ASKED),
        width=6,
    ),
    Panel(
        "Label mass",
        "percentunit",
        "The probability of all options together.  Where it is low, the likeliest answers are none of the options.",
        percentiles("polyhead_decision_label_mass_ratio", LOW, "model, question", ASKED),
        width=6,
    ),
]
