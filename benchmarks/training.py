"""Compare training tokens a second of packed batches and padded ones: the same network, the same texts, the same steps.

    python -m benchmarks.training [gpt] [transformer] [bahdanau] [--rounds 5] [--steps 4] [--threads 1]
                                  [--data runs/downloads]

The networks are those of training/recipes with the same names: a generator of first paragraphs of articles (20 to 250
tokens), and the two translators of English to German (about 20 tokens a pair), in batches of about as many tokens. The
peers are transformers' Trainer and, for networks that it does not have, a plain loop of torch. Both pad each batch to
its longest text, once with mixed lengths and once with similar lengths as Polyhead has (benchmarks.training_peers).
Tokens are those of texts, without padding. Seconds are processor time, so other load does not count. Rounds alternate.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.serving import machine, report
from benchmarks.training_peers import Batches, Plain, Recurrent, Theirs, Translated, generated
from polyhead.models.tokenizer import Tokenizer
from polyhead.training.data import vocabulary_training as vocabulary
from polyhead.training.data.prose import read_leads
from polyhead.training.loop.packing import NEIGHBOURS
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.loop.trainer import RunFolder, start_run, train_step
from polyhead.training.networks.named_networks import build_generator
from polyhead.training.networks.network_size import TransformerSize
from polyhead.training.networks.translators import EncoderDecoderSize, RecurrentSize
from polyhead.training.objectives.causal import CausalObjective
from polyhead.training.objectives.objective import Objective, ObjectiveBatch, ObjectiveTraining
from polyhead.training.recipes import network_run
from polyhead.training.recipes.recipe import RunOptions, read_recipe

TOKENS, CONTEXT, WORDS = 4096, 256, 8000
PLAN = TrainingPlan(epochs=1, rate=1e-4, schedule="constant")
RECIPES = Path(network_run.__file__).parent
Run = Callable[[int], float]  # so many steps: tokens a second


@dataclass
class Ours:
    """The loop of training.loop.trainer, `steps` of it at a time."""

    task: ObjectiveTraining[Any]
    folder: Path

    def __post_init__(self) -> None:
        self.run = start_run(self.task, PLAN, RunFolder(self.folder))
        self.batches: Iterator[ObjectiveBatch[Any]] = iter(self.task.batches(0))

    def __call__(self, steps: int) -> float:
        began, tokens = time.process_time(), 0
        for batch in islice(self.batches, steps):
            train_step(self.run, [batch], 1 << 30)
            tokens += self.task.size(batch)
        return tokens / (time.process_time() - began)


def practice(objective: Objective[Any], items: list[Any]) -> ObjectiveTraining[Any]:
    """Of batches of about TOKENS in the mean: the largest may have an item more, and a little."""
    longest = max(map(objective.size, items))
    most = TOKENS + longest + -(-longest // NEIGHBOURS)
    return ObjectiveTraining(objective=objective, train=items, validation=[], tokens=most, seed=0)


def compare(name: str, ours: Run, theirs: dict[str, Run], rounds: int, steps: int) -> None:
    """Rounds of so many steps, in turn; the first of each is not counted."""
    mine: list[float] = []
    others: dict[str, list[float]] = {other: [] for other in theirs}
    for number in range(rounds + 1):
        mine += [ours(steps)][: number > 0]
        for other, run in theirs.items():
            others[other] += [run(steps)][: number > 0]
    for other, found in others.items():
        report(f"{name}, against {other}", mine, found, "tokens/s", "padded")


def both(made: Callable[[Batches], Run], items: list[dict[str, list[int]]], name: str) -> dict[str, Run]:
    """Padded batches of mixed lengths and of like ones."""
    return {f"{name}, {kind}": made(Batches(items, TOKENS, kind == "like")) for kind in ("mixed", "like")}


def generating(folder: Path, data: Path) -> tuple[Run, dict[str, Run]]:
    texts = list(read_leads(data))
    vocabulary.write_gpt_vocabulary([example.text for example in texts], WORDS, folder / "words")
    words = Tokenizer.from_folder(folder / "words")
    recipe = RECIPES / "gpt.toml"
    shape: TransformerSize = read_recipe(recipe).network_size(recipe)
    network, head = build_generator(shape, words, CONTEXT)
    objective = CausalObjective(network=network, head=head, tokenizer=words, limit=CONTEXT)  # type: ignore[arg-type]
    items = objective.items(texts)
    config = transformers.GPT2Config(
        vocab_size=words.vocab_size,
        n_positions=CONTEXT + 1,
        n_embd=shape.width,
        n_layer=shape.depth,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)
    task = practice(objective, items)
    target_items = [{"source": [], "target": item[1:]} for item in items]
    return Ours(task, folder / "ours"), both(
        lambda batches: Theirs(model, batches, generated, PLAN, folder / "theirs"),
        target_items,
        "transformers' Trainer",
    )


def translating(name: str, folder: Path, data: Path) -> tuple[Run, dict[str, Run]]:
    file = RECIPES / f"{name}.toml"
    recipe = read_recipe(file)
    course = network_run.prepare_run(recipe, recipe.source.read_corpus(data), RunOptions(file, RunFolder(folder)))
    longest = recipe.data.context
    task = practice(course.objective, course.items["train"])
    items, words = [vars(item) for item in task.train], course.vocabulary
    assert words.bos_id is not None
    assert words.pad_id is not None
    collate, smoothing = Translated(words.bos_id, words.pad_id), recipe.smoothing
    shape = recipe.network_size(file)
    if isinstance(shape, RecurrentSize):
        hidden = course.objective.network.config.hidden
        network = Recurrent(words.vocab_size, shape.width, hidden, shape.dropout)
        peers = both(lambda batches: Plain(network, batches, collate, PLAN, smoothing), items, "a plain loop")
    else:
        model = marian(shape, words, longest)
        peers = both(
            lambda batches: Theirs(model, batches, collate, PLAN, folder / "theirs", smoothing),
            items,
            "transformers' Trainer",
        )
    return Ours(task, folder / "ours"), peers


def marian(shape: EncoderDecoderSize, words: Tokenizer, longest: int) -> transformers.PreTrainedModel:
    """The same network there: norms behind sums, positions by sines, one matrix for all tokens."""
    halves = {"layers": shape.depth, "attention_heads": shape.heads, "ffn_dim": shape.mlp_width or 4 * shape.width}
    config = transformers.MarianConfig(
        vocab_size=words.vocab_size,
        d_model=shape.width,
        max_position_embeddings=longest,
        activation_function="relu",
        dropout=shape.dropout,
        scale_embedding=True,
        pad_token_id=words.pad_id,
        eos_token_id=words.eos_id,
        forced_eos_token_id=words.eos_id,
        decoder_start_token_id=words.bos_id,
        **{f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in halves.items()},
    )
    return transformers.MarianMTModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipes", nargs="*", default=["gpt", "transformer", "bahdanau"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("runs") / "downloads")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(machine())
    for name in chosen.recipes:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            made = generating(place, chosen.data) if name == "gpt" else translating(name, place, chosen.data)
            compare(f"the network of {name}.toml", *made, chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
