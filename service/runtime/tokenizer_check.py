"""Check in a child process that the tokenizer of a checkpoint can be read and used.

A tokenizer.json is a program: any number of patterns, replacements and steps, which the tokenizers library executes. A
malicious one aborts the process, takes all memory or never returns, and the library has no limits against that. So a
child process with limits reads it first, and measures what memory it takes. The child imports the tokenizers library,
and not torch. The vocabulary of a GGUF file, from which merges are made, is checked too: the child gets the metadata in
the file's header.
"""

import gc
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyhead.models.core.errors import CheckpointError, EncodingError, GrowthError, UnsupportedError, show_value
from polyhead.models.tokenizer import Tokenizer, TokenizerError
from polyhead.models.tokenizer.regular_expression import remove_matches

from ..concurrency.child_limits import limit_memory, limit_processor_time
from ..concurrency.child_process import AnsweringChild, ChildEndedError
from ..resources.process_info import peak_memory, resident_memory, trim_heap

CPU_SECONDS = 15  # of CPU time, for the whole check; a vocabulary of 262,144 tokens takes two
WALL_SECONDS = 90.0  # seconds of real time: on a busy machine the child gets little CPU time
MEMORY_BYTES = 4 << 30  # bytes of address space
TEXT_CHARACTERS = 1 << 13  # of each text that is tokenised
CPU_SECONDS_PER_TEXT = 0.25  # of CPU time, for such a text; ten times what published tokenizers take
CPU_SECONDS_PER_CALL = 3.0  # of CPU time, in which no other thread runs; 262,144 tokens and their merges take one
WATCH_SECONDS = 0.005  # of real time, between two looks at the clock
TEXT_PIECES = ("a", "a ", " ", "\n", "0", ".", "é", "the quick brown fox ", "\u4e2d")
CANCEL_INTERVAL_S = 0.25  # seconds between two looks at whether a check that waits for its turn was cancelled
SLICE_ITEMS = 1 << 10  # of a list of metadata that are written in one call; numbers take a microsecond each
VOCABULARY_IDS = 512  # the first tokens of the vocabulary, from which texts are made too
VOCABULARY_TEXTS = 4  # tokens of these that are a text of their own each
UNCLEAR_BYTES = 8 << 20  # that a process has more after its first texts, whatever the tokenizer is
RESET_PEAK = Path("/proc/self/clear_refs")  # what resets the most memory that a process had, on Linux
ERROR_TYPES = {kind.__name__: kind for kind in (CheckpointError, UnsupportedError)}
CHILD_CODE = "import sys, importlib; sys.path[:] = sys.argv[2:]; importlib.import_module(sys.argv[1]).main()"

assert __spec__ is not None
COMMAND = (sys.executable, "-P", "-c", CHILD_CODE, __spec__.name, *sys.path)


@dataclass(frozen=True)
class TokenizerMemory:
    """Bytes that a tokenizer took in the child process: `kept` while it is in use, `most` while it was read and tried,
    both of which are resident.
    """

    kept: int
    most: int


def accept_memory(memory: TokenizerMemory) -> None:
    """The default of `check_memory`: accepts every tokenizer."""


