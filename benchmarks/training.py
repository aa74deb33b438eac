"""Training tokens a second: packed batches against padded ones, the same network, the same texts, the same steps.

    python -m benchmarks.training [--rounds 5] [--steps 4] [--threads 1] [--data runs/downloads]

First paragraphs of articles (20 to 250 tokens) in batches of about as many tokens, mixed as they come.  A generator as
in training/recipes/gpt.toml against transformers' Trainer, which pads each batch to its longest text, also with its
batches of like lengths (`group_by_length`).  Tokens are those of texts, padding is none; seconds are the processor's,
so that neighbours don't count.  Rounds alternate.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.serving import machine, report
from models.tokenizer import Tokenizer
from training import vocabulary, whole
from training.causal import Causal
from training.networks import generator
from training.objective import Batch, Practice
from training.plan import Plan
from training.prose import leads
from training.shape import Shape
from training.trainer import Place, begun, step

TOKENS, CONTEXT, WORDS = 4096, 256, 8000
PLAN = Plan(epochs=1, rate=1e-4, schedule="constant")
RECIPE = Path(whole.__file__).parent / "recipes" / "gpt.toml"


@dataclass
class Ours:
    """The loop of training.trainer, `steps` of it at a time."""

    task: Practice[Any]
    folder: Path

    def __post_init__(self) -> None:
        self.run = begun(self.task, PLAN, Place(self.folder))
        self.batches: Iterator[Batch[Any]] = iter(self.task.batches(0))

    def __call__(self, steps: int) -> float:
        began, tokens = time.process_time(), 0
        for batch in islice(self.batches, steps):
            step(self.run, [batch], 1 << 30)
            tokens += self.task.size(batch)
        return tokens / (time.process_time() - began)


def padded(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Texts beside each other, each as long as the longest."""
    longest = max(len(feature["input_ids"]) for feature in features)
    ids, seen = torch.zeros(len(features), longest).long(), torch.zeros(len(features), longest).long()
    labels = torch.full((len(features), longest), -100)
    for row, feature in enumerate(features):
        tokens = torch.tensor(feature["input_ids"])
        ids[row, : len(tokens)], labels[row, : len(tokens)], seen[row, : len(tokens)] = tokens, tokens, 1
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


@dataclass
class Theirs:
    """transformers' Trainer, as many texts a batch as make as many tokens in the mean."""

    model: transformers.PreTrainedModel
    items: list[list[int]]
    folder: Path
    like: bool = False

    def __call__(self, steps: int) -> float:
        count = TOKENS * len(self.items) // sum(map(len, self.items))
        seed = random.randrange(1 << 30)
        arguments = transformers.TrainingArguments(
            str(self.folder),
            per_device_train_batch_size=count,
            max_steps=steps,
            learning_rate=PLAN.rate,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            **({"train_sampling_strategy": "group_by_length"} if self.like else {}),
        )
        told = 0

        def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
            nonlocal told
            told += sum(len(feature["input_ids"]) - 1 for feature in features)
            return padded(features)

        texts = [{"input_ids": item} for item in self.items]
        trainer = transformers.Trainer(self.model, arguments, train_dataset=texts, data_collator=collate)
        trainer.remove_callback(transformers.PrinterCallback)
        began = time.process_time()
        trainer.train()
        return told / (time.process_time() - began)


def compare(name: str, ours: Ours, theirs: dict[str, Callable[[int], float]], rounds: int, steps: int) -> None:
    """Rounds of so many steps, in turn; the first of each is not counted."""
    mine: list[float] = []
    others: dict[str, list[float]] = {other: [] for other in theirs}
    for number in range(rounds + 1):
        mine += [ours(steps)][: number > 0]
        for other, run in theirs.items():
            others[other] += [run(steps)][: number > 0]
    for other, found in others.items():
        report(f"{name}, against {other}", mine, found, "tokens/s")


def generating(folder: Path, data: Path, rounds: int, steps: int) -> None:
    texts = list(leads(data))
    vocabulary.write_generator([example.text for example in texts], WORDS, folder / "words")
    words = Tokenizer.from_folder(folder / "words")
    recipe = whole.read(RECIPE)
    shape: Shape = recipe.shape(RECIPE)
    network, head = generator(shape, words, CONTEXT)
    objective = Causal(network=network, head=head, tokenizer=words, limit=CONTEXT)  # type: ignore[arg-type]
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
    task = Practice(objective=objective, train=items, validation=[], tokens=TOKENS + 2 * CONTEXT, seed=0)
    theirs = {
        "transformers' Trainer": Theirs(model, items, folder / "theirs"),
        "transformers' Trainer, like lengths": Theirs(model, items, folder / "theirs", like=True),
    }
    compare("a GPT of the recipe", Ours(task, folder / "ours"), theirs, rounds, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("runs") / "downloads")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        generating(Path(folder), chosen.data, chosen.rounds, chosen.steps)


if __name__ == "__main__":
    main()
