"""Checks in a child process whether a grammar can be compiled, within limits of time and memory.

A child that hangs, exceeds its memory or crashes is killed, and another is started for the next grammar.  The limit is
of processor time, so a refusal depends on the grammar alone; where a busy machine gives the child too little time, the
client is asked to try again.
"""

import json
import math
import signal
import subprocess
import sys
from queue import SimpleQueue
from typing import Any

from ..concurrency.child_process import exchange_lines, kill_child, start_child
from ..core.errors import BadRequest, PolyheadError, Unavailable
from ..core.grammar import MAX_REGEX_CHARS, Grammar
from . import grammar_child as compiler

CPU_LIMIT_S = 1.0  # processor time: a grammar that takes more is refused
TIMEOUT_S = 10.0  # seconds of the clock
PROCESSES = 2  # so that a slow grammar does not delay all others


class GrammarCheck:
    """A few child processes, started when first needed; as many grammars are checked at a time."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[CheckProcess] = SimpleQueue()
        self._processes = [CheckProcess() for _ in range(PROCESSES)]
        for each in self._processes:
            self._idle.put(each)

    def compile(self, grammar: Grammar, outline: dict[str, Any]) -> str:
        """The grammar in llguidance's form, checked for the vocabulary that `outline` describes.

        Raises BadRequest, which names the field and the place in it; Unavailable if the machine is too busy.  Any
        thread may call it.
        """
        process = self._idle.get()
        try:
            question = {
                "kind": grammar.kind,
                "source": grammar.source,
                "seconds": CPU_LIMIT_S,
                "pattern": MAX_REGEX_CHARS,
            }
            answer = process.ask(question | outline)
        finally:
            self._idle.put(process)
        if "grammar" not in answer:
            where = grammar.field + answer["place"]
            raise BadRequest(f"{where}: {answer['wrong']}", param=grammar.field)
        return answer["grammar"]

    def close(self) -> None:
        for each in self._processes:
            each.kill()


class CheckProcess:
    """One child process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, str]:
        if self._process is not None and self._process.poll() is not None:  # it has ended or was killed
            self.kill()
        try:
            process = self._process = self._process or start_child([sys.executable, "-P", compiler.__file__])
            line = exchange_lines(process, json.dumps(question).encode() + b"\n", TIMEOUT_S)
        except TimeoutError:
            self.kill()
            wrong = f"the machine is too busy to compile the answer's form: it had {TIMEOUT_S:g} s"
            raise Unavailable(wrong, retry_after=math.ceil(TIMEOUT_S)) from None
        except BrokenPipeError:
            if self._process is None:
                raise PolyheadError("the process that compiles the answer's form cannot be started") from None
            late = self._process.wait() == -signal.SIGPROF
            self.kill()
            wrong = f"takes more than {CPU_LIMIT_S:g} s of a processor" if late else "takes too much memory"
            return {"wrong": f"is too complex: it {wrong} to compile", "place": ""}
        answer: dict[str, str] = json.loads(line)
        return answer

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_child(process)
