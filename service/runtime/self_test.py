"""The accuracy cost of a low precision, measured once when a model is loaded.

A short text goes through the network in float32, one layer at a time, and through the executor that will serve the
model. The cost of a generator is the mean Kullback-Leibler divergence of its next-token distributions, in nats. The
cost of any other network is the mean of 1 - cosine of its hidden states. A cost is stored in a file named by a hash of
all weights (service.runtime.self_test_results), so it is measured again only for other weights, another instruction set
or other kernels.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from polyhead.models.checkpoint.default_precision import DefaultPrecision
from polyhead.models.checkpoint.description import Description, missing_embedding
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core.turns import YieldTurn, keep_turn
from polyhead.models.executors.contract import Executor, StateUse, StepInput, step_in_turns
from polyhead.models.native.library import library_hash
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.quantization.divergence import Divergence

from ..config.settings import Settings
from .placement import Placement, choose_placement
from .self_test_results import FileHashes, PrecisionCosts

TEXT_FILE = Path(__file__).parent / "quality.txt"  # prose and code of several kinds
WINDOW_COUNT, WINDOW_TOKENS = 4, 32  # windows of the text, and tokens of each
COMPARED_ROWS = 8  # rows at the end of each window whose predictions are compared: a vocabulary may be large
COMPUTING_TURN_S = 0.02  # of the text of an encoder, between two turns of others
TESTED_PRECISIONS = ("int8", "int4")


def read_costs(description: Description, hashes: FileHashes, check: Callable[[], None]) -> PrecisionCosts:
    """Return the known costs of these weights. Reads all weights to hash them, unless their hashes are stored. Raises
    CheckpointError.
    """
    return PrecisionCosts(hashes.folder, fingerprint_weights(description, lambda path: hashes.hash_file(path, check)))


def find_known_costs(description: Description, hashes: FileHashes) -> PrecisionCosts | None:
    """Return the known costs without reading weights; None if the hash of a file is not stored."""
    if not all(hashes.find(path) for path in weight_files(description)):
        return None
    return PrecisionCosts(hashes.folder, fingerprint_weights(description, hashes.find))


def weight_hashes(settings: Settings) -> FileHashes:
    return FileHashes(settings.model_dir / "fidelity")


def weight_files(description: Description) -> list[Path]:
    """Return all files from which its tensors are read."""
    return sorted({path for entry in description.entries.values() for path in entry.files})


def fingerprint_weights(description: Description, hash_file: Callable[[Path], str]) -> str:
    """Return a SHA-256 of all that the cost depends on: every byte of the weights, how they are converted, and the
    tokens of the test.
    """
    hashes = {path: hash_file(path) for path in weight_files(description)}
    tokens = (
        description.tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"), special=False).ids,
        description.tokenizer.boundary_tokens,
    )
    network = (
        description.family,
        description.config,
        description.head.task,
        description.head.ignored_names,
        description.head.decoder_configs,
    )
    found = hashlib.sha256(repr((network, tokens, description.max_tokens)).encode())
    for name, entry in sorted(description.entries.items()):
        source = [hashes[path] for path in entry.files]
        found.update(repr((name, entry.kind, entry.shape, entry.transformation, source)).encode())
    return found.hexdigest()


def cost_key(placement: Placement) -> str:
    return f"{placement.precision} {placement.instructions} {library_hash(placement.instructions)}"


def is_tested(placement: Placement) -> bool:
    """Whether the cost of a model with this placement is measured."""
    return bool(placement.instructions) and placement.precision in TESTED_PRECISIONS


def precision_test_bytes(placement: Placement, vocabulary: int) -> int:
    """Return the bytes that a generator's self-test keeps while weights are read and packed: its logits in float32."""
    return WINDOW_COUNT * COMPARED_ROWS * vocabulary * torch.float32.itemsize if is_tested(placement) else 0


def apply_known_cost(description: Description, settings: Settings) -> Description:
    """Make float32 the default precision if the usual one is already known to cost more than `max_kl`. Reads no
    weights.
    """
    placement = choose_placement(settings, description.default_precision, description.decoder_config)
    if settings.precision != "auto" or not is_tested(placement):
        return description
    costs = find_known_costs(description, weight_hashes(settings))
    cost = costs.find(cost_key(placement)) if costs is not None else None
    return (
        prefer_float32(description, placement, cost, settings)
        if cost is not None and cost > settings.max_kl
        else description
    )


def prefer_float32(description: Description, placement: Placement, cost: float, settings: Settings) -> Description:
    bound = f"more than max_kl, which is {settings.max_kl:g}"
    reason = f"its answers in {placement.precision} are {describe_cost(cost, description)}, {bound}"
    return replace(description, preferred_precision=DefaultPrecision("float32", reason))


def describe_cost(cost: float, description: Description) -> str:
    """Format a cost for messages."""
    if description.head.task == "generate":
        return f"{cost:.2g} nats (KL) from float32's"
    return f"{cost:.2g} (1 - cosine) from float32's"


