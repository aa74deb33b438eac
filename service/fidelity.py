"""What a narrow precision costs a model, measured once when it is loaded.

A short text goes through the network in float32, a layer at a time, and through the executor that will serve it.  The
cost of a generator is the mean Kullback-Leibler divergence of its next-token distributions, in nats; of any other
network the mean of 1 - cosine of its states.  A cost is kept in a file named by a hash of samples of the weights, so
that it is measured again only for other weights, another processor or other kernels.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from models.checkpoint.description import Description, blank, foreign
from models.checkpoint.precision import Suited
from models.checkpoint.weights import Weights
from models.divergence import Divergence
from models.errors import CheckpointError
from models.executor import Executor, Rows
from models.native.library import made_of
from models.native.plan import hollow
from models.ragged import Ragged
from models.transformer import Transformer
from service.place import Place, placed
from service.settings import Settings

TEXT = Path(__file__).parent / "quality.txt"  # prose and code of several kinds
TEXTS, TOKENS = 4, 32  # windows of the text, and tokens of each
ROWS = 8  # of each window, the last ones, whose predictions are compared: a vocabulary may be large
SAMPLES, SAMPLE = 16, 1 << 16  # pieces of a file that are hashed, and their bytes
NARROW = ("int8", "int4")
log = logging.getLogger("polyhead.fidelity")


@dataclass(frozen=True)
class Costs:
    """Costs of the weights with one hash, by precision, instructions and kernels, in a file below `folder`."""

    folder: Path
    weights: str  # hash

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.weights}.json"

    def find(self, key: str) -> float | None:
        """None where it was never measured."""
        found = self._read().get(key)
        return found if isinstance(found, float) else None

    def keep(self, key: str, cost: float) -> None:
        """Without effect where the folder cannot be written: it is measured again at the next start."""
        growing = self._file.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            growing.write_text(json.dumps(self._read() | {key: cost}))
            growing.replace(self._file)
        except OSError as error:
            log.info("the measured cost of a precision is not kept: %s", error)
            with suppress(OSError):  # a full disk has taken a part of it
                growing.unlink()

    def _read(self) -> dict[str, object]:
        """Empty where there is no such file, or it is not ours."""
        try:
            found = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def costs_of(what: Description, settings: Settings) -> Costs:
    return Costs(Path(settings.model_dir).expanduser() / "fidelity", fingerprint(what))


def fingerprint(what: Description) -> str:
    """A SHA-256 over what tensors there are, how long their files are, and SAMPLES pieces of each file."""
    found = hashlib.sha256(repr(what.config).encode())
    for name, entry in sorted(what.entries.items()):
        found.update(f"{name} {entry.kind} {entry.shape}\n".encode())
        found.update(repr(entry.changes).encode())
    for path in sorted({path for entry in what.entries.values() for path in entry.files}):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                for number in range(SAMPLES):
                    file.seek(max(size - SAMPLE, 0) * number // (SAMPLES - 1))
                    found.update(file.read(SAMPLE))
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None
        found.update(f"{size}\n".encode())
    return found.hexdigest()


def key_of(place: Place) -> str:
    return f"{place.precision} {place.instructions} {made_of(place.instructions)}"


def is_tested(place: Place) -> bool:
    """Whether a model that runs there has a cost."""
    return bool(place.instructions) and place.precision in NARROW


def testing_bytes(place: Place, vocabulary: int) -> int:
    """What a generator's self-test keeps while weights are read and packed: its logits in float32."""
    return TEXTS * ROWS * vocabulary * torch.float32.itemsize if is_tested(place) else 0


def with_known_cost(what: Description, settings: Settings) -> Description:
    """With float32 as its default precision, where the usual one is known to cost more than `max_kl`."""
    place = placed(settings, what.suited, what.body)
    if settings.precision != "auto" or not is_tested(place):
        return what
    cost = costs_of(what, settings).find(key_of(place))
    return prefer_float32(what, place, cost, settings) if cost is not None and cost > settings.max_kl else what


def prefer_float32(what: Description, place: Place, cost: float, settings: Settings) -> Description:
    bound = f"more than max_kl, which is {settings.max_kl:g}"
    reason = f"its answers in {place.precision} are {describe_cost(cost, what)}, {bound}"
    return replace(what, preferred=Suited("float32", reason))


def describe_cost(cost: float, what: Description) -> str:
    """A cost, for people."""
    if what.head.task == "generate":
        return f"{cost:.2g} nats (KL) from float32's"
    return f"{cost:.2g} (1 - cosine) from float32's"


