"""How the server writes its log: one line a message on standard error, for people or for machines.

Knows nothing of what is logged.  The one idea: prompts, answers and keys are never handed to a logger, so no format
can leak them; what else a message knows goes in `extra` and becomes fields in JSON.  And whatever a message quotes,
nobody but this module begins a line: what could (or could move a terminal's cursor, or turn its text around) is
written out.
"""

import logging
import re
import sys
import time
from typing import Any, Literal, TextIO

import orjson

STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
WARNING_LOGGERS = ("uvicorn", "httpx", "httpcore", "huggingface_hub")  # they tell at "info" what we tell better
ERROR_LOGGERS = ("opentelemetry.trace",)  # warn of clients' headers, of which the standard says to ignore them

# Controls (C0, DEL, C1), what ends a line in Unicode, what changes the direction of text, and halves of characters.
UNSAFE_CHARS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
SHORT_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
CONTINUATION_PREFIX = "  | "  # before every further line of a message: a traceback has some


def escape_controls(text: str) -> str:
    """`text` on one line, and nothing in it but what can be seen."""
    return UNSAFE_CHARS.sub(lambda found: SHORT_ESCAPES.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def escape_for_terminal(text: str, stream: TextIO) -> str:
    """`text` as it may be written to `stream`: for a terminal all but newlines and tabs as `safe` makes it.

    A model's labels and answers may hold any character.
    """
    return re.sub(r"[^\n\t]+", lambda found: escape_controls(found[0]), text) if stream.isatty() else text


class ConsoleFormatter(logging.Formatter):
    """Time, level and message on one line; the lines of a traceback below it, each marked as such."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().rstrip()
        lines = [f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {escape_controls(message)}"]
        if record.exc_info:
            lines += [
                CONTINUATION_PREFIX + escape_controls(line)
                for line in self.formatException(record.exc_info).split("\n")
            ]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what was given as `extra`."""

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
        # What JSON lets stand in a string, terminals and readers of lines may not.
        return UNSAFE_CHARS.sub(lambda found: f"\\u{ord(found[0]):04x}", orjson.dumps(line, default=str).decode())


def escape_surrogates(text: str) -> str:
    """`text` without halves of characters, which JSON has no way to write."""
    return text.encode("utf-8", "backslashreplace").decode()


def configure_logging(shape: Literal["console", "json"], level: str) -> None:
    """Send everything that is logged to standard error, warnings too; replaces what was configured before."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter() if shape == "json" else ConsoleFormatter())
    logging.basicConfig(handlers=[stream], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in WARNING_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    for name in ERROR_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.ERROR, logging.getLogger().level))
