"""`polyhead quality`: how far a model as it would be served is from float32 of the same file.

Both networks read the same tokens, one network after the other, so only one is in memory.  Outputs and layer states of
the first are kept for the comparison.
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
from polyhead.models.checkpoint.description import Description, missing_embedding
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.executors.contract import StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import PackHooks, free_weights
from polyhead.models.network.heads import read_rows
from polyhead.models.tokenizer import Encoding

from ..config.settings import Settings, read_settings
from ..core.text_limits import truncate_rows
from ..engine.head_outputs import OutputHead
from ..resources.machine import return_free_memory
from ..runtime import quickstart
from ..runtime.executor_choice import CacheSize, build_executor, executor_name, make_deterministic
from ..runtime.placement import Placement, choose_placement
from ..runtime.self_test import TEXT_FILE
from ..text.encoder_inputs import TOKEN_TASKS
from .checkpoint_source import describe_checked
from .differences import Comparison, EncodedText, LayerErrors, ModelOutput, new_comparison

MAX_CHARACTERS = 1 << 20  # of a text that are read
WINDOW_TOKENS = 512  # tokens that a generator reads at once, at most
MIN_WINDOWS = 4  # for a generator, at least: evenly over the text, whose subject may change
GENERATOR_TOKENS, ENCODER_TOKENS = 448, 2048  # by default: for models with a vocabulary output, and for all others
MIN_TOKENS, MIN_TEXTS = 32, 8
BATCH_TEXTS = 16  # texts in a batch
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
REFERENCE_CHANGES = {
    "precision": "float32",
    "executor": "auto",
    "device": "cpu",
    "deterministic": False,
    "tensor_parallel": 1,
    "block_size": 0,
}
ProgressCallback = Callable[[str, int, int], None]
TextBatch = Sequence[EncodedText]  # texts computed together


@dataclass(frozen=True)
class QualityArguments:
    """The arguments of `polyhead quality`.  `text` "": the text that comes with polyhead; `tokens` 0: the default
    number.
    """

    source: str
    text: str
    precision: str
    tokens: int
    as_json: bool


BatchOutput = tuple[list[ModelOutput], Tensor]  # an output per text, and states [depth, T, W]


def measure_quality(
    arguments: QualityArguments, print_text: Callable[[str], object], report_progress: ProgressCallback
) -> None:
    """Print the report.  Raises ModelError if it cannot be measured, SettingsError if settings are wrong."""
    settings = read_settings({"precision": arguments.precision})
    text = read_text(Path(arguments.text)) if arguments.text else TEXT_FILE.read_text(encoding="utf-8")
    report = QualityMeasurement(quickstart.resolve_source(arguments.source, settings.model_dir), settings).measure(
        text, arguments, report_progress
    )
    print_text(json.dumps(report.as_dict(), ensure_ascii=False) if arguments.as_json else report.as_table())


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--text: {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class QualityReport:
    """The result of a measurement."""

    source: str
    task: str
    text: str
    tokens: int
    served: str  # precision and executor
    reference: str
    comparison: Comparison
    layers: list[float]  # relative error of each layer's output states

    @property
    def worst_layer(self) -> int:
        """The layer that adds most error to the states."""
        return max(range(len(self.layers)), key=self.error_growth)

    def error_growth(self, layer: int) -> float:
        return self.layers[layer] - (self.layers[layer - 1] if layer else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
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
            "worst_layer": self.worst_layer,
            "worst_layer_growth": self.error_growth(self.worst_layer),
        }

    def as_table(self) -> str:
        """Format the report as text."""
        head = f"{self.source}: {self.served}, compared with {self.reference}, {self.tokens} tokens of {self.text}"
        last, most = len(self.layers) - 1, self.error_growth(self.worst_layer)
        states = f"{self.layers[last]:.4f} after the last layer"
        if most > 0:
            states += f"; it grows most in layer {self.worst_layer} of 0 to {last} ({most:+.4f})"
        rows = [*self.comparison.table_rows(), ("relative error of states", states)]
        width = max(len(name) for name, _ in rows)
        return "\n".join([head, *(f"{name:<{width}}  {figures}" for name, figures in rows)])


class QualityMeasurement:
    """Measures one source with the settings it would be served with."""

    def __init__(self, source: str, settings: Settings) -> None:
        """Raises UnsupportedError before anything is computed if the model cannot be measured."""
        self.source, self.settings = source, settings
        self.description = describe_checked(source)
        if self.description.head.task == "translate":
            message = "it reads one text and writes another; quality is measured of what continues or judges one text"
            raise UnsupportedError(message, file=self.description.file)
        self.reference = settings.model_copy(update=REFERENCE_CHANGES)
        self.placement = self._choose_placement(settings)

    def measure(self, text: str, arguments: QualityArguments, report_progress: ProgressCallback) -> QualityReport:
        """Compute with both networks and compare."""
        text_name, task = arguments.text or "the text that comes with polyhead", self.description.head.task
        steps = (cut_windows if task == "generate" else cut_batches)(
            self.description, text, text_name, arguments.tokens
        )
        expected = list(self.run_batches(self.reference, steps, report_progress))
        return_free_memory()
        comparison, layers = new_comparison(task), LayerErrors()
        for step, (answers, states) in zip(steps, self.run_batches(self.settings, steps, report_progress), strict=True):
            expected_output, expected_states = expected.pop(0)
            for passage, one, other in zip(step, expected_output, answers, strict=True):
                comparison.add(passage, one, other)
            layers.add(expected_states, states)
        return QualityReport(
            source=arguments.source,
            task=task,
            text=text_name,
            tokens=sum(len(passage.tokens) for step in steps for passage in step),
            served=self._describe_placement(self.placement),
            reference=self._describe_placement(self._choose_placement(self.reference)),
            comparison=comparison,
            layers=layers.means(),
        )

    def _choose_placement(self, settings: Settings) -> Placement:
        return choose_placement(settings, self.description.default_precision, self.description.decoder_config)

    def _describe_placement(self, placement: Placement) -> str:
        return f"{placement.precision} by {executor_name(placement, self.description.decoder_config)}"

    def run_batches(
        self, settings: Settings, steps: Sequence[TextBatch], report_progress: ProgressCallback
    ) -> Iterator[BatchOutput]:
        """Yield the output of each batch.  The network is in memory until the last one is taken."""
        placement = self._choose_placement(settings)
        torch.set_num_threads(placement.torch_threads)
        begin = checkpoint.prepare if placement.instructions else checkpoint.load_built
        loaded = begin(
            self.source,
            WeightReader(self.description),
            dtype=placement.dtype,
            device=placement.device,
            progress=checkpoint.ignore_progress,
        )

        @contextmanager
        def load_part(part: nn.Module) -> Iterator[None]:
            loaded.load_blocks(part)
            yield
            free_weights(part)

        make_deterministic(loaded, settings, placement)
        longest = max(len(passage.tokens) for step in steps for passage in step)
        blocks = math.ceil(longest / placement.block_size) if loaded.task == "generate" else 0
        cache = CacheSize(blocks, int(blocks > 0 and loaded.config.is_recurrent))
        built = build_executor(loaded, settings, placement, cache, PackHooks(load_part))
        executor = cast(NativeExecutor | TorchExecutor, built)
        for number, step in enumerate(steps):
            report_progress(f"{placement.precision}: steps", number, len(steps))
            answers, states = run_batch(loaded, executor, step)
            if not all(each.values.isfinite().all() for each in answers):
                raise ModelError(f"{self.source}: in {placement.precision} its output has values that are not finite")
            yield answers, states
        report_progress(f"{placement.precision}: steps", len(steps), len(steps))


def cut_windows(description: Description, text: str, text_name: str, tokens: int) -> list[TextBatch]:
    """Cut a generator's text into windows of consecutive tokens, evenly over the text, one per batch."""
    opening = description.tokenizer.boundary_tokens[0]
    ids = description.tokenizer.encode(text, special=False).ids
    width, total = min(WINDOW_TOKENS, description.max_tokens) - len(opening), min(tokens or GENERATOR_TOKENS, len(ids))
    if width < 2:
        raise UnsupportedError(
            f"it reads {description.max_tokens} tokens, which is too few to compare", file=description.file
        )
    if total < MIN_TOKENS:
        raise ModelError(f"{text_name}: {total} tokens of it are read; at least {MIN_TOKENS} are needed")
    count = max(math.ceil(total / width), min(MIN_WINDOWS, total // MIN_TOKENS))
    size = total // count
    starts = (number * (len(ids) - size) // max(count - 1, 1) for number in range(count))
    return [[check_tokens(description, opening + ids[start : start + size], [])] for start in starts]


def cut_batches(description: Description, text: str, text_name: str, tokens: int) -> list[TextBatch]:
    """Take sentences evenly over the text, or pairs of neighbours, in batches."""
    sentences = [line.strip() for line in SENTENCE_END.split(text) if len(line.strip()) > 1]
    paired = description.head.task in ("rank", "choose", "span") or description.head.both_orders
    if paired:
        encoded = description.tokenizer.encode_batch([*pairwise(sentences)])
    else:
        prompt = description.head.prompts.get("", "")
        encoded = description.tokenizer.encode_batch([prompt + sentence for sentence in sentences])
    if len(encoded) < MIN_TEXTS:
        raise ModelError(f"{text_name} has {len(sentences)} sentences; at least {MIN_TEXTS} are needed")
    usual = GENERATOR_TOKENS if description.head.task == "fill" else ENCODER_TOKENS
    every = math.ceil(sum(map(len, encoded)) / (tokens or usual))
    chosen = encoded[:: max(1, min(every, len(encoded) // MIN_TEXTS))]
    texts = [truncate_text(description, each, paired=paired) for each in chosen]
    return [texts[start : start + BATCH_TEXTS] for start in range(0, len(texts), BATCH_TEXTS)]


def truncate_text(description: Description, encoding: Encoding, *, paired: bool) -> EncodedText:
    """Truncate an encoding on the right."""
    if len(encoding) > description.max_tokens:
        encoding = encoding.select_rows(
            truncate_rows(encoding.special, description.max_tokens, side="right", pair=paired)
        )
    return check_tokens(description, encoding.ids, encoding.segments if any(encoding.segments) else [])


def check_tokens(description: Description, tokens: list[int], segments: list[int]) -> EncodedText:
    """Return the text's tokens.  Raises ModelError for an id without an embedding."""
    if reason := missing_embedding(description, tokens, segments):
        raise ModelError(f"{description.file}: {reason}")
    return EncodedText(tokens, segments if description.config.segments else [])


@torch.inference_mode()
def run_batch(loaded: Checkpoint, executor: NativeExecutor | TorchExecutor, step: TextBatch) -> BatchOutput:
    """Run the network on a batch.  Returns its outputs, and the states of its layers."""
    starts = list(accumulate((len(passage.tokens) for passage in step), initial=0))
    blocks = list(range(executor.block_count))
    rows = StepInput(
        tokens=[token for passage in step for token in passage.tokens],
        positions=[position for passage in step for position in range(len(passage.tokens))],
        starts=starts,
        block_tables=[
            blocks[: math.ceil(len(passage.tokens) / executor.block_size)] if blocks else [] for passage in step
        ],
        output_rows=list(range(starts[-1])),
        segments=batch_segments(step),
        states=[StateUse(read=-1, write=0)] if executor.state_count else None,  # a generator's batch is one window
    )
    out, states = executor.step_with_states(rows)
    out, states = out.cpu(), states.cpu()
    if loaded.task == "generate":
        return [ModelOutput(out.clone())], states
    shown, starts = read_rows(loaded.head, [passage.tokens for passage in step])
    return apply_head(loaded, out[shown], starts), states


def batch_segments(step: TextBatch) -> list[int] | None:
    """Return the segment ids [T]; None if all are 0."""
    if not any(passage.segments for passage in step):
        return None
    return [segment for passage in step for segment in passage.segments or [0] * len(passage.tokens)]


def apply_head(loaded: Checkpoint, states: Tensor, starts: list[int]) -> list[ModelOutput]:
    """Apply the head to states [T, W] of several texts."""
    head = cast(OutputHead, loaded.head)
    raw = head(states.to(loaded.network.tokens.weight.device), starts).float().cpu()
    parts = [raw[start:end] for start, end in pairwise(starts)] if loaded.task in TOKEN_TASKS else list(raw[:, None])
    # of a span: the start and the end
    closed = [part.T.softmax(-1) if loaded.task == "span" else head.postprocess(part) for part in parts]
    if loaded.task in ("embed", "rank", "choose"):
        return [ModelOutput(values) for values in closed]
    several = getattr(loaded.head, "score_activation", "") == "sigmoid"  # each label is present or not
    return [ModelOutput(values, values > 0.5 if several else values.argmax(-1, keepdim=True)) for values in closed]
