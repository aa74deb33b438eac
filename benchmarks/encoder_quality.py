"""Measure the quality of encoders with narrow weights and activations, on real data, against float32.

A part of benchmarks.quality. The sentiment classifier labels the sentences that its recipe held out. The embedder's
vectors of real sentences are compared by their cosine. Four-bit weights are calibrated first, on editorials that are
not measured on. Everything runs on the compiled step.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.prose import sentences
from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.executors.contract import StepInput
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.quantization.quantize import calibrate
from polyhead.service.runtime import quickstart
from polyhead.training.data import vader
from polyhead.training.data.examples import Example
from polyhead.training.recipes import recipe

WINDOW = 512  # tokens
BATCH = 32  # texts
SHOWN = 24_576  # tokens, to calibrate by
REVIEWS = ("movieReviewSnippets", "amazonReviewSnippets")
EDITORIALS = ("nytEditorialSnippets",)
Found = dict[str, Any]  # a row of a table, for programs
RECIPE = Path(recipe.__file__).parent / "sentiment.toml"


def windows(loaded: Checkpoint, folder: Path, tokens: int, *files: str) -> list[list[int]]:
    """Windows of some corpora, sentence after sentence in their own order; each opens as any text of this model."""
    opening, closing = loaded.tokenizer.boundary_tokens
    width, found = WINDOW - len(opening) - len(closing), []
    for file in files:
        text = " ".join(sentences(folder / "prose", 1 << 20, file))
        ids = loaded.tokenizer.encode(text, special=False).ids
        starts = range(0, min(tokens // len(files), len(ids) - width), width)
        found += [opening + ids[start : start + width] + closing for start in starts]
    return found


def prepared(source: str, precision: Precision, folder: Path, shown: Sequence[str]) -> Checkpoint:
    """The checkpoint as it would be run: weights of four bits are calibrated on the corpora `shown`."""
    loaded = checkpoint.load(source)
    if precision == "int4":
        calibrate(loaded.network, None, windows(loaded, folder, SHOWN, *shown))
    return loaded


def encoded(loaded: Checkpoint, precision: Precision, texts: list[str], threads: int) -> Tensor:
    """What the head makes of each text, before it is closed."""
    executor = NativeExecutor(loaded.network, precision=precision, threads=threads)
    return torch.cat([answers(loaded, executor, texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)])


@torch.inference_mode()
def answers(loaded: Checkpoint, executor: NativeExecutor, texts: list[str]) -> Tensor:
    tokens = [each.ids for each in loaded.tokenizer.encode_batch(texts)]
    starts = list(accumulate(map(len, tokens), initial=0))
    wanted, heads = loaded.head.wanted(starts)  # type: ignore[operator]
    positions = [position for text in tokens for position in range(len(text))]
    flat = [token for text in tokens for token in text]
    states = executor.step(StepInput(flat, positions, starts, [[]] * len(texts), wanted))
    return loaded.head.close(loaded.head(states, heads))  # type: ignore[no-any-return, operator]


def held_out(folder: Path) -> list[Example[int]]:
    """The sentences that the sentiment adapter of the quick start was never shown."""
    return recipe.split_corpus(recipe.read_recipe(RECIPE).data, vader.corpus(folder / "prose")).held_out


def classifying(folder: Path, precisions: list[Precision], threads: int) -> Iterator[Found]:
    source = quickstart.sources(folder)["sentiment"]
    examples = held_out(folder)
    texts, labels = [example.text for example in examples], torch.tensor([example.label for example in examples])
    expected = encoded(checkpoint.load(source), "float32", texts, threads)
    right = float((expected.argmax(-1) == labels).float().mean())
    for precision in precisions:
        found = encoded(prepared(source, precision, folder, EDITORIALS), precision, texts, threads)
        yield {
            "file": "sentiment",
            "engine": f"Polyhead {precision}",
            "texts": len(texts),
            "accuracy": float((found.argmax(-1) == labels).float().mean()),
            "reference_accuracy": right,
            "label_agreement": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
            "probability_change_max": float((found - expected).abs().max()),
        }


def embedding(folder: Path, precisions: list[Precision], threads: int) -> Iterator[Found]:
    source = quickstart.sources(folder)["minilm"]
    texts = sentences(folder / "prose", 1000, *REVIEWS, "tweets")
    expected = encoded(checkpoint.load(source), "float32", texts, threads)
    for precision in precisions:
        cosine = torch.cosine_similarity(
            encoded(prepared(source, precision, folder, EDITORIALS), precision, texts, threads), expected
        )
        yield {
            "file": "minilm",
            "engine": f"Polyhead {precision}",
            "texts": len(texts),
            "cosine_mean": float(cosine.mean()),
            "cosine_p1": float(cosine.quantile(0.01)),
            "cosine_min": float(cosine.min()),
        }


def found(folder: Path, precisions: list[Precision], threads: int) -> Iterator[Found]:
    """A row for each precision, of the embedder, then of the classifier."""
    torch.set_num_threads(threads)
    yield from embedding(folder, precisions, threads)
    yield from classifying(folder, precisions, threads)