class SelfTest:
    """The test of one model: `compute_reference` computes in float32 before the weights are packed, `compare` with the
    executor that will serve, and `store_cost` keeps what was measured.
    """

    def __init__(
        self,
        description: Description,
        placement: Placement,
        settings: Settings,
        longest: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the weights once to hash them, unless their hash is stored. Raises CheckpointError, and what `check`
        raises.

        `longest`: tokens that the cache holds, in windowed layers too, or without a cache those of the longest text.
        `check` is called after each MiB that is read.
        """
        self.description, self._hashes, self._key = description, weight_hashes(settings), cost_key(placement)
        self._costs = read_costs(description, self._hashes, check)
        self.cost = self._costs.find(self._key)
        self._texts = self_test_windows(description, longest) if self.cost is None else []
        self._reference = torch.empty(0)
        self._is_measured = False

    @property
    def _is_due(self) -> bool:
        """Whether the cost is unknown and there is a text to measure it with."""
        return self.cost is None and bool(self._texts)

    def compute_reference(self, weights: WeightReader, progress: Callable[[int, int], None]) -> None:
        """Compute the reference in float32, reading the weights of one layer at a time; afterwards none are in memory.
        Does nothing if the cost is known.

        `progress` gets the bytes read and the bytes in all, often and outside of torch's inference mode: it may let
        other models compute.
        """
        if not self._is_due:
            return
        network = weights.network
        weights.begin(progress)

        @contextmanager
        def load_part(part: nn.Module) -> Iterator[None]:
            weights.load(part, torch.float32, torch.device("cpu"))
            with torch.inference_mode():
                yield
            weights.unload(part)

        small = network.outer_parts()
        weights.load(small, torch.float32, torch.device("cpu"))
        with load_part(network.tokens):
            x, frame = network.embed(RaggedBatch.of(self._texts))
        blocks = list(network.blocks)
        for same in [blocks] if network.config.shared else [[block] for block in blocks]:  # those of the same weights
            with load_part(same[0]):
                for block in same:
                    x = block(x, frame)
                    weights.yield_turn()
        with torch.inference_mode():
            starts = accumulate(map(len, self._texts), initial=0)
            rows = [
                start + row
                for start, text in zip(starts, self._texts, strict=False)
                for row in self._compared_rows(text)
            ]
            x = network.close(x)[rows]
        weights.unload(small)
        if self.description.head.task == "generate":
            with load_part(weights.head):
                x = weights.head(x)
        self._reference = x

    @torch.inference_mode()
    def compare(self, executor: Executor, yield_turn: YieldTurn = keep_turn) -> None:
        """Measure the cost; `store_cost` should be called afterwards. Does nothing if the cost is known.

        `yield_turn` is called after each text, and while the text of an encoder is computed: its layers may be many,
        with one set of tensors.
        """
        if not self._is_due:
            return
        outputs = []
        for text in self._texts:
            for states in compute_in_turns(executor, self._rows_of(text, executor)):
                outputs += [] if states is None else [states]
                yield_turn()
        found = torch.cat(outputs)
        expected, self._reference = self._reference, torch.empty(0)
        if not found.isfinite().all():
            self.cost = float("inf")
        elif self.description.head.task == "generate":
            divergence = Divergence()
            for p, q in zip(torch.split(expected, COMPARED_ROWS), torch.split(found, COMPARED_ROWS), strict=True):
                divergence.add(p, q, p.argmax(-1))  # the token that followed does not matter for the divergence
            self.cost = divergence.figures.kl_mean
        else:
            self.cost = float(1 - torch.cosine_similarity(expected, found, dim=-1).double().mean())
        self._is_measured = True

    def store_cost(self) -> None:
        """Store the cost that was measured, unless a weight file has changed since it was hashed. It looks at every
        tensor's description, of which there may be very many, so the engine's thread should not.
        """
        if self._is_measured and find_known_costs(self.description, self._hashes) == self._costs:
            assert self.cost is not None, "it was measured"
            self._costs.store(self._key, self.cost)

    def _compared_rows(self, text: list[int]) -> range:
        """Return the rows of a text that are compared: the last ones for a generator, else all."""
        most = COMPARED_ROWS if self.description.head.task == "generate" else len(text)
        return range(max(len(text) - most, 0), len(text))

    def _rows_of(self, text: list[int], executor: Executor) -> StepInput:
        blocks = -(-len(text) // executor.block_size) if executor.block_size else 0
        count = len(text)
        states = [StateUse(read=-1, write=0)] if executor.state_count else None
        compared, first = list(self._compared_rows(text)), executor.block_count
        windows = [list(range(first, first + blocks))] if executor.window_blocks else None
        return StepInput(
            text, list(range(count)), [0, count], [list(range(blocks))], compared, states=states, window_tables=windows
        )


def compute_in_turns(executor: Executor, rows: StepInput) -> Iterator[Tensor | None]:
    """The result of a step, after None for each turn that did not finish it. A step with a cache has one turn."""
    if executor.block_size:
        return iter([executor.step(rows).clone()])
    return step_in_turns(executor, rows, COMPUTING_TURN_S)


def self_test_windows(description: Description, longest: int) -> list[list[int]]:
    """Return evenly spaced windows of the bundled text, of at most `longest` tokens each; none if the network cannot
    read them.
    """
    ids = description.tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"), special=False).ids
    opening, closing = description.tokenizer.boundary_tokens
    width = min(
        WINDOW_TOKENS, min(longest, description.max_tokens) - len(opening) - len(closing), len(ids) // WINDOW_COUNT
    )
    if width < 1 or missing_embedding(description, [*ids, *opening, *closing], []):
        return []
    starts = (number * (len(ids) - width) // (WINDOW_COUNT - 1) for number in range(WINDOW_COUNT))
    closed = [] if description.head.task == "generate" else closing
    return [opening + ids[start : start + width] + closed for start in starts]
