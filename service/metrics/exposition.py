"""Renders metric families as text: the same bytes as prometheus_client's own encoders, for a fraction of the time.

All of a line but its value is the same on every page, so it is cached.  Names of metrics and labels are constants that
need no escaping (prometheus_client checks every character of them, and in OpenMetrics turns vllm: into vllm_); values
of labels may need it.
"""

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

MAX_CACHED_LINES = 1 << 16  # of distinct samples


def prometheus_text(families: Iterable[Metric]) -> bytes:
    """The text format of Prometheus, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {escape_help(family.documentation)}\n# TYPE {name} {family.type}\n")
        lines += (
            f"{sample_start(one.name, tuple(one.labels.items()))} {format_value(one.value)}\n" for one in family.samples
        )
    return "".join(lines).encode()


def openmetrics_text(families: Iterable[Metric]) -> bytes:
    """OpenMetrics, version 1.0.0, with exemplars."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {escape_label(family.documentation)}\n# TYPE {family.name} {family.type}\n")
        lines += (
            f"{sample_start(one.name, tuple(one.labels.items()))} {format_value(one.value)}"
            f"{exemplar_text(one.exemplar)}\n"
            for one in family.samples
        )
    return "".join([*lines, "# EOF\n"]).encode()


@lru_cache(MAX_CACHED_LINES)
def sample_start(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """A sample's line without the value."""
    return f"{name}{{{format_labels(labels)}}}" if labels else name


def exemplar_text(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    labels = format_labels(exemplar.labels.items())
    return f" # {{{labels}}} {format_value(exemplar.value)}{at}"


def format_value(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def format_labels(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{label}="{escape_label(value)}"' for label, value in sorted(labels))


def escape_label(value: str) -> str:
    return escape_help(value).replace('"', r"\"")


def escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
