"""Fault injection for a server under test, between a worker and its executor.

A file has the list of faults. It is checked before every step, so a test can change them while the server runs. The
first token of the prompt marks the request of a generator; any token of the text marks that of an encoder."""

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

from polyhead.models.core.turns import YieldTurn, keep_turn
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.lora import Lora
from polyhead.service.engine import engine, joint_steps

Kind = Literal["raise", "memory", "device memory", "nan", "poison", "hang", "slow", "say", "die"]
Version = tuple[int, int]
EVERY = -1


@dataclass(frozen=True)
class Fault:
    """A fault: what fails, and in which steps: in those with a marked request, or in every step.

    "hang" and "slow" come before the step; "raise" and the two kinds of memory errors replace it. "nan" makes the
    logits of marked requests NaN, "say" makes them generate given tokens, "poison" makes the embedding of the mark
    NaN."""

    kind: Kind
    token: int = EVERY  # the mark
    after: int = 0  # the first `after` of these steps do not fail
    times: int = 0  # so many steps fail; 0: all that follow
    among: int = 1  # only steps of at least so many sequences
    seconds: float = 0.0  # for slow
    script: tuple[int, ...] = ()  # for "say": the tokens that follow the mark, which is the whole prompt
    of: Literal["generator", "encoder"] = "generator"


def write(path: Path, faults: tuple[Fault, ...]) -> None:
    """Written atomically, so that no reader gets a part of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([asdict(fault) for fault in faults]))
    os.replace(draft, path)


class Armed:
    """The faults of a file, which is read again when it changes."""

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


class FaultyExecutor:
    """An executor with injected faults."""

    def __init__(self, executor: Executor, armed: Armed) -> None:
        self.executor, self.armed = executor, armed
        self.kind = "generator" if executor.block_count else "encoder"
        self.first_tokens: dict[int, int] = {}  # first token of the sequence whose first block it is
        self.version: Version | None = None
        self.seen: Counter[Fault] = Counter()  # steps that match each fault since the file changed

    @property
    def block_size(self) -> int:
        return self.executor.block_size

    @property
    def block_count(self) -> int:
        return self.executor.block_count

    @property
    def state_count(self) -> int:
        return self.executor.state_count

    @property
    def window_blocks(self) -> int:
        return self.executor.window_blocks

    @property
    def window(self) -> int:
        return self.executor.window

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self.executor.nonfinite_blocks

    @property
    def argmax(self) -> None:
        """Unknown: the logits may be changed here."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.executor.copy(blocks)

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        return self.executor.attach(adapter, yield_turn)

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
        due = [fault for fault in faults if self._is_due(fault, rows)]
        for fault in due:
            self._before(fault)
        out = self.executor.step(rows)
        for fault in due:
            self._after(fault, rows, out)
        return out

    def _note(self, rows: StepInput) -> None:
        for table, start in zip(rows.block_tables, rows.starts, strict=False):
            if table and rows.positions[start] == 0:
                self.first_tokens[table[0]] = rows.tokens[start]

    def _marked_sequences(self, fault: Fault, rows: StepInput) -> list[int]:
        """The sequences of `rows` that are marked for the fault."""
        sequences = range(len(rows.starts) - 1)
        if fault.token == EVERY:
            return list(sequences)
        if self.kind == "generator":
            return [
                number for number in sequences if self.first_tokens.get(rows.block_tables[number][0]) == fault.token
            ]
        bounds = list(pairwise(rows.starts))
        return [number for number in sequences if fault.token in rows.tokens[slice(*bounds[number])]]

    def _is_due(self, fault: Fault, rows: StepInput) -> bool:
        if fault.of != self.kind or len(rows.starts) <= fault.among or not self._marked_sequences(fault, rows):
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
                joint_steps.attempt = engine.attempt = die  # so that the next call of the engine thread is not caught
            case "hang":
                while fault in self.armed.now():
                    time.sleep(0.01)
            case _:
                pass  # after the step

    def _after(self, fault: Fault, rows: StepInput, out: Tensor) -> None:
        marked = self._marked_sequences(fault, rows)
        marked_rows = {row for number in marked for row in range(rows.starts[number], rows.starts[number + 1])}
        for index, row in enumerate(rows.output_rows):
            if fault.kind == "nan" and row in marked_rows:
                out[index] = float("nan")
            elif fault.kind == "say" and row in marked_rows:
                out[index] = 0.0
                out[index, fault.script[rows.positions[row]]] = 1e4


def die(_: object) -> None:
    raise SystemExit("a fault of the test")


def embedding(executor: Executor) -> Any:
    """The embedding of every token, of either executor."""
    if isinstance(executor, NativeExecutor):
        return executor.token_table
    return cast(TorchExecutor, executor).network.tokens.weight.data
