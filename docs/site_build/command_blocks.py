"""The commands in fenced blocks of a page, and what the page shows as their output.

| block | |
|---|---|
| console | a session: after `$ ` a command, then its output. All of it is run |
| python | a program, which is run; a `text` block right after it is its output |
| sh | commands that need a container, a cluster, minutes or checkpoints of the reader; they are not run |
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "$ "
CUT = "..."  # in an output: anything may stand here


@dataclass(frozen=True)
class Command:
    """`kind` is console or python; `output` is what the page shows, None if it shows nothing."""

    kind: str
    text: str
    output: str | None
    line: int


def blocks(page: str) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of each fenced block."""
    for found in BLOCK.finditer(page):
        yield found[1], found[2], page.count("\n", 0, found.start()) + 2


def runnable(page: str) -> list[Command]:
    """The commands of a page that are run, in their order."""
    found: list[Command] = []
    fences = [*BLOCK.finditer(page)]
    for number, fence in enumerate(fences):
        line = page.count("\n", 0, fence.start()) + 2
        if fence[1] == "console":
            found += session(fence[2], line)
        elif fence[1] == "python":
            follows = fences[number + 1] if number + 1 < len(fences) else None
            beside = follows is not None and not page[fence.end() : follows.start()].strip() and follows[1] == "text"
            found.append(Command("python", fence[2], follows[2] if follows and beside else None, line))
    return found


def session(text: str, line: int) -> list[Command]:
    """The commands of a session. A command goes on while a quote is open or its line ends in a backslash."""
    found: list[Command] = []
    for number, row in enumerate(text.splitlines()):
        if found and is_open(found[-1].text):
            last = found.pop()
            found.append(Command("console", f"{last.text}\n{row}", last.output, last.line))
        elif row.startswith(PROMPT):
            found.append(Command("console", row.removeprefix(PROMPT), None, line + number))
        else:
            last = found.pop()
            found.append(Command("console", last.text, f"{last.output or ''}{row}\n", last.line))
    return found


def is_open(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def matches(shown: str, given: str) -> bool:
    """Whether an output is what a page shows. White space does not count; `...` stands for anything."""
    parts = [re.escape("".join(part.split())) for part in shown.split(CUT)]
    return re.fullmatch(".*".join(parts), "".join(given.split()), re.DOTALL) is not None
