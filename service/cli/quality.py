"""How far what would be served is from float32 of the same file: the work of `polyhead quality`.

Knows checkpoints and executors, no requests and no engine.  Both networks read the same tokens, one network after the
other, so that only one is in memory; what is kept of the first is its answers and the states of its layers.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.description import Description, foreign
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.executors.contract import Rows
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import hollow
from polyhead.models.tokenizer import Encoding

from ..config.settings import Settings, read
from ..core.text_limits import cut
from ..engine.head_outputs import Head
from ..resources.machine import give_back
from ..runtime.executor_choice import called, executor_of, prepare
from ..runtime.placement import Place, placed
from ..runtime.self_test import TEXT
from ..text.inputs import BY_TOKEN
from .differences import Answer, Comparison, LayerErrors, Passage, comparison_of
from .opened_checkpoint import found

CHARACTERS = 1 << 20  # of a text that are read
WINDOW = 512  # tokens that a generator reads at once, at most
WINDOWS = 4  # of a generator, at least: they lie evenly over the text, which may change its subject
TOKENS, TOKENS_ENCODED = 448, 2048  # by default: of what answers with a vocabulary, of all others
LEAST_TOKENS, LEAST_TEXTS = 32, 8
BATCH = 16  # texts that are read together
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
REFERENCE = {
    "precision": "float32",
    "executor": "auto",
    "device": "cpu",
    "deterministic": False,
    "tensor_parallel": 1,
    "block_size": 0,
}
Say = Callable[[str, int, int], None]
Step = Sequence[Passage]  # what is computed together


@dataclass(frozen=True)
class Wanted:
    """What `polyhead quality` was asked for.  `text` "": the one that comes with it; `tokens` 0: as many as usual."""

    source: str
    text: str
    precision: str
    tokens: int
    as_json: bool


Outcome = tuple[list[Answer], Tensor]  # of a step: an answer a text, and states [depth, T, W]


def quality(wanted: Wanted, tell: Callable[[str], object], say: Say) -> None:
    """Tell how far it is.  ModelError where it cannot be measured, SettingsError where settings are wrong."""
    settings = read({"precision": wanted.precision})
    text = read_text(Path(wanted.text)) if wanted.text else TEXT.read_text(encoding="utf-8")
    report = Measurement(found(wanted.source, settings.model_dir), settings).report(text, wanted, say)
    tell(json.dumps(report.as_object(), ensure_ascii=False) if wanted.as_json else report.table())


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--text: {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class Report:
    """What was found, of which file and which text."""

    source: str
    task: str
    text: str
    tokens: int
    served: str  # precision and executor
    reference: str
    comparison: Comparison
    layers: list[float]  # relative error of the states that each hands on

    @property
    def worst(self) -> int:
        """The layer over which the error of the states grows most."""
        return max(range(len(self.layers)), key=self.growth)

    def growth(self, layer: int) -> float:
        return self.layers[layer] - (self.layers[layer - 1] if layer else 0.0)

    def as_object(self) -> dict[str, Any]:
        """For programs."""
        precision, executor = self.served.split(" by ")
        return {
            "source": self.source,
            "task": self.task,
            "text": self.text,
            "tokens": self.tokens,
            "precision": precision,
            "executor": executor,
            "reference": self.reference,
            **self.comparison.figures(),
            "layer_errors": self.layers,
            "worst_layer": self.worst,
            "worst_layer_growth": self.growth(self.worst),
        }

    def table(self) -> str:
        """For people."""
        head = f"{self.source}: {self.served}, compared with {self.reference}, {self.tokens} tokens of {self.text}"
        last, most = len(self.layers) - 1, self.growth(self.worst)
        states = f"{self.layers[last]:.4f} after the last layer"
        if most > 0:
            states += f"; it grows most in layer {self.worst} of 0 to {last} ({most:+.4f})"
        rows = [*self.comparison.lines(), ("relative error of states", states)]
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"{name:<{width}}  {figures}" for name, figures in rows)])


class Measurement:
    """Of one source, as `settings` would have it served."""

    def __init__(self, source: str, settings: Settings) -> None:
        """Refuses what cannot be measured before anything is computed."""
        self.source, self.settings = source, settings
        self.what = checkpoint.describe(source)
        if self.what.head.task == "translate":
            message = "it reads one text and writes another; quality is measured of what continues or judges one text"
            raise UnsupportedError(message, file=self.what.file)
        self.reference = settings.model_copy(update=REFERENCE)
        self.place = self._placed(settings)

    def report(self, text: str, wanted: Wanted, say: Say) -> Report:
        """Compute with both and compare."""
        named, task = wanted.text or "the text that comes with polyhead", self.what.head.task
        steps = (windows if task == "generate" else batches)(self.what, text, named, wanted.tokens)
        expected = list(self.outcomes(self.reference, steps, say))
        give_back()
        comparison, layers = comparison_of(task), LayerErrors()
        for step, (answers, states) in zip(steps, self.outcomes(self.settings, steps, say), strict=True):
            right, right_states = expected.pop(0)
            for passage, one, other in zip(step, right, answers, strict=True):
                comparison.add(passage, one, other)
            layers.add(right_states, states)
        return Report(
            source=wanted.source,
            task=task,
            text=named,
            tokens=sum(len(passage.tokens) for step in steps for passage in step),
            served=self._named(self.place),
            reference=self._named(self._placed(self.reference)),
            comparison=comparison,
            layers=layers.means(),
        )

    def _placed(self, settings: Settings) -> Place:
        return placed(settings, self.what.suited, self.what.body)

    def _named(self, place: Place) -> str:
        return f"{place.precision} by {called(place, self.what.body)}"

    def outcomes(self, settings: Settings, steps: Sequence[Step], say: Say) -> Iterator[Outcome]:
        """One a step.  The network is in memory until the last was taken."""
        place = self._placed(settings)
        torch.set_num_threads(place.torch_threads)
        begin = checkpoint.begin if place.instructions else checkpoint.read
        loaded = begin(self.source, self.what, dtype=place.dtype, device=place.device, progress=checkpoint.ignore)

        @contextmanager
        def held(part: nn.Module) -> Iterator[None]:
            loaded.fill(part)
            yield
            hollow(part)

        prepare(loaded, settings)
        longest = max(len(passage.tokens) for step in steps for passage in step)
        blocks = math.ceil(longest / place.block_size) if loaded.task == "generate" else 0
        executor = cast(NativeExecutor | TorchExecutor, executor_of(loaded, settings, blocks, held))
        for number, step in enumerate(steps):
            say(f"{place.precision}: steps", number, len(steps))
            answers, states = outcome(loaded, executor, step)
            if not all(each.values.isfinite().all() for each in answers):
                raise ModelError(f"{self.source}: in {place.precision} it answers with what is no number")
            yield answers, states
        say(f"{place.precision}: steps", len(steps), len(steps))


def windows(what: Description, text: str, named: str, tokens: int) -> list[Step]:
    """Of a generator: some windows of consecutive tokens, one a step, evenly over the text."""
    opening = what.tokenizer.ends[0]
    ids = what.tokenizer.encode(text, special=False).ids
    width, total = min(WINDOW, what.max_tokens) - len(opening), min(tokens or TOKENS, len(ids))
    if width < 2:
        raise UnsupportedError(f"it reads {what.max_tokens} tokens, which is too few to compare", file=what.file)
    if total < LEAST_TOKENS:
        raise ModelError(f"{named}: {total} tokens of it are to be read; {LEAST_TOKENS} at least are wanted")
    count = max(math.ceil(total / width), min(WINDOWS, total // LEAST_TOKENS))
    size = total // count
    starts = (number * (len(ids) - size) // max(count - 1, 1) for number in range(count))
    return [[checked(what, opening + ids[start : start + size], [])] for start in starts]


def batches(what: Description, text: str, named: str, tokens: int) -> list[Step]:
    """Of all others: sentences evenly over the text, or pairs of neighbours, some a step."""
    sentences = [line.strip() for line in SENTENCE.split(text) if len(line.strip()) > 1]
    paired = what.head.task in ("rank", "span") or what.head.both_orders
    if paired:
        encoded = what.tokenizer.encode_batch([*pairwise(sentences)])
    else:
        prompt = what.head.prompts.get("", "")
        encoded = what.tokenizer.encode_batch([prompt + sentence for sentence in sentences])
    if len(encoded) < LEAST_TEXTS:
        raise ModelError(f"{named} has {len(sentences)} sentences; {LEAST_TEXTS} at least are wanted")
    usual = TOKENS if what.head.task == "fill" else TOKENS_ENCODED
    every = math.ceil(sum(map(len, encoded)) / (tokens or usual))
    some = encoded[:: max(1, min(every, len(encoded) // LEAST_TEXTS))]
    texts = [fitting(what, each, paired=paired) for each in some]
    return [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]


def fitting(what: Description, encoding: Encoding, *, paired: bool) -> Passage:
    """The end of what is too long is left out."""
    if len(encoding) > what.max_tokens:
        encoding = encoding.at(cut(encoding.special, what.max_tokens, side="right", pair=paired))
    return checked(what, encoding.ids, encoding.segments if any(encoding.segments) else [])


def checked(what: Description, tokens: list[int], segments: list[int]) -> Passage:
    """ModelError for a number of which the network has no embedding."""
    if reason := foreign(what, tokens, segments):
        raise ModelError(f"{what.file}: {reason}")
    return Passage(tokens, segments if what.config.segments else [])


@torch.inference_mode()
def outcome(loaded: Checkpoint, executor: NativeExecutor | TorchExecutor, step: Step) -> Outcome:
    """What a network answers to the texts of a step, and the states of its layers."""
    starts = list(accumulate((len(passage.tokens) for passage in step), initial=0))
    blocks = list(range(executor.block_count))
    rows = Rows(
        tokens=[token for passage in step for token in passage.tokens],
        positions=[position for passage in step for position in range(len(passage.tokens))],
        starts=starts,
        tables=[blocks[: math.ceil(len(passage.tokens) / executor.block_size)] if blocks else [] for passage in step],
        wanted=list(range(starts[-1])),
        segments=segments_of(step),
    )
    out, states = executor.step_with_states(rows)
    out, states = out.cpu(), states.cpu()
    if loaded.task == "generate":
        return [Answer(out.clone())], states
    return judged(loaded, out, starts), states


def segments_of(step: Step) -> list[int] | None:
    """[T], or None where all are 0."""
    if not any(passage.segments for passage in step):
        return None
    return [segment for passage in step for segment in passage.segments or [0] * len(passage.tokens)]


def judged(loaded: Checkpoint, states: Tensor, starts: list[int]) -> list[Answer]:
    """What a head says of each text, of [T, W] states."""
    head = cast(Head, loaded.head)
    raw = head(states.to(loaded.network.tokens.weight.device), starts).float().cpu()
    parts = [raw[start:end] for start, end in pairwise(starts)] if loaded.task in BY_TOKEN else list(raw[:, None])
    # of a span: where it starts, and where it ends
    closed = [part.T.softmax(-1) if loaded.task == "span" else head.close(part) for part in parts]
    if loaded.task in ("embed", "rank"):
        return [Answer(values) for values in closed]
    several = getattr(loaded.head, "closing", "") == "sigmoid"  # each label is there or is not
    return [Answer(values, values > 0.5 if several else values.argmax(-1, keepdim=True)) for values in closed]
