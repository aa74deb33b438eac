"""`polyhead chat`, `classify` and `embed` in a terminal or a pipe.

Standard output has the answer only, so it can be piped on.  Prompts and errors go to standard error.
"""

import sys
from contextlib import closing

import orjson

from ..core.logs import escape_for_terminal
from .client import ApiClient, ClientError


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


def chat(client: ApiClient, name: str, max_tokens: int) -> None:
    """Answer one question from a pipe, or hold a conversation in a terminal."""
    model = name or client.find_model("generate")
    if not sys.stdin.isatty():
        print_answer(client, model, [{"role": "user", "content": sys.stdin.read()}], max_tokens)
        return
    write_error(f"{model} at {client.url}; Ctrl-C stops an answer, Ctrl-D leaves\n")
    messages: list[dict[str, str]] = []
    while (line := read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": print_answer(client, model, messages, max_tokens)})
        except ClientError as error:
            messages.pop()
            write_error(f"{error}\n")


def read_line() -> str | None:
    """Read the next line; None at the end."""
    sys.stderr.write("> ")
    sys.stderr.flush()
    try:
        return sys.stdin.readline() or None
    except KeyboardInterrupt:
        return None
    finally:
        sys.stderr.flush()


def print_answer(client: ApiClient, model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
    """Write the answer as it is generated, and return what came of it."""
    parts: list[str] = []
    with closing(client.chat(model, messages, max_tokens)) as pieces:
        try:
            for piece in pieces:
                parts.append(piece)
                write_output(piece)
        except KeyboardInterrupt:
            sys.stderr.write(" (stopped)")
    write_output("\n")
    return "".join(parts)


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
