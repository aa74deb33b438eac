"""How the server writes its log: one line a message on standard error, for people or for machines.

Knows nothing of what is logged.  The one idea: prompts, answers and keys are never handed to a logger, so no format
can leak them; what else a message knows goes in `extra` and becomes fields in JSON.
"""

import logging
import sys
import time
from typing import Any, Literal

import orjson

PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
LIBRARIES = ("uvicorn", "httpx", "httpcore", "huggingface_hub")  # they tell at "info" what we tell better


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in PLAIN}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(shape: Literal["console", "json"], level: str) -> None:
    """Send everything that is logged to standard error; replaces what was configured before."""
    stream = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    stream.setFormatter(JsonFormatter() if shape == "json" else plain)
    logging.basicConfig(handlers=[stream], level=level.upper(), force=True)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
