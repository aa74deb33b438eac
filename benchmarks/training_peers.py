"""The peers of benchmarks.training: padded batches in transformers' Trainer and in a plain loop of torch.

Texts are the same. Each batch is padded to its longest text. A batch has a fixed number of texts, with about as many
tokens on average. Batches of similar lengths are cut from the texts of fifty batches, sorted by length, as
`group_by_length` does. The batches are chosen at random, because the Trainer's own sampler begins with the longest.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from polyhead.models.literature.score_functions import Additive, ScoreWidths, masked_softmax
from polyhead.training.loop.schedule import TrainingPlan

SORTED = 50  # batches, as many as the Trainer sorts
HIDDEN = -100
Texts = dict[str, list[int]]


@dataclass
class Batches:
    """So many random batches of about `tokens`, one behind the other."""

    items: Sequence[Texts]
    tokens: int
    like: bool

    def __post_init__(self) -> None:
        self.count = self.tokens * len(self.items) // sum(map(size, self.items))  # texts of a batch

    def __call__(self, steps: int) -> list[Texts]:
        if not self.like:
            return random.sample(self.items, steps * self.count)
        some = sorted(random.sample(self.items, min(len(self.items), SORTED * self.count)), key=size)
        starts = random.sample(range(0, len(some) - self.count + 1, self.count), steps)
        return [text for start in starts for text in some[start : start + self.count]]


def size(texts: Texts) -> int:
    """Tokens, as training counts them: each source token and each target token."""
    return len(texts["source"]) + len(texts["target"])


def beside(rows: Sequence[list[int]], padding: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)


def generated(texts: Sequence[Texts]) -> dict[str, Tensor]:
    """For a decoder alone, whose source and target are the same; its first token is not a target."""
    rows = [text["target"] for text in texts]
    ids = beside([[0, *row] for row in rows], 0)
    labels = beside([[HIDDEN, *row] for row in rows], HIDDEN)
    return {"input_ids": ids, "labels": labels, "attention_mask": beside([[1] * (len(row) + 1) for row in rows], 0)}


@dataclass(frozen=True)
class Translated:
    """For an encoder and a decoder, whose texts stand behind `start`."""

    start: int
    pad: int

    def __call__(self, texts: Sequence[Texts]) -> dict[str, Tensor]:
        sources, targets = [text["source"] for text in texts], [text["target"] for text in texts]
        return {
            "input_ids": beside(sources, self.pad),
            "attention_mask": beside([[1] * len(row) for row in sources], 0),
            "decoder_input_ids": beside([[self.start, *row[:-1]] for row in targets], self.pad),
            "labels": beside(targets, HIDDEN),
        }


@dataclass
class Theirs:
    """transformers' Trainer."""

    model: transformers.PreTrainedModel
    batches: Batches
    collate: Callable[[Sequence[Texts]], dict[str, Tensor]]
    plan: TrainingPlan
    folder: Path
    smoothing: float = 0.0

    def __call__(self, steps: int) -> float:
        arguments = transformers.TrainingArguments(
            str(self.folder),
            per_device_train_batch_size=self.batches.count,
            max_steps=steps,
            learning_rate=self.plan.rate,
            label_smoothing_factor=self.smoothing,
            train_sampling_strategy="sequential",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        texts = self.batches(steps)
        trainer = transformers.Trainer(self.model, arguments, train_dataset=texts, data_collator=self.collate)
        trainer.remove_callback(transformers.PrinterCallback)
        began = time.process_time()
        trainer.train()
        return sum(map(size, texts)) / (time.process_time() - began)


class Recurrent(nn.Module):
    """Bahdanau et al. 2015 as it is commonly written: rectangles, a GRU cell step by step, one product for all logits.

    Widths and parts are those of models.recurrent.
    """

    def __init__(self, words: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(words, width), nn.Dropout(dropout)
        self.encoder = nn.GRU(width, hidden // 2, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(width + hidden, hidden)
        self.score = Additive(ScoreWidths(query=hidden, key=hidden))
        self.bridge = nn.Linear(hidden // 2, hidden)
        self.maxout = nn.Linear(width + 2 * hidden, 2 * width)
        self.output = nn.Linear(width, words)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.output.weight = self.tokens.weight

    def forward(self, sources: Tensor, seen: Tensor, given: Tensor) -> Tensor:
        """[N, K] sources, of which the tokens that are `seen` are no padding, and [N, L] targets to [N, L, V]."""
        x = self.dropout(self.tokens(sources))
        packed = pack_padded_sequence(x, seen.sum(1), batch_first=True, enforce_sorted=False)
        out, last = self.encoder(packed)
        rows, _ = pad_packed_sequence(out, batch_first=True)
        keys, state, found = self.score.prepare(rows), self.bridge(last[1]).tanh(), []
        for token in self.dropout(self.tokens(given)).unbind(1):
            weights = masked_softmax(self.score.score_prepared(state[:, None], keys), seen[:, None].bool())
            context = (weights @ rows)[:, 0]
            state = self.cell(torch.cat((token, context), dim=-1), state)
            found.append(torch.cat((state, token, context), dim=-1))
        pairs = self.maxout(torch.stack(found, dim=1))
        logits: Tensor = self.output(self.dropout(pairs.unflatten(-1, (-1, 2)).amax(dim=-1)))
        return logits


@dataclass
class Plain:
    """A loop of torch around it."""

    network: Recurrent
    batches: Batches
    collate: Translated
    plan: TrainingPlan
    smoothing: float

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.plan.rate)
        self.network.train()

    def __call__(self, steps: int) -> float:
        texts, count = self.batches(steps), self.batches.count
        began = time.process_time()
        for at in range(0, len(texts), count):
            self.step(self.collate(texts[at : at + count]))
        return sum(map(size, texts)) / (time.process_time() - began)

    def step(self, batch: dict[str, Any]) -> None:
        logits = self.network(batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"])
        right = batch["labels"].flatten()
        F.cross_entropy(logits.flatten(0, 1), right, ignore_index=HIDDEN, label_smoothing=self.smoothing).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
