"""Formats of the server's log: one line for each message on standard error, for people (console) or machines (JSON).

Prompts, answers and keys are never passed to a logger, so no format can leak them.  Names and passwords before the
host of a URL are hidden in each line.  Further values of a message are
passed as `extra` and become fields in JSON.  Line breaks, terminal controls, characters that change the direction of
text and invisible ones are escaped, so that quoted text cannot forge a log line.

A server never waits for who reads its log: a thread writes it (`LineQueue`), and lines that do not fit are counted.
"""

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Literal, NoReturn, TextIO

import orjson

from .line_queue import LineQueue

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
# Their messages at level info repeat ours, or have addresses with passwords in them.
WARNING_LOGGERS = ("uvicorn", "httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub")

# Controls (C0, DEL, C1), Unicode line ends, characters that change the direction of text, lone surrogates, and format
# characters that nobody sees, tags among them.  The joiners U+200C and U+200D stay: Persian words and emoji need them.
UNSAFE_CHARS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
USER_OF_URL = re.compile(r"(?<=://)[^\s/@\"']+@")
SHORT_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
CONTINUATION_PREFIX = "  | "  # before each further line of a message, such as those of a traceback


def hide_users(text: str) -> str:
    """`text` with what stands before the host of each URL hidden: a password, or a token in the place of a name."""
    return USER_OF_URL.sub("***@", text)


def escape_controls(text: str) -> str:
    """`text` on one line, with only visible characters."""
    return UNSAFE_CHARS.sub(lambda found: SHORT_ESCAPES.get(found[0], escape_character(found[0])), text)


def escape_character(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def escape_lines(text: str) -> str:
    """The same for a text of several lines: its newlines and tabs stay."""
    return re.sub(r"[^\n\t]+", lambda found: escape_controls(found[0]), text)


def escape_for_terminal(text: str, stream: TextIO) -> str:
    """`text` for writing to `stream`: for a terminal all but newlines and tabs is escaped.

    Labels and answers of a model may contain any character.
    """
    return escape_lines(text) if stream.isatty() else text


class ConsoleFormatter(logging.Formatter):
    """Time, level and message on one line, then the lines of a traceback, each with a prefix."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().rstrip()
        lines = [f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {escape_controls(message)}"]
        if record.exc_info:
            lines += [
                CONTINUATION_PREFIX + escape_controls(line)
                for line in self.formatException(record.exc_info).split("\n")
            ]
        return hide_users("\n".join(lines))


class CommandFormatter(logging.Formatter):
    """The message alone on one line, then the lines of a traceback: for commands that are no server."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [record.getMessage().rstrip()]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return hide_users("\n".join(map(escape_controls, lines)))


class JsonFormatter(logging.Formatter):
    """One JSON object for each line: time, level, logger, message, and the values given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_surrogates(record.getMessage()),
        }
        line |= {key: value for key, value in vars(record).items() if key not in STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = escape_surrogates(self.formatException(record.exc_info))
        # JSON allows these characters in strings, but terminals and line readers interpret them.
        text = UNSAFE_CHARS.sub(lambda found: json.dumps(found[0])[1:-1], orjson.dumps(line, default=str).decode())
        return hide_users(text)


def escape_surrogates(text: str) -> str:
    """`text` with lone surrogates escaped, which JSON cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


class QueuedLog(logging.StreamHandler[LineQueue]):
    """Passes each record to a LineQueue as a line.  Logging closes it at the end of the interpreter."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(LineQueue(sys.stderr, self.describe_dropped))
        self.setFormatter(formatter)

    def describe_dropped(self, count: int) -> str:
        text = "lines of the log were dropped: the reader was too slow, or they could not be written"
        record = logging.makeLogRecord(
            {"name": "polyhead.log", "levelno": logging.WARNING, "levelname": "WARNING", "msg": f"{count} {text}"}
        )
        return self.format(record) + self.terminator

    def flush(self) -> None:
        """Does nothing: it is called after each record, and the thread writes at once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A record that cannot be formatted: its traceback is a line, where logging would write to standard error."""
        place = f"{record.name}, {record.module}:{record.lineno}"
        self.stream.write(escape_controls(f"a line of {place} is wrong: {traceback.format_exc().rstrip()}") + "\n")

    def close(self) -> None:
        self.stream.close()
        super().close()


def queued_logs() -> list[QueuedLog]:
    """The handler of a server's log; none in a command that is no server."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, QueuedLog)]


def count_dropped_lines() -> int:
    """Lines of the log that were not written, since the start."""
    return sum(handler.stream.dropped for handler in queued_logs())


def drain_lines() -> None:
    """Wait until the lines logged so far are written, DRAIN_SECONDS at most."""
    for handler in queued_logs():
        handler.stream.drain()


def exit_process(code: int) -> NoReturn:
    """End the process at once, without what the interpreter does at its end, but with the lines of its log."""
    drain_lines()
    os._exit(code)


def write_lines(lines: str) -> None:
    """Write to standard error, behind what a server has logged; on a terminal without what would control it."""
    text, handlers = escape_for_terminal(lines, sys.stderr), queued_logs()
    for handler in handlers:
        handler.stream.write(text)
    if not handlers:
        sys.stderr.write(text)
        sys.stderr.flush()


def write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of an exception that nothing has caught: sys.excepthook.  It may quote a file."""
    write_lines("".join(traceback.format_exception(kind, error, trace)))


def write_thread_traceback(ended: threading.ExceptHookArgs) -> None:
    """The same for a thread, which ends with it: threading.excepthook."""
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        write_traceback(ended.exc_type, ended.exc_value, ended.exc_traceback)


def write_unraisable(ended: "sys.UnraisableHookArgs") -> None:
    """The same for an exception that cannot be raised, as in `__del__`: sys.unraisablehook."""
    if ended.exc_value is not None:
        write_traceback(ended.exc_type, ended.exc_value, ended.exc_traceback)


def configure_commands() -> None:
    """Log warnings of commands to standard error, and write tracebacks there, without what would control a terminal.
    Messages and tracebacks quote files of strangers.  `serve` replaces the log's form with `configure_logging`."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(CommandFormatter())
    replace_handler(stream, "WARNING")
    write_tracebacks()


def write_tracebacks() -> None:
    """Have tracebacks that nothing has caught written here."""
    sys.excepthook, threading.excepthook, sys.unraisablehook = write_traceback, write_thread_traceback, write_unraisable


def configure_logging(shape: Literal["console", "json"], level: str) -> None:
    """Log to standard error on a thread, Python warnings and tracebacks that nothing has caught, too; replaces an
    earlier configuration.
    """
    write_tracebacks()
    replace_handler(QueuedLog(JsonFormatter() if shape == "json" else ConsoleFormatter()), level)


def replace_handler(handler: logging.Handler, level: str) -> None:
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in WARNING_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
