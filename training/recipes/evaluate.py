"""Measures a checkpoint on a recipe's held-out part, or on texts in a file.  It loads the checkpoint as a server
does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.network.heads import LanguageHead, MaskHead

from ..data.examples import Example, split_by_source
from ..loop.errors import RecipeError
from ..networks.base_model import find_base_folder
from ..objectives.causal import CausalObjective
from ..objectives.masked import MaskedObjective
from ..objectives.objective import Objective, measure_objective
from ..objectives.translation import TranslationObjective
from ..objectives.translation_scores import score_translations
from ..tasks.sources import TASK_SOURCES, TEXT_SOURCES
from ..tasks.task import measure_task
from . import finetune_recipe as recipe
from . import network_recipe as whole

BATCH_TEXTS = 16  # tokens of a batch, in numbers of the longest texts


def evaluate_checkpoint(folder: Path, data_file: Path) -> dict[str, float]:
    """Measure a folder that generates, fills in or translates.  Raises RecipeError for other tasks."""
    checkpoint = load(str(folder))
    limit = checkpoint.max_tokens
    if data_file.suffix == ".toml":
        limit = min(limit, whole.read_recipe(data_file).data.context)
    objective = choose_objective(checkpoint, limit)
    examples = read_examples(data_file, folder)
    if isinstance(objective, TranslationObjective) and data_file.suffix not in (".toml", ".tsv"):
        raise RecipeError(f"{data_file}: name a .tsv, of which a line is a sentence, a tab and its translation")
    items = objective.items(examples)
    if not items:
        raise RecipeError(f"{data_file}: it has no tokens to predict")
    tokens = BATCH_TEXTS * max(map(objective.size, items))
    written = score_translations(objective, examples, tokens) if isinstance(objective, TranslationObjective) else {}
    return measure_objective(objective, items, tokens) | written


def choose_objective(checkpoint: Checkpoint, limit: int) -> Objective[Any]:
    network, head, tokenizer = checkpoint.network, checkpoint.head, checkpoint.tokenizer
    match checkpoint.task:
        case "generate":
            return CausalObjective(network=network, head=cast(LanguageHead, head), tokenizer=tokenizer, limit=limit)
        case "fill":
            return MaskedObjective(
                network=network, head=cast(MaskHead, head), next_head=None, tokenizer=tokenizer, limit=limit
            )
        case "translate":
            return TranslationObjective(network=head, tokenizer=tokenizer, limit=limit)  # type: ignore[arg-type]
        case other:
            raise RecipeError(f"{checkpoint.source}: it is made to {other}; name one that generates or fills in")


def read_examples(data_file: Path, folder: Path) -> Sequence[Example[Any]]:
    """Read a recipe's held-out part, or a file as one document."""
    if data_file.suffix == ".toml":
        data = whole.read_recipe(data_file).data
        corpus = TEXT_SOURCES[data.source].read_corpus(folder.absolute().parent / "downloads")
        return split_by_source(corpus, data.validation, data.held_out).held_out
    try:
        text = data_file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{data_file}: cannot be read as text: {error}") from None
    if data_file.suffix != ".tsv":
        return [Example(text, None, "file", data_file.name)]
    pairs = [line.split("\t") for line in text.splitlines() if line]
    if wrong := next((number for number, pair in enumerate(pairs, 1) if len(pair) != 2), 0):
        raise RecipeError(f"{data_file}: line {wrong} is not a sentence, a tab and its translation")
    return [Example(source, target, "file", source) for source, target in pairs]


def evaluate_task(folder: Path, data_file: Path) -> dict[str, float]:
    """Measure what a finetune recipe made of its base model: an adapter or a whole model."""
    read = recipe.read_recipe(data_file)
    runs = folder.absolute().parent.parent
    source = TASK_SOURCES[read.data.source]
    corpus = source.read_corpus(runs / "downloads")
    base = f"{find_base_folder(read.trunk, data_file.parent, runs)}+" if read.lora else ""
    served, task = load(f"{base}{folder}"), source.create_task(corpus.labels)
    reader = recipe.build_reader(read.data, served)
    items = task.items(recipe.split_corpus(read.data, corpus).held_out, reader)
    return measure_task(task, served.network, served.head, reader, items)