class TokenizerCheck:
    """The child process, which starts with the first check. May be called on any thread."""

    def __init__(self) -> None:
        self.child = AnsweringChild(COMMAND)
        self._lock = threading.Lock()

    def check_folder(
        self,
        source: Path,
        fields: Mapping[str, Any],
        check_wanted: Callable[[], object] = lambda: None,
        check_memory: Callable[[TokenizerMemory], object] = accept_memory,
    ) -> int:
        """Raise CheckpointError if the tokenizer of a folder, or in the metadata `fields` of a GGUF file, cannot be
        read, costs too much, or ends the process. Return the bytes that it takes in memory; 0 for a few.

        One tokenizer is checked at a time. `check_wanted` is called while this check waits for its turn, and raises if
        nothing needs the result any more. `check_memory` raises if this process has too little for it.
        """
        with self._turn(check_wanted):
            memory = self._ask_child(source, fields)
        check_memory(memory)
        return memory.kept if memory.kept > UNCLEAR_BYTES else 0

    @contextmanager
    def _turn(self, check_wanted: Callable[[], object]) -> Iterator[None]:
        """Hold the lock."""
        while not self._lock.acquire(timeout=CANCEL_INTERVAL_S):
            check_wanted()
        try:
            check_wanted()
            yield
        finally:
            self._lock.release()

    def _ask_child(self, source: Path, fields: Mapping[str, Any]) -> TokenizerMemory:
        """Have the child process check a tokenizer. Raises CheckpointError."""
        limits: dict[str, float] = {"memory": MEMORY_BYTES, "seconds": CPU_SECONDS}
        limits |= {"text_seconds": CPU_SECONDS_PER_TEXT, "call_seconds": CPU_SECONDS_PER_CALL}
        question = write_question({"source": str(source), **limits}, fields)
        try:
            answer = json.loads(self.child.ask(question, WALL_SECONDS))
        except TimeoutError:
            raise tokenizer_error(
                source, f"the tokenizer could not be tried: the machine is too busy, it had {WALL_SECONDS:g} s"
            ) from None
        except ChildEndedError as ended:
            raise tokenizer_error(source, describe_exit(ended.code)) from None
        except OSError as error:
            why = f": {error.strerror}" if error.strerror else ""  # none where it has ended before it was ready
            raise tokenizer_error(source, f"the process that tries its tokenizer cannot be started{why}") from None
        if "kind" in answer:
            raise ERROR_TYPES[answer["kind"]](answer["wrong"], file=answer["file"])
        return TokenizerMemory(kept=answer["kept"], most=answer["most"])

    def close(self) -> None:
        """End the child process; the next check starts another. Does nothing while a check is running."""
        if self._lock.acquire(blocking=False):
            try:
                self.child.kill()
            finally:
                self._lock.release()


def write_question(request: Mapping[str, Any], fields: Mapping[str, Any]) -> bytearray:
    """Return the request with the metadata `fields` of a GGUF file, as a line of JSON."""
    line = bytearray(json.dumps(request).encode().removesuffix(b"}") + b', "fields": ')
    for piece in write_fields(fields):
        line += piece
    line += b"}\n"
    return line


