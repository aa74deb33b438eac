"""`polyhead chat`, `classify` and `embed` with texts from a pipe or from arguments.

Standard output has the answer only, so it can be piped on.  Errors go to standard error.
"""

import sys
from collections.abc import Iterable
from contextlib import closing

import orjson

from ..core.logs import escape_for_terminal
from .chat_options import ChatOptions
from .client import ApiClient


def write_output(text: str) -> None:
    """Write to standard output.  On a terminal, control characters except newlines and tabs are escaped as in the
    log.
    """
    sys.stdout.write(escape_for_terminal(text, sys.stdout))
    sys.stdout.flush()


def write_error(text: str) -> None:
    """Write to standard error, with the same escaping as `write_output`."""
    sys.stderr.write(escape_for_terminal(text, sys.stderr))
    sys.stderr.flush()


def answer_question(client: ApiClient, options: ChatOptions, question: str) -> None:
    """Answer one question.  Says on standard error if the answer was cut."""
    messages = [*options.opening, {"role": "user", "content": question}]
    with closing(client.chat(messages, options.fields(client))) as pieces:
        try:
            is_cut = write_pieces(pieces, options.piped_pieces)
        finally:
            write_output("\n")
    if is_cut or client.finish == "length":
        write_error("(the answer was cut; --max-tokens allows more, 0 as many as the context has)\n")


def write_pieces(pieces: Iterable[str], most: int) -> bool:
    """Write the pieces of an answer, at most so many that are not empty; 0: all.  Returns whether there were more."""
    for count, piece in enumerate(filter(None, pieces)):
        if most and count == most:
            return True
        write_output(piece)
    return False


def classify(client: ApiClient, name: str, texts: list[str]) -> None:
    """Write a line for each text: its label, the score, the text."""
    model = name or client.find_model("classify")
    for text in texts or sys.stdin.read().splitlines():
        label, score = client.classify(model, text)[0]
        write_output(f"{label}\t{score:.4f}\t{text}\n")


def embed(client: ApiClient, name: str, texts: list[str]) -> None:
    """Write a line for each text: its vector as JSON."""
    model = name or client.find_model("embed")
    for text in texts or sys.stdin.read().splitlines():
        write_output(orjson.dumps(client.embed(model, text)).decode() + "\n")
