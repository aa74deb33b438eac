"""Measures a checkpoint, loaded as a server does, on a recipe's held-out part or on texts in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.checkpoint.folder_files import FolderCheck
from polyhead.models.network.heads import LanguageHead, MaskHead

from ..data.examples import Example, split_by_source
from ..loop.errors import RecipeError
from ..networks.base_model import find_base_folder, find_downloads
from ..objectives.causal import CausalObjective
from ..objectives.masked import MaskedObjective
from ..objectives.objective import Objective, measure_objective
from ..objectives.translation import TranslationObjective
from ..objectives.translation_scores import score_translations
from ..tasks.task import measure_task
from .finetune_run import build_reader
from .recipe import FinetuneRecipe, NetworkRecipe, split_corpus

MAX_TEXT_BYTES = 128 << 20  # bytes of a file of texts, all of which are tokenised before any is measured
BATCH_TEXTS = 16  # tokens of a batch, in numbers of the longest texts


def evaluate_task(
    folder: Path, recipe: FinetuneRecipe, recipe_file: Path, folder_check: FolderCheck
) -> dict[str, float]:
    """Measure what a finetune recipe made of its base model: an adapter or a whole model."""
    runs = folder.absolute().parent.parent
    corpus = recipe.source.read_corpus(find_downloads(runs))
    base = f"{find_base_folder(recipe.trunk, recipe_file.parent, runs)}+" if recipe.lora else ""
    served = load(f"{base}{folder}", folder_check=folder_check)
    task = recipe.source.create_task(corpus.labels)
    reader = build_reader(recipe.data, served)
    items = task.items(split_corpus(recipe.data, corpus).held_out, reader)
    return measure_task(task, served.network, served.head, reader, items)


def evaluate_network(
    folder: Path, recipe: NetworkRecipe, recipe_file: Path, folder_check: FolderCheck
) -> dict[str, float]:
    """Measure a folder that generates, fills in or translates.  Raises RecipeError for other tasks."""
    checkpoint = load(str(folder), folder_check=folder_check)
    objective = choose_objective(checkpoint, min(checkpoint.max_tokens, recipe.data.context))
    corpus = recipe.source.read_corpus(find_downloads(folder.absolute().parent))
    split = split_by_source(corpus, recipe.data.validation, recipe.data.held_out)
    return evaluate_examples(objective, split.held_out, recipe_file)


def evaluate_texts(folder: Path, file: Path, folder_check: FolderCheck) -> dict[str, float]:
    """Measure such a folder on a file: one document, or sentences with their translations."""
    checkpoint = load(str(folder), folder_check=folder_check)
    objective, examples = choose_objective(checkpoint, checkpoint.max_tokens), read_examples(file)
    if isinstance(objective, TranslationObjective) and file.suffix != ".tsv":
        raise RecipeError(f"{file}: name a .tsv, of which a line is a sentence, a tab and its translation")
    return evaluate_examples(objective, examples, file)


def evaluate_examples(objective: Objective[Any], examples: Sequence[Example[Any]], file: Path) -> dict[str, float]:
    items = objective.items(examples)
    if not items:
        raise RecipeError(f"{file}: it has no tokens to predict")
    tokens = BATCH_TEXTS * max(map(objective.size, items))
    return measure_objective(objective, items, tokens) | score_translations(objective, examples, tokens)


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


def read_examples(file: Path) -> Sequence[Example[Any]]:
    """Read a file as one document, or a .tsv as sentences with their translations."""
    try:
        with file.open("rb") as content:
            raw = content.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            raise RecipeError(f"{file}: is longer than {MAX_TEXT_BYTES >> 20} MiB, the most that is measured; cut it")
        text = raw.decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: cannot be read as text: {error}") from None
    if file.suffix != ".tsv":
        return [Example(text, None, "file", file.name)]
    pairs = [line.split("\t") for line in text.splitlines() if line]
    if wrong := next((number for number, pair in enumerate(pairs, 1) if len(pair) != 2), 0):
        raise RecipeError(f"{file}: line {wrong} is not a sentence, a tab and its translation")
    return [Example(source, target, "file", source) for source, target in pairs]
