"""`polyhead families`: which families of checkpoints are loaded, with which heads, and what the others need.

Everything follows from the tables of models.architectures; docs/families.md is this command's --markdown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.gguf_architectures import GGUF_ARCHITECTURES
from polyhead.models.architectures.published_architectures import (
    NO_TABLE,
    PUBLISHED_ARCHITECTURES,
    TRANSFORMERS_RELEASE,
    missing_reason,
)

TASK_NAMES = {
    "generate": "generate",
    "classify": "classify, rank",
    "embed": "embed",
    "tag": "tag",
    "span": "answer",
    "fill": "fill in",
    "translate": "translate",
}
HEADING = """# Families

Checkpoint folders are loaded by the `model_type` in their config.json, and GGUF files by `general.architecture`. The
head is the first of `architectures`. A folder of sentence-transformers (with modules.json) embeds, whatever its head.
Static embeddings (folders of model2vec, and StaticEmbedding of sentence-transformers) need no family. Where a folder
has no safetensors, the weights of its `model.onnx` or `onnx/model.onnx` are read.

Folders of four packages have an encoder of these families (its base class) and a head of their own:

| package | what answers |
|---|---|
| gliner (`gliner_config.json`) | spans of words for labels of the request |
| gliclass (`model_type` GLiClass) | labels of the request |
| laya (`rl_agent_config.json`) | questions about a text: choice, score, noul |
| gliner2 (`model_type` extractor) | questions about a text, by its classifier; what finds spans is not read |

This page is the output of `polyhead families --markdown`; `polyhead families --all --json` has it for programs.
"""
OTHERS = f"""
## What is not loaded

The other architectures of transformers {TRANSFORMERS_RELEASE} that read or write text, and why.
"""


@dataclass(frozen=True)
class FamilyRow:
    """A family that is loaded. `heads` are the classes of its checkpoints by task; `gguf` the architectures of GGUF
    files that are read as this family.
    """

    family: str
    heads: Mapping[str, Sequence[str]]
    gguf: Sequence[str]


@dataclass(frozen=True)
class ArchitectureRow:
    """An architecture of transformers. `reason`: what it needs; empty if it is loaded."""

    model_type: str
    class_name: str
    kind: str
    is_loaded: bool
    reason: str


def list_families() -> list[FamilyRow]:
    """The families that are loaded, in the order of their table."""
    rows = []
    for name, family in FAMILIES.items():
        heads: dict[str, list[str]] = {}
        for class_name, spec in family.heads.items():
            heads.setdefault(spec.task, []).append(class_name)
        gguf = [key for key, dialect in GGUF_ARCHITECTURES.items() if dialect.family == name]
        rows.append(FamilyRow(name, heads, gguf))
    return rows


def list_architectures() -> list[ArchitectureRow]:
    """The architectures of transformers and the families that are loaded, by name."""
    rows = [
        ArchitectureRow(
            name,
            each.class_name,
            each.kind,
            name in FAMILIES,
            "" if name in FAMILIES else missing_reason(name, FAMILIES),
        )
        for name, each in PUBLISHED_ARCHITECTURES.items()
    ]
    more = [
        ArchitectureRow(name, next(iter(family.heads), ""), "", is_loaded=True, reason="")
        for name, family in FAMILIES.items()
        if name not in PUBLISHED_ARCHITECTURES
    ]
    return sorted(rows + more, key=lambda row: row.model_type)


def format_families() -> str:
    """The families and their heads as a table for a terminal."""
    rows = [("family", "task", "architectures")]
    for row in list_families():
        for number, (task, names) in enumerate(row.heads.items()):
            rows.append(("" if number else row.family, TASK_NAMES.get(task, task), ", ".join(names)))
        if row.gguf:
            rows.append(("", "", f"GGUF: {', '.join(row.gguf)}"))
    return align_rows(rows)


def format_architectures() -> str:
    """All architectures as a table for a terminal."""
    rows = list_architectures()
    cells = [("model_type", "class", "kind", "loaded")]
    cells += [(row.model_type, row.class_name, row.kind, "yes" if row.is_loaded else row.reason) for row in rows]
    loaded = sum(row.is_loaded for row in rows)
    return f"{align_rows(cells)}\n{loaded} of {len(rows)} are loaded"


def align_rows(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(*, every: bool) -> str:
    """The families, or `every` architecture, as a list in JSON."""
    rows = list_architectures() if every else list_families()
    return json.dumps([asdict(row) for row in rows], indent=2)


def as_markdown() -> str:
    """docs/families.md."""
    lines = [HEADING, "| family | heads | GGUF |", "|---|---|---|"]
    for row in list_families():
        heads = "; ".join(
            f"{TASK_NAMES.get(task, task)}: {', '.join(f'`{name}`' for name in names)}"
            for task, names in row.heads.items()
        )
        lines.append(f"| `{row.family}` | {heads} | {', '.join(f'`{name}`' for name in row.gguf)} |")
    by_reason: dict[str, list[str]] = {}
    for each in list_architectures():
        if not each.is_loaded:
            by_reason.setdefault(each.reason, []).append(f"`{each.model_type}`")
    lines += [OTHERS, "| why | model_type |", "|---|---|"]
    for reason in sorted(by_reason, key=lambda reason: (reason != NO_TABLE, reason)):
        lines.append(f"| {reason} | {', '.join(by_reason[reason])} |")
    return "\n".join(lines) + "\n"
