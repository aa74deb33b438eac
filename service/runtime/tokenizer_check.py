"""Whether the tokenizer of a checkpoint can be read and used, tried in a process that may die of it.

A tokenizer.json is a program: patterns, replacements and steps of any number, which the tokenizers library follows.
One that is made to do harm aborts the process, takes all memory or never returns, and nothing inside the library stops
it.  So a child process with limits reads it first.  It imports the tokenizers library and no torch.  A GGUF file's
vocabulary, of which merges are made, is tried alike: the child gets the metadata that the file's header has.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyhead.models.core.errors import CheckpointError, EncodingError, UnsupportedError
from polyhead.models.tokenizer import Tokenizer, TokenizerError

from ..concurrency.child_process import exchange_lines, kill_child, start_child

CPU_SECONDS = 15  # of a processor, for all of a tokenizer; a vocabulary of 262,144 tokens takes two
WALL_SECONDS = 90.0  # seconds of the clock: a busy machine gives the child little of its processors
MEMORY_BYTES = 4 << 30  # bytes of addresses
TEXT_CHARACTERS = 1 << 13  # of a text that is tried
CPU_SECONDS_PER_TEXT = 0.25  # of a processor, for such a text; ten times what published tokenizers take
TEXT_PIECES = ("a", "a ", " ", "\n", "0", ".", "é", "the quick brown fox ", "\u4e2d")
VOCABULARY_IDS = 512  # the first tokens of a vocabulary, of which texts are made too
VOCABULARY_TEXTS = 4  # of them, each a text of its own
ERROR_TYPES = {kind.__name__: kind for kind in (CheckpointError, UnsupportedError)}
CHILD_CODE = "import sys, importlib; sys.path[:] = sys.argv[2:]; importlib.import_module(sys.argv[1]).main()"

assert __spec__ is not None
COMMAND = (sys.executable, "-P", "-c", CHILD_CODE, __spec__.name, *sys.path)


class TokenizerCheck:
    """The child process, which starts when it is first needed.  Any thread may call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check_folder(self, source: Path, fields: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the tokenizer of a folder, or in the metadata `fields` of a GGUF file, cannot be
        read, costs too much, or ends the process."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # it has ended or was killed
                self._end()
            question = {"source": str(source), "fields": dict(fields), "memory": MEMORY_BYTES}
            question |= {"seconds": CPU_SECONDS, "text_seconds": CPU_SECONDS_PER_TEXT}
            try:
                process = self._process = self._process or start_child(COMMAND)
                answer = json.loads(exchange_lines(process, json.dumps(question).encode() + b"\n", WALL_SECONDS))
            except TimeoutError:
                self._end()
                raise tokenizer_error(
                    source, f"the tokenizer could not be tried: the machine is too busy, it had {WALL_SECONDS:g} s"
                ) from None
            except BrokenPipeError:
                if self._process is None:
                    raise tokenizer_error(source, "the process that tries its tokenizer cannot be started") from None
                code = self._process.wait()
                self._end()
                raise tokenizer_error(source, describe_exit(code)) from None
        if answer:
            raise ERROR_TYPES[answer["kind"]](answer["wrong"], file=answer["file"])

    def close(self) -> None:
        """End the child; one that is needed later is started again.  Without effect while one works."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_child(process)


def tokenizer_error(source: Path | str, what: str) -> CheckpointError:
    return CheckpointError(what, file=str(source))


def describe_exit(code: int) -> str:
    """Why a child that has ended with that code has."""
    if -code == signal.SIGPROF:
        return f"the tokenizer takes more than {CPU_SECONDS} s of a processor to be read and tried"
    how = f"with signal {-code}" if code < 0 else f"with status {code}"
    limit = f"it may take {MEMORY_BYTES >> 30} GiB of memory"
    who = "the tokenizers library fails on the tokenizer" if code < 0 else "the tokenizer cannot be tried"
    return f"{who}: the process that tried it ended {how}; {limit}"


def try_tokenizer(asked: dict[str, Any]) -> CheckpointError | None:
    """What is wrong with the tokenizer in a folder, or in a GGUF file's metadata."""
    source = Path(asked["source"])
    try:
        tokenizer = Tokenizer.from_folder(source) if source.is_dir() else Tokenizer.from_gguf(asked["fields"])
    except CheckpointError as error:
        return error
    for piece in (*TEXT_PIECES, *vocabulary_pieces(tokenizer)):
        text = (piece[:TEXT_CHARACTERS] * (TEXT_CHARACTERS // len(piece) + 1))[:TEXT_CHARACTERS]
        began = time.process_time()
        with suppress(EncodingError, TokenizerError):  # of a text, which are the errors of that request
            [encoding] = tokenizer.encode_batch([text])
            tokenizer.decode(encoding.ids[:TEXT_CHARACTERS])
        seconds, most = time.process_time() - began, asked["text_seconds"]
        if seconds > most:
            said = (
                f"{seconds:.1f} s of a processor for {len(text)} characters as {piece[:60]!r}; {most:g} s are the most"
            )
            return tokenizer_error(source, f"the tokenizer takes {said}")
    return None


def vocabulary_pieces(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary's first pieces, which are its commonest: some alone, and all in one text.  A vocabulary may have
    no token for any other text."""
    pieces = dict[str, None]()
    for token in range(min(VOCABULARY_IDS, tokenizer.vocab_size)):
        with suppress(EncodingError, TokenizerError):
            pieces[tokenizer.decode([token])] = None
    found = [piece for piece in pieces if piece.strip()]
    return [*found[:VOCABULARY_TEXTS], "".join(found)] if found else []


def error_fields(error: CheckpointError | None) -> dict[str, str]:
    """For the answer: nothing where nothing is wrong."""
    if error is None:
        return {}
    return {"kind": type(error).__name__, "wrong": str(error).removeprefix(f"{error.file}: "), "file": error.file}


def main() -> None:
    """Of the child: a line for each that comes."""
    with suppress(OSError):  # where a container's memory runs out, this process is killed and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    write_line("")  # ready
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (asked["memory"], asked["memory"]))
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])  # of all threads' time; then this process is killed
        found = try_tokenizer(asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_line(json.dumps(error_fields(found)))


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