class SelfTest:
    """Of one model: `expect` computes in float32 before packing, `compare` with the executor that will serve it."""

    def __init__(self, what: Description, place: Place, settings: Settings, longest: int) -> None:
        """`longest`: tokens that its cache holds, if it has one, else of its longest text."""
        self.what, self._costs, self._key = what, costs_of(what, settings), key_of(place)
        self.cost = self._costs.find(self._key)
        self._texts = texts(what, longest) if self.cost is None else []
        self._expected = torch.empty(0)

    @property
    def _is_due(self) -> bool:
        """Whether the cost is not known, and there is a text to measure it by."""
        return self.cost is None and bool(self._texts)

    def expect(self, progress: Callable[[int, int], None]) -> None:
        """Computes the answers in float32, of weights that are read and let go of part by part; unless it is known.

        `progress` gets bytes read and bytes in all, often and outside of torch's inference mode: it may let other
        models have their turns.
        """
        if not self._is_due:
            return
        network, _, fill = self._unread(progress)

        @contextmanager
        def held(part: nn.Module) -> Iterator[None]:
            fill(part)
            with torch.inference_mode():
                yield
            hollow(part)

        for name, child in network.named_children():
            if name not in ("tokens", "blocks"):
                fill(child)
        with held(network.tokens):
            x, frame = network.open(Ragged.of(self._texts))
        for block in network.blocks:
            with held(block):
                x = block(x, frame)
        with torch.inference_mode():
            starts = accumulate(map(len, self._texts), initial=0)
            rows = [
                start + row for start, text in zip(starts, self._texts, strict=False) for row in self._compared(text)
            ]
            x = network.final_norm(x)[rows]
        if self.what.head.task == "generate":  # its matrix may be that of tokens, which was let go of
            _, head, fill = self._unread(progress)
            with held(head):
                x = head(x)
        self._expected = x

    def _unread(
        self, progress: Callable[[int, int], None]
    ) -> tuple[Transformer, nn.Module, Callable[[nn.Module], None]]:
        """The network and its head without numbers, and what gives a part of them its own."""
        network, head = blank(self.what)
        weights = Weights(self.what, network, head, progress)
        return network.eval(), head.eval(), lambda part: weights.fill(part, torch.float32, torch.device("cpu"))

    @torch.inference_mode()
    def compare(self, executor: Executor) -> None:
        """Sets the cost, and keeps it; unless it is known."""
        if not self._is_due:
            return
        found = torch.cat([executor.step(self._step(text, executor)).clone() for text in self._texts])
        expected, self._expected = self._expected, torch.empty(0)
        if not found.isfinite().all():
            self.cost = float("inf")
        elif self.what.head.task == "generate":
            divergence = Divergence()
            for p, q in zip(torch.split(expected, ROWS), torch.split(found, ROWS), strict=True):
                divergence.add(p, q, p.argmax(-1))  # which token followed does not matter here
            self.cost = divergence.figures.kl_mean
        else:
            self.cost = float(1 - torch.cosine_similarity(expected, found, dim=-1).double().mean())
        self._costs.keep(self._key, self.cost)

    def _compared(self, text: list[int]) -> range:
        """The rows of a text that are compared: of a generator the last ones, of others all."""
        most = ROWS if self.what.head.task == "generate" else len(text)
        return range(max(len(text) - most, 0), len(text))

    def _step(self, text: list[int], executor: Executor) -> Rows:
        blocks = -(-len(text) // executor.block_size) if executor.block_size else 0
        count = len(text)
        return Rows(text, list(range(count)), [0, count], [list(range(blocks))], list(self._compared(text)))


def texts(what: Description, longest: int) -> list[list[int]]:
    """Windows of the text that comes with polyhead, evenly over it, of at most `longest` tokens; none where the network
    cannot read them."""
    ids = what.tokenizer.encode(TEXT.read_text(encoding="utf-8"), special=False).ids
    opening, closing = what.tokenizer.ends
    width = min(TOKENS, min(longest, what.max_tokens) - len(opening) - len(closing), len(ids) // TEXTS)
    if width < 1 or foreign(what, [*ids, *opening, *closing], []):
        return []
    starts = (number * (len(ids) - width) // (TEXTS - 1) for number in range(TEXTS))
    closed = [] if what.head.task == "generate" else closing
    return [opening + ids[start : start + width] + closed for start in starts]
