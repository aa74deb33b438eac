"""What models would take, before they are served: the work of `polyhead check`.

Knows descriptions and the budget; reads no weights.  The one idea: it plans as a starting server does, one model after
the other in one budget, so that what it says fits is what will be loaded.
"""

from collections.abc import Sequence

from models import checkpoint
from service import machine
from service.budget import MIB, Budget, Need, Sized, least, mib, sized
from service.errors import NoRoom
from service.place import placed
from service.settings import NAME, Settings

HEADER = ("model", "weights", "cache", "workspace", "total")


def named(sources: Sequence[str]) -> dict[str, str]:
    """NAME=SOURCE as for serve; a source alone is called "model", the next one "model-2"."""
    models: dict[str, str] = {}
    for number, given in enumerate(sources, 1):
        name, equals, source = given.partition("=")
        if equals and NAME.fullmatch(name):
            models[name] = source
        else:
            models["model" if number == 1 else f"model-{number}"] = given
    return models


def checked(settings: Settings) -> tuple[str, bool]:
    """A table in MiB with what to say below it, and whether everything fits.  Raises ModelError."""
    models = [sized(name, checkpoint.describe(source)) for name, source in settings.models.items()]
    free = machine.spendable_memory(placed(settings).device)
    budget = Budget(settings.memory_mib * MIB or free, settings)
    needs, complaints = [], []
    for number, model in enumerate(models):
        try:
            planned = budget.plan(model, models[number + 1 :])
            budget.take(planned)
        except NoRoom as error:
            complaints.append(error.message)
            planned = least(model, settings)
        needs.append(planned)
    said = complaints or [shrunk(model, planned) for model, planned in zip(models, needs, strict=True)]
    return "\n".join([table(needs), bounds(settings, free), *filter(None, said)]), not complaints


def shrunk(model: Sized, planned: Need) -> str:
    if not planned.blocks or planned.cache_tokens >= model.context:
        return ""
    return f"{model.name}: its context is {model.context} tokens, its cache holds {planned.cache_tokens}"


def bounds(settings: Settings, free: int) -> str:
    if not settings.memory_mib:
        return f"{mib(free)} MiB are free for models on this machine"
    over = f", but only {mib(free)} MiB are free on this machine" if free < settings.memory_mib * MIB else ""
    return f"{settings.memory_mib} MiB are set for models{over}"


def table(needs: Sequence[Need]) -> str:
    rows = [HEADER, *map(row, needs)]
    if len(needs) > 1:
        rows.append(("together", "", "", "", str(mib(sum(need.total for need in needs)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(line(cells, widths) for cells in rows)


def row(need: Need) -> tuple[str, ...]:
    cache = f"{mib(need.cache)} ({need.cache_tokens} tokens, {need.blocks} blocks)" if need.blocks else "-"
    return need.name, str(mib(need.weights)), cache, str(mib(need.workspace)), str(mib(need.total))


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)])
