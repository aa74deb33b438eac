"""`polyhead check`: the memory that models would take, computed from their descriptions without reading weights.

It plans as a starting server does, one model after the other in one budget, so its result is what will be loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANY_SOURCE
from polyhead.models.checkpoint.unmerged_adapter import BaseModel
from polyhead.models.core.errors import ModelError, UnsupportedError

from ..concurrency.outcome import attempt, unwrap
from ..config.settings import Settings
from ..core.errors import InsufficientMemory, PolyheadError
from ..core.names import base_model_name, is_name
from ..resources.connection_memory import limit_connections
from ..runtime.draft_choice import choose_draft_model
from ..runtime.explain_cost import explainer_memory_need
from ..runtime.memory_budget import (
    MIB,
    MemoryBudget,
    MemoryNeed,
    ModelSize,
    adapter_bytes,
    adapter_memory_need,
    ceil_mib,
    describe_state_shortage,
    measure_model,
    memory_limit,
    smallest_need,
)
from ..runtime.placement import choose_placement
from ..runtime.self_test import apply_known_cost
from ..runtime.tokenizer_check import TokenizerCheck

HEADER = ("model", "weights", "cache", "workspace", "total")
STATES_HEADER = "states"  # header of the column for states of recurrent layers
EXPLAIN_HEADER = "to explain"  # header of the column for explanations


def parse_sources(sources: Sequence[str]) -> dict[str, str]:
    """Read NAME=SOURCE arguments as serve does.  A source without a name is called "model", the next one "model-2"."""
    models: dict[str, str] = {}
    for number, argument in enumerate(sources, 1):
        name, equals, source = argument.partition("=")
        if equals and is_name(name):
            models[name] = source
        else:
            models["model" if number == 1 else f"model-{number}"] = argument
    return models


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    `report` is a table in MiB with notes below it, empty if no model could be described.  `errors` has a sentence for
    each source that cannot be loaded.  `fits`: all of them can be loaded, and fit.
    """

    report: str
    errors: tuple[str, ...]
    fits: bool


def check_models(settings: Settings) -> CheckResult:
    """Check all models of the settings.  A source that cannot be loaded takes no memory, and the others are still
    checked.
    """
    settings = limit_connections(settings)
    checker = TokenizerCheck()
    described, models, adapters, errors = dict[str, Description](), list[ModelSize](), list[MemoryNeed](), list[str]()
    explained = dict[str, MemoryNeed]()  # by model, if explanations are enabled
    # Adapters come after their base models.
    for name in sorted(settings.models, key=lambda name: bool(base_model_name(name))):
        try:
            if base_model_name(name):
                adapters.append(adapter_need(name, described, settings))
                explained |= {name: replace(explained[base_model_name(name)], name=name)} if settings.explain else {}
            else:
                description = unwrap(
                    attempt(
                        partial(checkpoint.describe_source, settings.models[name], folder_check=checker.check_folder)
                    )
                )
                description = apply_known_cost(description, settings)
                draft = choose_draft_model(name, description, settings, checker.check_folder)
                companion = draft or description.queries
                models.append(measure_model(name, description, companion, settings.tensor_parallel))
                described[name] = description
                explained |= (
                    {name: explainer_memory_need(measure_model(name, description), settings)}
                    if settings.explain
                    else {}
                )
        except (ModelError, PolyheadError) as error:
            errors.append(f"{name}: {error}")
    checker.close()
    if not models:
        return CheckResult("", tuple(errors), fits=False)
    report, fits = plan_memory(models, adapters, explained, settings)
    return CheckResult(report, tuple(errors), fits=fits and not errors)