def write_fields(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the metadata fields as JSON, in pieces.

    A vocabulary is long, and no other thread runs while a piece is written. So a list is written in slices, and
    characters outside of ASCII stay as they are.
    """
    yield b"{"
    for number, (name, value) in enumerate(fields.items()):
        yield b", " * bool(number) + json.dumps(name).encode() + b": "
        if isinstance(value, list | tuple):
            yield b"["
            for first in range(0, len(value), SLICE_ITEMS):
                some = json.dumps(value[first : first + SLICE_ITEMS], ensure_ascii=False)
                yield b", " * bool(first) + some[1:-1].encode()
            yield b"]"
        else:
            yield json.dumps(value, ensure_ascii=False).encode()
    yield b"}"


def tokenizer_error(source: Path | str, reason: str) -> CheckpointError:
    return CheckpointError(reason, file=str(source))


def describe_exit(code: int) -> str:
    """Return why the child process ended with this exit code."""
    if -code == signal.SIGPROF:
        return f"the tokenizer takes more than {CPU_SECONDS} s of a processor to be read and tried"
    how = f"with signal {-code}" if code < 0 else f"with status {code}"
    limit = f"it may take {MEMORY_BYTES >> 30} GiB of memory"
    subject = "the tokenizers library fails on the tokenizer" if code < 0 else "the tokenizer cannot be tried"
    return f"{subject}: the process that tried it ended {how}; {limit}"


class InterpreterWatch:
    """While it is entered, `longest` is the most CPU time of this process between two turns of another thread.

    The tokenizers library keeps the interpreter's lock while it reads a vocabulary. A server that makes the same call
    answers nothing for that long, on a busy machine for a multiple of it.
    """

    def __init__(self) -> None:
        self.longest, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "InterpreterWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last, ended = time.process_time(), False
        while not ended:
            ended, now = self._ended.wait(WATCH_SECONDS), time.process_time()
            self.longest, last = max(self.longest, now - last), now


def try_tokenizer(request: dict[str, Any]) -> CheckpointError | TokenizerMemory:
    """Read the tokenizer of a folder or of a GGUF file's metadata, and tokenise texts; return what is wrong with it, or
    the memory that it takes."""
    source = Path(request["source"])
    before = start_measuring()
    try:
        with InterpreterWatch() as watch:
            tokenizer = Tokenizer.from_folder(source) if source.is_dir() else Tokenizer.from_gguf(request["fields"])
    except CheckpointError as error:
        return error
    if watch.longest > (most := request["call_seconds"]):
        cost = f"takes {watch.longest:.1f} s of a processor in one call, while no other thread runs"
        return tokenizer_error(source, f"reading the tokenizer {cost}; {most:g} s are the most")
    if slow := try_expressions(tokenizer, request["text_seconds"]):
        return tokenizer_error(source, slow)
    for piece in dict.fromkeys((*TEXT_PIECES, *vocabulary_pieces(tokenizer), *step_pieces(tokenizer))):
        text = (piece[:TEXT_CHARACTERS] * (TEXT_CHARACTERS // len(piece) + 1))[:TEXT_CHARACTERS]
        began = time.process_time()
        try:
            [encoding] = tokenizer.encode_batch([text])
            tokenizer.decode(encoding.ids[:TEXT_CHARACTERS])
        except GrowthError as error:
            return tokenizer_error(source, f"{error} (as {show_value(piece)})")
        except (EncodingError, TokenizerError):
            pass  # these fail only the request with that text
        seconds, limit = time.process_time() - began, request["text_seconds"]
        if seconds > limit:
            cost = (
                f"{seconds:.1f} s of a processor for {len(text)} characters as {piece[:60]!r}; {limit:g} s are the most"
            )
            return tokenizer_error(source, f"the tokenizer takes {cost}")
    return measure_memory(before)


def start_measuring() -> TokenizerMemory:
    """Return the resident bytes of this process, without free memory of its heap, and the most that it had. The system
    counts the most anew from here on, if it can.
    """
    gc.collect()
    trim_heap()
    with suppress(OSError):
        RESET_PEAK.write_text("5")
    return TokenizerMemory(kept=resident_memory(), most=peak_memory())


def measure_memory(before: TokenizerMemory) -> TokenizerMemory:
    """Return what this process has, and had at most, beside what it had `before`."""
    most = peak_memory()
    gc.collect()
    trim_heap()
    kept = max(resident_memory() - before.kept, 0)
    return TokenizerMemory(kept, max(most - before.kept, kept) if most > before.most else kept)


def try_expressions(tokenizer: Tokenizer, limit: float) -> str:
    """Search texts of the characters that each regular expression distinguishes; return what is wrong, if anything.

    A search may be quadratic, as some published ones are. `limit` is the CPU time of the slowest texts of all together.
    """
    total = 0.0
    for expression in tokenizer.expressions():
        slowest, name = 0.0, f"its regular expression {show_value(expression.text)}"
        for text in expression.probes():
            began = time.process_time()
            try:
                remove_matches(expression.text, text)
            except CheckpointError:
                return f"{name} takes too long on {show_value(text[0])}, repeated"
            slowest = max(slowest, time.process_time() - began)
            if total + slowest > limit:
                cost = f"{total + slowest:.1f} s of a processor for {len(text)} characters as {show_value(text[0])}"
                return f"{name}, with those before it, takes {cost}; {limit:g} s are the most"
        total += slowest
    return ""


def vocabulary_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return pieces of the first, most common tokens of the vocabulary: some alone, and all in one text. A vocabulary
    may have no tokens for any other text.
    """
    pieces = dict[str, None]()
    for token in range(min(VOCABULARY_IDS, tokenizer.vocab_size)):
        with suppress(EncodingError, TokenizerError):
            pieces[tokenizer.decode([token])] = None
    found = [piece for piece in pieces if piece.strip()]
    return [*found[:VOCABULARY_TEXTS], "".join(found)] if found else []


def step_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return what the tokenizer's steps search for, a character for each that a regular expression distinguishes. Many
    steps may be slow on one letter, which no fixed text has.
    """
    return [*tokenizer.literals(), *(probe[0] for each in tokenizer.expressions() for probe in each.probes())]


def answer_fields(found: CheckpointError | TokenizerMemory) -> dict[str, Any]:
    """Return the error, or the memory, as the JSON answer has it."""
    if isinstance(found, TokenizerMemory):
        return asdict(found)
    return {"kind": type(found).__name__, "wrong": str(found).removeprefix(f"{found.file}: "), "file": found.file}


def main() -> None:
    """The child process: one check for each line of standard input."""
    with suppress(OSError):  # if a container runs out of memory, this process is killed and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    write_line("")  # ready
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_memory(request["memory"])
        limit_processor_time(request["seconds"])  # of CPU time, then this process is killed
        found = try_tokenizer(request)
        limit_processor_time(0)
        write_line(json.dumps(answer_fields(found)))


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
