"""Faults for a server under test, between the worker and its executor.

A list of faults is a file, looked at before every step: a test arms and disarms them while the server runs.  A
generator's request is marked by the first token of its prompt, an encoder's by any token of its text.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.lora import Lora
from polyhead.service.engine import engine

Kind = Literal["raise", "memory", "device memory", "nan", "poison", "hang", "slow", "say", "die"]
Version = tuple[int, int]
EVERY = -1


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when: in the steps that a marked request takes part in, or in every step.

    hang and slow come before the step, raise and the two of memory in its place; nan spoils what it says of the
    marked requests, say makes them say what a test wants; poison makes keys of the mark, wherever it is read, that are
    no numbers.
    """

    kind: Kind
    token: int = EVERY  # the mark
    after: int = 0  # so many of these steps are let pass
    times: int = 0  # in so many it goes wrong; 0: in all that follow
    among: int = 1  # only steps of at least so many sequences
    seconds: float = 0.0  # for slow
    script: tuple[int, ...] = ()  # for say: the tokens that follow the mark, which is the whole prompt
    of: Literal["generator", "encoder"] = "generator"


def write(path: Path, faults: tuple[Fault, ...]) -> None:
    """At once, so that nobody reads half of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(fault) for fault in faults]))
    os.replace(draft, path)


class Armed:
    """The faults in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version: Version | None = None
        self.faults: list[Fault] = []

    def now(self) -> list[Fault]:
        stat = self.path.stat()
        version = stat.st_mtime_ns, stat.st_ino
        if version != self.version:
            faults = json.loads(self.path.read_text())
            self.faults = [Fault(**fault | {"script": tuple(fault["script"])}) for fault in faults]
            self.version = version
        return self.faults


class Faulty:
    """An executor that does what the other one does, but for the faults."""

    def __init__(self, executor: Executor, armed: Armed) -> None:
        self.executor, self.armed = executor, armed
        self.kind = "generator" if executor.block_count else "encoder"
        self.first_tokens: dict[int, int] = {}  # of whoever a block is the first of
        self.version: Version | None = None
        self.seen: Counter[Fault] = Counter()  # steps that each fault could have struck since they were armed

    @property
    def block_size(self) -> int:
        return self.executor.block_size

    @property
    def block_count(self) -> int:
        return self.executor.block_count

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self.executor.nonfinite_blocks

    @property
    def argmax(self) -> None:
        """Unknown, of logits that may be spoiled here."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.executor.copy(blocks)

    def attach(self, adapter: Lora) -> int:
        return self.executor.attach(adapter)

    def detach(self, number: int) -> None:
        self.executor.detach(number)

    def padding(self, rows: StepInput) -> int:
        return self.executor.padding(rows)

    def step(self, rows: StepInput) -> Tensor:
        self._note(rows)
        faults = self.armed.now()
        if self.version != self.armed.version:
            self.version = self.armed.version
            self.seen.clear()
        striking = [fault for fault in faults if self._strikes(fault, rows)]
        for fault in striking:
            self._before(fault)
        out = self.executor.step(rows)
        for fault in striking:
            self._after(fault, rows, out)
        return out

    def _note(self, rows: StepInput) -> None:
        for table, start in zip(rows.block_tables, rows.starts, strict=False):
            if table and rows.positions[start] == 0:
                self.first_tokens[table[0]] = rows.tokens[start]

    def _concerned(self, fault: Fault, rows: StepInput) -> list[int]:
        """The sequences of `rows` that are marked for it."""
        everybody = range(len(rows.starts) - 1)
        if fault.token == EVERY:
            return list(everybody)
        if self.kind == "generator":
            return [
                number for number in everybody if self.first_tokens.get(rows.block_tables[number][0]) == fault.token
            ]
        bounds = list(pairwise(rows.starts))
        return [number for number in everybody if fault.token in rows.tokens[slice(*bounds[number])]]

    def _strikes(self, fault: Fault, rows: StepInput) -> bool:
        if fault.of != self.kind or len(rows.starts) <= fault.among or not self._concerned(fault, rows):
            return False
        self.seen[fault] += 1
        struck = self.seen[fault] - fault.after
        return struck > 0 and (not fault.times or struck <= fault.times)

    def _before(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                raise RuntimeError("a fault of the test")
            case "memory":
                raise MemoryError("a fault of the test")
            case "device memory":
                raise torch.OutOfMemoryError("a fault of the test")
            case "slow":
                time.sleep(fault.seconds)
            case "poison":
                embedding(self.executor)[fault.token] = float("nan")
            case "die":
                engine.attempt = die  # what the engine's thread calls next is not caught any more
            case "hang":
                while fault in self.armed.now():
                    time.sleep(0.01)
            case _:
                pass  # afterwards

    def _after(self, fault: Fault, rows: StepInput, out: Tensor) -> None:
        concerned = self._concerned(fault, rows)
        theirs = {row for number in concerned for row in range(rows.starts[number], rows.starts[number + 1])}
        for index, row in enumerate(rows.output_rows):
            if fault.kind == "nan" and row in theirs:
                out[index] = float("nan")
            elif fault.kind == "say" and row in theirs:
                out[index] = 0.0
                out[index, fault.script[rows.positions[row]]] = 1e4


def die(_: object) -> None:
    raise SystemExit("a fault of the test")


def embedding(executor: Executor) -> Any:
    """The numbers of every token, wherever this executor keeps them."""
    if isinstance(executor, NativeExecutor):
        return executor.token_table
    return cast(TorchExecutor, executor).network.tokens.weight.data
