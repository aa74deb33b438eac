"""How well a checkpoint does on texts: on those that a recipe holds out, or on those in a file.

It doesn't know who made the checkpoint: it is read as it is served.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.network.heads import LanguageHead, MaskHead

from ..data.examples import Example, split_by_source
from ..loop.errors import RecipeError
from ..networks.base_model import trunk_folder
from ..objectives.causal import Causal
from ..objectives.masked import Masked
from ..objectives.objective import Objective, measure
from ..objectives.translation import Translation
from ..objectives.translation_scores import quality
from ..tasks.sources import SOURCES, TEXTS
from ..tasks.task import measure as measure_lesson
from . import recipe, whole

BATCHES = 16  # as many tokens as so many of the longest texts


def of_checkpoint(folder: Path, what: Path) -> dict[str, float]:
    """Of a folder that generates or fills in: RecipeError if it does neither."""
    checkpoint = load(str(folder))
    limit = checkpoint.max_tokens
    if what.suffix == ".toml":
        limit = min(limit, whole.read(what).data.context)
    objective = asked(checkpoint, limit)
    examples = texts(what, folder)
    if isinstance(objective, Translation) and what.suffix not in (".toml", ".tsv"):
        raise RecipeError(f"{what}: name a .tsv, of which a line is a sentence, a tab and its translation")
    items = objective.items(examples)
    if not items:
        raise RecipeError(f"{what}: there is nothing in it to be told")
    tokens = BATCHES * max(map(objective.size, items))
    written = quality(objective, examples, tokens) if isinstance(objective, Translation) else {}
    return measure(objective, items, tokens) | written


def asked(checkpoint: Checkpoint, limit: int) -> Objective[Any]:
    network, head, words = checkpoint.network, checkpoint.head, checkpoint.tokenizer
    match checkpoint.task:
        case "generate":
            return Causal(network=network, head=cast(LanguageHead, head), tokenizer=words, limit=limit)
        case "fill":
            return Masked(network=network, head=cast(MaskHead, head), follows=None, tokenizer=words, limit=limit)
        case "translate":
            return Translation(network=head, tokenizer=words, limit=limit)  # type: ignore[arg-type]
        case other:
            raise RecipeError(f"{checkpoint.source}: it is made to {other}; name one that generates or fills in")


def texts(what: Path, folder: Path) -> Sequence[Example[Any]]:
    """What a recipe holds out, or a file's paragraphs, as one document."""
    if what.suffix == ".toml":
        data = whole.read(what).data
        corpus = TEXTS[data.source].corpus(folder.absolute().parent / "downloads")
        return split_by_source(corpus, data.validation, data.held_out).held_out
    try:
        text = what.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{what}: cannot be read as text: {error}") from None
    if what.suffix != ".tsv":
        return [Example(text, None, "file", what.name)]
    pairs = [line.split("\t") for line in text.splitlines() if line]
    if wrong := next((number for number, pair in enumerate(pairs, 1) if len(pair) != 2), 0):
        raise RecipeError(f"{what}: line {wrong} is no sentence, a tab and its translation")
    return [Example(ours, theirs, "file", ours) for ours, theirs in pairs]


def of_task(folder: Path, what: Path) -> dict[str, float]:
    """Of what a recipe made of its trunk: an adapter, or the whole of it."""
    read = recipe.read(what)
    runs = folder.absolute().parent.parent
    source = SOURCES[read.data.source]
    corpus = source.corpus(runs / "downloads")
    trunk = f"{trunk_folder(read.trunk, what.parent, runs)}+" if read.lora else ""
    served, lesson = load(f"{trunk}{folder}"), source.lesson(corpus.labels)
    reader = recipe.reader(read.data, served)
    items = lesson.items(recipe.divide(read.data, corpus).held_out, reader)
    return measure_lesson(lesson, served.network, served.head, reader, items)
