"""`polyhead chat` in a terminal: questions of one or more lines, and answers that are shown as they are generated.

Ctrl-C stops an answer, whose request then ends on the server; at the prompt it discards what was typed.  The answer is
written to standard output, everything else to standard error.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from ..core.logs import escape_for_terminal, escape_lines
from .chat_options import ChatOptions
from .client import ApiClient, ClientError
from .terminal import write_error, write_output

with suppress(ImportError):  # Windows has none; with it `input` has a history and takes pasted lines as one text
    import readline

    readline.set_auto_history(True)

PROMPT, CONTINUATION = "> ", "... "
BLOCK = '"""'  # before and after a text of several lines
HELP = f"""A line that ends in \\ is continued by the next one; {BLOCK} begins and ends a text of several lines.
/clear begins a new conversation, /help shows this, Ctrl-C stops an answer, Ctrl-D leaves.
"""
FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)
MARGIN = 2  # lines of the terminal that an unfinished paragraph leaves free
UPDATES_PER_SECOND = 12


class AnswerDisplay(Protocol):
    """Shows an answer that grows."""

    def add(self, piece: str) -> None: ...

    def finish(self) -> None: ...


class PlainDisplay:
    """Writes the answer as it is, and a line end after it."""

    def __init__(self) -> None:
        self.is_empty = True

    def add(self, piece: str) -> None:
        self.is_empty = False
        write_output(piece)

    def finish(self) -> None:
        if not self.is_empty:
            write_output("\n")


class LastLines:
    """The last lines of a text in Markdown, as many as the terminal has."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(parse_markdown(self.text), options, pad=False)
        for line in lines[-max(console.height - MARGIN, 1) :]:
            yield from line
            yield Segment.line()


class MarkdownDisplay:
    """Shows Markdown: finished paragraphs are printed once, and the unfinished one is drawn again as it grows."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.pending = ""  # the text of the paragraph that is not finished
        self.live = Live(console=console, transient=True, refresh_per_second=UPDATES_PER_SECOND)
        self.live.start()

    def add(self, piece: str) -> None:
        self.pending += escape_for_terminal(piece, sys.stdout)
        finished, self.pending = split_finished(self.pending)
        if finished:
            self.console.print(parse_markdown(finished))
        self.live.update(LastLines(self.pending))

    def finish(self) -> None:
        self.live.update("")
        self.live.stop()
        if self.pending.strip():
            self.console.print(parse_markdown(self.pending))


def parse_markdown(text: str) -> Markdown:
    """Addresses of links are shown in the text: a terminal would hide where they lead.

    What entities spell (`&#8238;`) is escaped as other text is.
    """
    parsed = Markdown(text, hyperlinks=False)
    for token in parsed.parsed:
        for each in (token, *(token.children or ())):
            each.content = escape_lines(each.content)
    return parsed


def split_finished(text: str) -> tuple[str, str]:
    """Split a text after its last blank line that is outside of a code block."""
    end, position, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        if mark := FENCE.match(line):
            if not fence:
                fence = mark[1]
            elif line.strip().startswith(fence):
                fence = ""
        elif not fence and line.isspace() and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


def hold_conversation(client: ApiClient, options: ChatOptions) -> None:
    """Ask and answer until the end of the input."""
    fields = options.fields(client)
    write_error(f"{fields['model']} at {client.url}; Ctrl-C stops an answer, Ctrl-D leaves, /help says more\n")
    messages = list(options.opening)
    for question in read_questions(read_line):
        if question.strip() == "/clear":
            messages = list(options.opening)
        elif question.strip() == "/help":
            write_error(HELP)
        elif question.strip():
            asked = [*messages, {"role": "user", "content": question}]
            try:
                messages = [*asked, {"role": "assistant", "content": show_answer(client, asked, options, fields)}]
            except ClientError as error:
                write_error(f"{error}\n")


def read_questions(read: Callable[[str], str]) -> Iterator[str]:
    """Yield questions until `read` raises EOFError.  Ctrl-C discards what was typed."""
    while True:
        try:
            yield read_question(read)
        except KeyboardInterrupt:
            write_error("\n")
        except EOFError:
            write_error("\n")
            return


def read_question(read: Callable[[str], str]) -> str:
    """Read a question of one or more lines, each by a call of `read` with the prompt."""
    line = read(PROMPT)
    lines = [line]
    if line.lstrip().startswith(BLOCK):
        lines = [line.lstrip().removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(read(CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read(CONTINUATION))
    return "\n".join(lines)


def read_line(prompt: str) -> str:
    """Read a line, with editing where input and output are the terminal.  Raises EOFError at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    write_error(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def choose_display(options: ChatOptions) -> AnswerDisplay:
    console = Console(file=sys.stdout, highlight=False)
    if not options.renders_markdown or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay()
    return MarkdownDisplay(console)


def show_answer(
    client: ApiClient, messages: Sequence[dict[str, str]], options: ChatOptions, fields: dict[str, str | float]
) -> str:
    """Show the answer as it is generated, and return what came of it."""
    parts, stopped = list[str](), False
    display = choose_display(options)
    try:
        with closing(client.chat(messages, fields)) as pieces:
            for piece in pieces:
                parts.append(piece)
                display.add(piece)
    except KeyboardInterrupt:
        stopped = True
    finally:
        display.finish()
    if stopped:
        write_error("(stopped)\n")
    return "".join(parts)
