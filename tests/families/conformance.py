"""Rows of the tables of families: a configuration of transformers, and the class that a folder is saved as."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from torch.nn import functional as F

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.executors.contract import Executor
from polyhead.models.network.heads import read_rows
from polyhead.service.core.request import Encode
from polyhead.service.engine.encoder_worker import pack_texts
from tests.support import checkpoints

TEXTS = ["A good film", "What is the capital of France? Paris, of course. " * 14, ("dull", "far too long"), "0 1 2 3"]
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
LABEL_TASKS = ("classify", "tag")
TWO_SCORES = ("QuestionAnswering", "NextSentence", "ElectraForPreTraining")  # heads whose scores have no names
CLOSE = 2e-5
SEPARATOR = 3  # the token at the end of texts and pairs
SHAPE = dict(num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=checkpoints.POSITIONS)
BERT = dict(SHAPE, hidden_size=32, intermediate_size=48)


@dataclass(frozen=True)
class Row:
    """A configuration with its fields, and the class of the network and head. `texts` are those that are compared."""

    config: Callable[..., tf.PreTrainedConfig]
    kind: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    texts: Sequence[str | tuple[str, str]] = tuple(TEXTS)


def make_rows(family: str, fields: Mapping[str, Any], *heads: str, config: str = "") -> dict[str, Row]:
    """A row for each head of a family; `family` is the prefix of the class names."""
    shape = getattr(tf, config or f"{family}Config")
    return {f"{family}{head}": Row(shape, getattr(tf, family + head), fields) for head in heads}


def save_checkpoint(row: Row, folder: Path, **more: Any) -> Path:
    """A checkpoint folder of random weights, biases and norms included."""
    save_reference(row, folder, **more)
    return folder


def save_reference(row: Row, folder: Path, **more: Any) -> Any:
    """The network of transformers that `save_checkpoint` saves."""
    tokenizer = tokenizer_of_texts()
    torch.manual_seed(4)
    labels: dict[str, Any] = {"id2label": LABELS, "label2id": {label: n for n, label in LABELS.items()}}
    if any(head in row.kind.__name__ for head in TWO_SCORES):
        labels = {}
    if "id2label" in more:
        labels["label2id"] = {label: index for index, label in more["id2label"].items()}
    named = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **labels, **row.fields, **more}
    theirs = row.kind(row.config(**named))
    randomise(theirs)
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return theirs


@cache
def tokenizer_of_texts() -> tf.PreTrainedTokenizerFast:
    return checkpoints.word_piece()


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    """Random weights and biases; those of norms are around 1. What is not trained stays."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:  # not of a fixed table
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)


@torch.inference_mode()
def head_output(loaded: Checkpoint, executor: Executor, texts: Sequence[Any] = TEXTS) -> Tensor:
    """The output of the head for all texts before its activation, computed in one step."""
    head: Any = loaded.head
    encodings = loaded.tokenizer.encode_batch(list(texts))
    rows = pack_texts([Encode("text", tuple(e.ids), segments=tuple(e.segments)) for e in encodings])
    read, starts = read_rows(head, [encoding.ids for encoding in encodings])
    expected, starts = head.needed_rows(starts)
    rows.output_rows.extend(read[row] for row in expected)
    out: Tensor = head(executor.step(rows), starts)
    return out


@torch.inference_mode()
def reference_output(loaded: Checkpoint, theirs: Any, texts: Sequence[Any] = TEXTS) -> Tensor:
    """The same by transformers, one text at a time."""
    answers = []
    for encoding in loaded.tokenizer.encode_batch(list(texts)):
        ids, segments = torch.tensor([encoding.ids]), torch.tensor([encoding.segments])
        given = {"token_type_ids": segments} if loaded.config.segments else {}
        if loaded.task == "choose":  # one text of one choice
            ids, given = ids[None], {name: value[None] for name, value in given.items()}
        answers.append(read_reference(loaded.task, theirs(ids, attention_mask=torch.ones_like(ids), **given)))
    return torch.cat(answers)


def read_reference(task: str, out: Any) -> Tensor:
    """[1 or T, C] the numbers of one text."""
    match task:
        case "embed":
            states: Tensor = out.last_hidden_state.mean(1)
            return states
        case "span":
            return torch.stack([out.start_logits[0], out.end_logits[0]], dim=-1)
        case "tag" | "fill":
            rows: Tensor = out["prediction_logits" if "prediction_logits" in out else "logits"][0]
            return rows if rows.dim() > 1 else F.pad(rows[:, None], (1, 0))  # one score: that of the second label
        case _:
            logits: Tensor = out.logits
            return logits
