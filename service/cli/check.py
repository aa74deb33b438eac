"""What models would take, before they are served: the work of `polyhead check`.

Knows descriptions and the budget; reads no weights.  The one idea: it plans as a starting server does, one model after
the other in one budget, so that what it says fits is what will be loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import ANYWHERE
from polyhead.models.checkpoint.unmerged_adapter import Trunk
from polyhead.models.core.errors import ModelError, UnsupportedError

from ..concurrency.outcome import attempt, result
from ..config.settings import Settings
from ..core.errors import NoRoom, PolyheadError
from ..core.names import is_name, trunk_of
from ..runtime.draft_choice import drafting_for
from ..runtime.explain_cost import need_of
from ..runtime.memory_budget import MIB, Budget, Need, Sized, least, limit_of, mib, need_beside, sized
from ..runtime.placement import placed
from ..runtime.self_test import with_known_cost
from ..runtime.tokenizer_check import Vetting

HEADER = ("model", "weights", "cache", "workspace", "total")
EXPLAINED = "to explain"  # the column of what a network that explains takes beside


def named(sources: Sequence[str]) -> dict[str, str]:
    """NAME=SOURCE as for serve; a source alone is called "model", the next one "model-2"."""
    models: dict[str, str] = {}
    for number, given in enumerate(sources, 1):
        name, equals, source = given.partition("=")
        if equals and is_name(name):
            models[name] = source
        else:
            models["model" if number == 1 else f"model-{number}"] = given
    return models


@dataclass(frozen=True)
class Checked:
    """`said` is a table in MiB with what to say below it, empty where there is no model to say it of; `refused` has a
    sentence for each source that cannot be loaded; `fits`: all of them can be loaded, and fit."""

    said: str
    refused: tuple[str, ...]
    fits: bool


def checked(settings: Settings) -> Checked:
    """A source that is refused does not keep the others from being checked, and takes no room from them."""
    vetting = Vetting()
    described, models, adapters, refused = dict[str, Description](), list[Sized](), list[Need](), list[str]()
    explained = dict[str, Need]()  # by model's name, if explanations are on
    for name in sorted(settings.models, key=lambda name: bool(trunk_of(name))):  # adapters after what they lie over
        try:
            if trunk_of(name):
                adapters.append(beside(name, described, settings))
                explained |= {name: replace(explained[trunk_of(name)], name=name)} if settings.explain else {}
            else:
                what = result(attempt(partial(checkpoint.describe, settings.models[name], vet=vetting.vet)))
                what = with_known_cost(what, settings)
                draft = drafting_for(name, what, settings, vetting.vet)
                models.append(sized(name, what, draft, settings.tensor_parallel))
                described[name] = what
                explained |= {name: need_of(sized(name, what), settings)} if settings.explain else {}
        except (ModelError, PolyheadError) as error:
            refused.append(f"{name}: {error}")
    vetting.close()
    if not models:
        return Checked("", tuple(refused), fits=False)
    said, fits = planned(models, adapters, explained, settings)
    return Checked(said, tuple(refused), fits=fits and not refused)


def planned(
    models: Sequence[Sized], adapters: Sequence[Need], explained: Mapping[str, Need], settings: Settings
) -> tuple[str, bool]:
    """What there is to say of those that can be loaded, and whether they fit."""
    kept = sum(adapter.total for adapter in adapters)
    free = limit_of(settings.model_copy(update={"memory_mib": 0}), placed(settings).device)
    budget = Budget(settings.memory_mib * MIB or free, settings)
    needs, complaints = [], []
    for number, model in enumerate(models):
        try:
            plan = budget.plan(model, models[number + 1 :], kept)
            budget.take(plan)
        except NoRoom as error:
            complaints.append(error.message)
            plan = least(model, settings)
        needs.append(plan)
    for adapter in adapters:
        try:
            budget.take_beside(adapter)
        except NoRoom as error:
            complaints.append(error.message)
    said = complaints or [shrunk(model, plan) for model, plan in zip(models, needs, strict=True)]
    if not complaints:
        said.append(unexplained(explained, budget.free))
    lines = [table([*needs, *adapters], explained), bounds(settings, free), *filter(None, said)]
    return "\n".join(lines), not complaints


def unexplained(explained: Mapping[str, Need], free: int) -> str:
    """Which models have too little room for a network that explains them."""
    large = [f"{name} ({mib(need.total)})" for name, need in explained.items() if need.total > free]
    return f"{mib(free)} MiB are left for explanations: too few for {', '.join(large)}" if large else ""


def beside(name: str, described: Mapping[str, Description], settings: Settings) -> Need:
    """Of an adapter over one of the models.  UnsupportedError where that model is refused itself."""
    trunk = described.get(trunk_of(name))
    if trunk is None:
        raise UnsupportedError(f"{trunk_of(name)}, which it is laid over, is refused itself")
    laid = Trunk(trunk).lay(ANYWHERE.place(settings.models[name]))
    return need_beside(name, laid, placed(settings, trunk.suited, trunk.config))


def shrunk(model: Sized, planned: Need) -> str:
    if not planned.blocks or planned.cache_tokens >= model.context:
        return ""
    return f"{model.name}: its context is {model.context} tokens, its cache holds {planned.cache_tokens}"


def bounds(settings: Settings, free: int) -> str:
    if not settings.memory_mib:
        each = f", for each of {settings.tensor_parallel} processes" if settings.tensor_parallel > 1 else ""
        return f"{mib(free)} MiB are free for models on this machine{each}"
    over = f", but only {mib(free)} MiB are free on this machine" if free < settings.memory_mib * MIB else ""
    return f"{settings.memory_mib} MiB are set for models{over}"


def table(needs: Sequence[Need], explained: Mapping[str, Need]) -> str:
    rows = [HEADER, *map(row, needs)]
    if len(needs) > 1:
        rows.append(("together", "", "", "", str(mib(sum(need.total for need in needs)))))
    if explained:
        beside = [mib(explained[need.name].total) for need in needs]
        column = [EXPLAINED, *beside, *([sum(beside)] if len(needs) > 1 else [])]
        rows = [(*cells, str(more)) for cells, more in zip(rows, column, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(line(cells, widths) for cells in rows)


def row(need: Need) -> tuple[str, ...]:
    cache = f"{mib(need.cache)} ({need.cache_tokens} tokens, {need.blocks} blocks)" if need.blocks else "-"
    return need.name, str(mib(need.weights)), cache, str(mib(need.workspace)), str(mib(need.total))


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)])
