"""Checks in a child process whether a grammar can be compiled, within limits of time and memory.

A child that hangs, exceeds its memory or crashes is killed, and another is started for the next grammar.  The limit is
of processor time, so a refusal depends on the grammar alone; where a busy machine gives the child too little time, the
client is asked to try again.
"""

import json
import math
import signal
import sys
from queue import SimpleQueue
from typing import Any

from ..concurrency.child_process import AnsweringChild, ChildEndedError
from ..core.errors import BadRequest, PolyheadError, Unavailable
from ..core.grammar import MAX_REGEX_CHARS, Grammar
from . import grammar_child as compiler

CPU_LIMIT_S = 1.0  # processor time: a grammar that takes more is refused
TIMEOUT_S = 10.0  # seconds of the clock
RETRY_S = 1  # seconds after which a client may try again where a child was ended from outside, or not started
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
            each.child.kill()


class CheckProcess:
    """One child process."""

    def __init__(self) -> None:
        self.child = AnsweringChild([sys.executable, "-P", compiler.__file__])

    def ask(self, question: dict[str, Any]) -> dict[str, str]:
        """The child's answer, or what is wrong with the grammar that has ended it.  Raises Unavailable."""
        try:
            answer: dict[str, str] = json.loads(self.child.ask(json.dumps(question).encode() + b"\n", TIMEOUT_S))
        except TimeoutError:
            wrong = f"the machine is too busy to compile the answer's form: it had {TIMEOUT_S:g} s"
            raise Unavailable(wrong, retry_after=math.ceil(TIMEOUT_S)) from None
        except ChildEndedError as ended:
            return {"wrong": f"is too complex: it {describe_end(ended.code)} to compile", "place": ""}
        except BrokenPipeError:
            raise PolyheadError("the process that compiles the answer's form cannot be started") from None
        except OSError as error:
            wrong = f"the process that compiles the answer's form cannot be started now: {error.strerror}"
            raise Unavailable(wrong, retry_after=RETRY_S) from None
        return answer


def describe_end(code: int) -> str:
    """What a grammar takes that has ended the child process with this status.  Raises Unavailable where something else
    has ended it: no limit of the child sends SIGKILL.
    """
    if code == -signal.SIGKILL:
        wrong = "the process that compiles the answer's form was ended from outside, as where memory is short"
        raise Unavailable(wrong, retry_after=RETRY_S)
    return f"takes more than {CPU_LIMIT_S:g} s of a processor" if code == -signal.SIGPROF else "takes too much memory"