def plan_memory(
    models: Sequence[ModelSize], adapters: Sequence[MemoryNeed], explained: Mapping[str, MemoryNeed], settings: Settings
) -> tuple[str, bool]:
    """Plan the memory of the models that can be loaded.  Returns the report, and whether they fit."""
    kept = adapter_bytes(adapters)
    free = memory_limit(settings.model_copy(update={"memory_mib": 0}), choose_placement(settings).device)
    budget = MemoryBudget(settings.memory_mib * MIB or free, settings)
    needs, complaints = [], []
    for number, model in enumerate(models):
        try:
            plan = budget.plan(model, models[number + 1 :], kept)
            budget.reserve(plan)
        except InsufficientMemory as error:
            complaints.append(error.message)
            plan = smallest_need(model, settings)
        needs.append(plan)
    for adapter in adapters:
        try:
            budget.reserve_adapter(adapter)
            budget.settle(adapter)
        except InsufficientMemory as error:
            complaints.append(error.message)
    shortages = (describe_cache_shortage, partial(describe_state_shortage, settings=settings))
    notes = complaints or [
        shortage(model, plan) for model, plan in zip(models, needs, strict=True) for shortage in shortages
    ]
    if not complaints:
        notes.append(describe_explain_shortage(explained, budget.free))
    parts = [format_table([*needs, *adapters], explained), describe_limit(settings, free), *filter(None, notes)]
    return "\n".join(parts), not complaints


def describe_explain_shortage(explained: Mapping[str, MemoryNeed], free: int) -> str:
    """Name the models that the rest of the memory is too small to explain; empty if there is none."""
    large = [f"{name} ({ceil_mib(need.total)})" for name, need in explained.items() if need.total > free]
    return f"{ceil_mib(free)} MiB are left for explanations: too few for {', '.join(large)}" if large else ""


def adapter_need(name: str, described: Mapping[str, Description], settings: Settings) -> MemoryNeed:
    """Return the memory of an adapter.  Raises UnsupportedError if its base model cannot be loaded."""
    base = described.get(base_model_name(name))
    if base is None:
        raise UnsupportedError(f"{base_model_name(name)}, its base model, cannot be loaded")
    laid = BaseModel(base).plan_adapter(ANY_SOURCE.locate(settings.models[name]))
    return adapter_memory_need(name, laid, choose_placement(settings, base.default_precision, base.config))


def describe_cache_shortage(model: ModelSize, planned: MemoryNeed) -> str:
    if not planned.blocks or planned.cache_tokens >= model.context:
        return ""
    return f"{model.name}: its context is {model.context} tokens, its cache holds {planned.cache_tokens}"


def describe_limit(settings: Settings, free: int) -> str:
    if not settings.memory_mib:
        each = f", for each of {settings.tensor_parallel} processes" if settings.tensor_parallel > 1 else ""
        return f"{ceil_mib(free)} MiB are free for models on this machine{each}"
    over = f", but only {ceil_mib(free)} MiB are free on this machine" if free < settings.memory_mib * MIB else ""
    return f"{settings.memory_mib} MiB are set for models{over}"


def format_table(needs: Sequence[MemoryNeed], explained: Mapping[str, MemoryNeed]) -> str:
    rows = [HEADER, *map(format_cells, needs)]
    if len(needs) > 1:
        rows.append(("together", "", "", "", str(ceil_mib(sum(need.total for need in needs)))))
    if any(need.state_count for need in needs):
        column = [STATES_HEADER, *map(format_states, needs), ""]
        rows = [(*cells[:3], more, *cells[3:]) for cells, more in zip(rows, column, strict=False)]
    if explained:
        beside = [ceil_mib(explained[need.name].total) for need in needs]
        totals = [*beside, *([sum(beside)] if len(needs) > 1 else [])]
        rows = [(*cells, more) for cells, more in zip(rows, [EXPLAIN_HEADER, *map(str, totals)], strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(align_cells(cells, widths) for cells in rows)


def format_cells(need: MemoryNeed) -> tuple[str, ...]:
    blocks = f"{need.blocks} + {need.window_blocks}" if need.window_blocks else str(need.blocks)
    cache = f"{ceil_mib(need.cache)} ({need.cache_contents}, {blocks} blocks)" if need.blocks else "-"
    return need.name, str(ceil_mib(need.weights)), cache, str(ceil_mib(need.workspace)), str(ceil_mib(need.total))


def format_states(need: MemoryNeed) -> str:
    return f"{ceil_mib(need.states)} ({need.state_count} slots)" if need.state_count else "-"


def align_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)])
