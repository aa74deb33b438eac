"""Tasks of served models by the names of Hugging Face's pipelines, and the description of a model for clients."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, get_args

from ...core.model import Model
from ...core.request import ExplainMethod, Task
from ...decisions.encoder_reads import DECISION_TASKS
from ...explain.explain_request import TARGET_FIELDS
from .question_fields import QuestionMethod

TEXT_GENERATION = "text-generation"
ZERO_SHOT = "zero-shot-classification"
DECISIONS = "decisions"  # of no pipeline: POST /v1/decisions and /v1/systemone
# The tasks of encoder-decoders, and the field of their answers.
TEXT2TEXT_FIELDS: Mapping[str, str] = {
    "text2text-generation": "generated_text",
    "translation": "translation_text",
    "summarization": "summary_text",
}
TASK_HEADS: Mapping[str, tuple[Task, ...]] = {
    "text-classification": ("classify", "rank"),
    ZERO_SHOT: ("classify", "label_texts"),
    "multiple-choice": ("choose",),
    "token-classification": ("tag", "label_spans"),
    "question-answering": ("span",),
    "fill-mask": ("fill",),
    "feature-extraction": ("embed",),
    "sentence-similarity": ("embed",),
    **dict.fromkeys((*TEXT2TEXT_FIELDS, TEXT_GENERATION), ("generate",)),
}
MAX_LISTED_LABELS, MAX_LISTED_CHARACTERS = 256, 8192  # of a model in a list of models
PAIR_USE: Mapping[Task, str] = {"rank": "needed", "choose": "needed", "span": "needed", "classify": "possible"}


def model_tasks(model: Model) -> list[str]:
    """The names of the model's tasks, the default first."""
    if model.task == "generate":
        return list(TEXT2TEXT_FIELDS) if model.generation_defaults else [TEXT_GENERATION]
    found = [name for name, heads in TASK_HEADS.items() if model.task in heads]
    infers = model.task != "classify" or model.entailment_label is not None
    return [name for name in found if infers or name != ZERO_SHOT]


def shorten_labels(labels: Sequence[str]) -> Sequence[str]:
    """The first labels: at most MAX_LISTED_LABELS, with at most MAX_LISTED_CHARACTERS together. A checkpoint may have
    hundreds of thousands, and a list of models is asked for often."""
    lengths = accumulate(map(len, labels[:MAX_LISTED_LABELS]))
    return labels[: sum(length <= MAX_LISTED_CHARACTERS for length in lengths)]


def label_cost(model: Model) -> int:
    """Approximate cost of writing all labels, in numbers as `run_off_loop` counts them."""
    return len(model.labels) + sum(model.label_bytes) // 8


def describe_model(model: Model, *, explained: bool, whole: bool) -> dict[str, Any]:
    """What a client needs to use the model.

    `labels`: all of them if `whole`, or else the first; `label_count`: how many there are;
    `tasks`: the names of its pipelines, and `decisions` if it answers questions about a text; `sampling`: the options
    of requests that do not set them, where the API's defaults are not used; `pairs`: whether it reads two texts at
    once; `mask`: the text of the mask token; `explain`: the methods that explain its answers, and `explain_decisions`
    those that explain its answers to questions.
    """
    hidden = model.tokenizer.mask_id if model.task == "fill" else None
    return {
        "task": model.task,
        "tasks": model_tasks(model) + [DECISIONS] * (model.task in DECISION_TASKS),
        "labels": model.labels if whole else shorten_labels(model.labels),
        "label_count": len(model.labels),
        "max_tokens": model.max_tokens,
        "chat": model.chat is not None,
        "sampling": dict(model.sampling),
        "mask": "" if hidden is None else model.tokenizer.piece(hidden),
        "pairs": "needed" if model.both_orders else PAIR_USE.get(model.task, "none"),
        "explain": get_args(ExplainMethod) if explained and model.task in TARGET_FIELDS else (),
        "explain_decisions": get_args(QuestionMethod) if explained and model.task in DECISION_TASKS else (),
    }
