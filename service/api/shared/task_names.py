"""What a served model can do, by the names that Hugging Face's pipelines have for it, and how else it is introduced.

Knows no dialect.  The one idea: a table of tasks by the heads that have them; everything that is said of a model beside
its name is read off it here, so that a client can tell how to ask.
"""

from collections.abc import Mapping
from typing import Any, get_args

from ...core.model import Model
from ...core.request import ExplainMethod, Task
from ...text import zero_shot

TEXT_GENERATION = "text-generation"
ZERO_SHOT = "zero-shot-classification"
# Of generators that read a text and write another: what their answers are called.
TEXT2TEXT_FIELDS: Mapping[str, str] = {
    "text2text-generation": "generated_text",
    "translation": "translation_text",
    "summarization": "summary_text",
}
TASK_HEADS: Mapping[str, tuple[Task, ...]] = {
    "text-classification": ("classify", "rank"),
    ZERO_SHOT: ("classify",),
    "token-classification": ("tag",),
    "question-answering": ("span",),
    "fill-mask": ("fill",),
    "feature-extraction": ("embed",),
    "sentence-similarity": ("embed",),
    **dict.fromkeys((*TEXT2TEXT_FIELDS, TEXT_GENERATION), ("generate",)),
}
PAIR_USE: Mapping[Task, str] = {"rank": "needed", "span": "needed", "classify": "possible"}


def model_tasks(model: Model) -> list[str]:
    """Those that it has, the one that is meant unless it is said first."""
    if model.task == "generate":
        return list(TEXT2TEXT_FIELDS) if model.generation_defaults else [TEXT_GENERATION]
    found = [name for name, heads in TASK_HEADS.items() if model.task in heads]
    infers = zero_shot.find_entailment_label(model.labels) is not None
    return [name for name in found if infers or name != ZERO_SHOT]


def describe_model(model: Model, *, explained: bool) -> dict[str, Any]:
    """What a form for it has to know: `pairs` says whether it reads two texts at once, `mask` how a hidden word is
    written, `explain` by which methods its answers are explained."""
    hidden = model.tokenizer.mask_id if model.task == "fill" else None
    return {
        "task": model.task,
        "tasks": model_tasks(model),
        "labels": model.labels,
        "max_tokens": model.max_tokens,
        "chat": model.chat is not None,
        "mask": "" if hidden is None else model.tokenizer.piece(hidden),
        "pairs": "needed" if model.both_orders else PAIR_USE.get(model.task, "none"),
        "explain": get_args(ExplainMethod) if explained else (),
    }
