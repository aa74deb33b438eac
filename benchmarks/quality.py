"""What narrow weights and activations cost in quality, on real data, against the same checkpoint in float32.

    python -m benchmarks.quality [--tokens 50000] [--precision int8 int4]

The generator of the quick start reads newspaper editorials in windows of 512 tokens: its perplexity, the mean
Kullback-Leibler divergence of its next-token distributions from those in float32, and how often both have the same
favourite.  The sentiment classifier labels the sentences that its recipe held out.  The embedder's vectors of real
sentences are compared by their cosine.  Weights of four bits are calibrated first, on reviews
for the generator, on editorials for the others, which are not measured on them.  Everything runs on the compiled step;
nothing is timed.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.prose import sentences
from benchmarks.serving import machine
from models import checkpoint
from models.checkpoint import Checkpoint
from models.executor import Rows
from models.heads import LanguageHead
from models.native.executor import BLOCK, NativeExecutor
from models.native.plan import Precision
from models.quantize import calibrate
from service import machine as capacity
from service import quickstart, settings
from training import recipe, vader
from training.data import Example

WINDOW = 512  # tokens
BATCH = 32  # texts
SHOWN = 24_576  # tokens, to calibrate by
REVIEWS = ("movieReviewSnippets", "amazonReviewSnippets")
EDITORIALS = ("nytEditorialSnippets",)
RECIPE = Path(recipe.__file__).parent / "recipes" / "sentiment.toml"


@dataclass
class Divergence:
    """How far one model is from another over some tokens: sums that grow window by window."""

    tokens: int = 0
    surprise: float = 0.0  # nats, of the model itself
    expected: float = 0.0  # nats, of the reference
    divergence: float = 0.0  # nats
    agreed: int = 0

    def add(self, reference: Tensor, other: Tensor, following: Tensor) -> None:
        """[T, V] logits of both before the [T] tokens that followed."""
        p, q = reference.log_softmax(-1), other.log_softmax(-1)
        self.tokens += len(following)
        self.expected -= float(p.gather(1, following[:, None]).sum())
        self.surprise -= float(q.gather(1, following[:, None]).sum())
        self.divergence += float((p.exp() * (p - q)).sum())
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())

    def __str__(self) -> str:
        perplexities = (math.exp(nats / self.tokens) for nats in (self.surprise, self.expected))
        return (
            "perplexity {:.3f} (float32 {:.3f})  ".format(*perplexities)
            + f"KL {self.divergence / self.tokens:.4f}  same favourite {self.agreed / self.tokens:.2%}"
        )


def windows(loaded: Checkpoint, folder: Path, tokens: int, *files: str) -> list[list[int]]:
    """Windows of some corpora, sentence after sentence in their own order; each opens as any text of this model."""
    opening, closing = ends(loaded)
    width, found = WINDOW - len(opening) - len(closing), []
    for file in files:
        text = " ".join(sentences(folder / "prose", 1 << 20, file))
        ids = loaded.tokenizer.encode(text, special=False).ids
        starts = range(0, min(tokens // len(files), len(ids) - width), width)
        found += [opening + ids[start : start + width] + closing for start in starts]
    return found


def ends(loaded: Checkpoint) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    empty = loaded.tokenizer.encode("").ids
    return empty[: -(-len(empty) // 2)], empty[-(-len(empty) // 2) :]


def prepared(source: str, precision: Precision, folder: Path, shown: Sequence[str]) -> Checkpoint:
    """The checkpoint as it would be run: weights of four bits are calibrated on the corpora `shown`."""
    loaded = checkpoint.load(source)
    if precision == "int4":
        calibrate(loaded.network, None, windows(loaded, folder, SHOWN, *shown))
    return loaded


def generator(loaded: Checkpoint, precision: Precision, threads: int) -> NativeExecutor:
    head = cast(LanguageHead, loaded.head)
    return NativeExecutor(loaded.network, head, precision=precision, block_count=-(-WINDOW // BLOCK), threads=threads)


def logits(executor: NativeExecutor, window: Sequence[int]) -> Tensor:
    """[T, V]; good until the executor's next step."""
    count = len(window)
    blocks = list(range(executor.block_count))
    return executor.step(Rows(list(window), list(range(count)), [0, count], [blocks], list(range(count))))


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
    states = executor.step(Rows(flat, positions, starts, [[]] * len(texts), wanted))
    return loaded.head.close(loaded.head(states, heads))  # type: ignore[no-any-return, operator]


def held_out(folder: Path) -> list[Example[int]]:
    """The sentences that the sentiment adapter of the quick start was never shown."""
    return recipe.divide(recipe.read(RECIPE).data, vader.corpus(folder / "prose")).held_out


def generating(folder: Path, precisions: list[Precision], tokens: int, threads: int) -> Iterator[str]:
    source = quickstart.sources(folder)["smollm2"]
    loaded = checkpoint.load(source)
    reference = generator(loaded, "float32", threads)
    others = {
        precision: generator(prepared(source, precision, folder, REVIEWS), precision, threads)
        for precision in precisions
    }
    found = {precision: Divergence() for precision in precisions}
    for window in windows(loaded, folder, tokens, *EDITORIALS):
        following = torch.tensor(window[1:])
        expected = logits(reference, window)[:-1]
        for precision, other in others.items():
            found[precision].add(expected, logits(other, window)[:-1], following)
    for precision, divergence in found.items():
        yield f"{precision}: SmolLM2-135M, {divergence.tokens} tokens: {divergence}"


def classifying(folder: Path, precisions: list[Precision], threads: int) -> Iterator[str]:
    source = quickstart.sources(folder)["sentiment"]
    examples = held_out(folder)
    texts, labels = [example.text for example in examples], torch.tensor([example.label for example in examples])
    expected = encoded(checkpoint.load(source), "float32", texts, threads)
    right = float((expected.argmax(-1) == labels).float().mean())
    for precision in precisions:
        found = encoded(prepared(source, precision, folder, EDITORIALS), precision, texts, threads)
        same = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
        yield (
            f"{precision}: sentiment, {len(texts)} held-out sentences: accuracy "
            f"{float((found.argmax(-1) == labels).float().mean()):.2%} (float32 {right:.2%})  same label {same:.2%}  "
            f"largest difference of a probability {float((found - expected).abs().max()):.4f}"
        )


def embedding(folder: Path, precisions: list[Precision], threads: int) -> Iterator[str]:
    source = quickstart.sources(folder)["minilm"]
    texts = sentences(folder / "prose", 1000, *REVIEWS, "tweets")
    expected = encoded(checkpoint.load(source), "float32", texts, threads)
    for precision in precisions:
        cosine = torch.cosine_similarity(
            encoded(prepared(source, precision, folder, EDITORIALS), precision, texts, threads), expected
        )
        yield (
            f"{precision}: MiniLM, {len(texts)} sentences: cosine mean {float(cosine.mean()):.5f}  "
            f"1st percentile {float(cosine.quantile(0.01)):.5f}  least {float(cosine.min()):.5f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--precision", nargs="+", default=["int8", "int4"], choices=("int8", "int4"))
    options = parser.parse_args()
    threads, folder = capacity.compute_threads(), settings.default_model_dir()
    torch.set_num_threads(threads)
    print(machine())
    for line in embedding(folder, options.precision, threads):
        print(line, flush=True)
    for line in classifying(folder, options.precision, threads):
        print(line, flush=True)
    for line in generating(folder, options.precision, options.tokens, threads):
        print(line, flush=True)


if __name__ == "__main__":
    settings.prepare_process()
    main()
