"""`polyhead chat` in a terminal: questions of several lines, options, history, Markdown, and Ctrl-C.

The last tests run the real program in a pseudo-terminal against a real server."""

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from polyhead.service.cli import conversation
from polyhead.service.cli.conversation import MarkdownDisplay, read_question, read_questions, split_finished
from tests.support.faults import Fault
from tests.support.processes import PATIENCE, FaultServer

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
LONG = "4000"  # tokens


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Returns a line for each prompt, or raises the exception in its place; at the end EOFError."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return read


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (["one line"], "one line"),
        (["first \\", "second\\", "third"], "first \nsecond\nthird"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""one"""'], "one"),
    ],
)
def test_a_question_has_one_or_more_lines(lines: list[str], question: str) -> None:
    assert read_question(typed(*lines)) == question


def test_an_interrupt_discards_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(read_questions(typed("lost\\", KeyboardInterrupt, "kept", '"""open'))) == ["kept"]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("a", ""),
        ("a\n\nb", "a\n\n"),
        ("a\n\n```py\nx\n\ny", "a\n\n"),
        ("```py\nx\n\ny\n```\n\nb", "```py\nx\n\ny\n```\n\n"),
        ("~~~\n```\n\n~~~\n\n", "~~~\n```\n\n~~~\n\n"),
    ],
)
def test_paragraphs_are_finished_outside_of_code(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text[len(finished) :])


def test_markdown_is_rendered_and_stays_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(file=screen, force_terminal=True, width=60, height=8, color_system=None)
    display = MarkdownDisplay(console)
    for piece in (
        "A **bold",
        "** word.\n\n",
        "```py\nx = 1\n",
        "```\n",
        "\n[link](https://example.com/x)\x1b]0;own\x07",
    ):
        display.add(piece)
    display.finish()
    shown = screen.getvalue()
    printed = shown.rpartition("bold word.")[2]  # before it is what was drawn while the paragraph grew
    assert printed != shown
    assert "```" not in printed
    assert "https://example.com/x" in shown
    assert "\x1b]" not in shown  # neither a title nor a link of the terminal
    assert "\\u001b]0;own" in shown


def test_entities_of_markdown_reach_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer makes characters of entities, after the answer was escaped."""
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    display = MarkdownDisplay(Console(file=screen, force_terminal=True, width=60, height=8, color_system=None))
    display.add(
        "A &#8238;b **&rlm;** `c` [d &#x2066;](https://example.com) &#917569;\n\n|&lrm;|e|\n|-|-|\n|&shy;|שלום|\n"
    )
    display.finish()
    shown = screen.getvalue()
    assert not set("\u202e\u200f\u2066\U000e0041\u200e\xad") & set(shown)
    for escaped in (r"\u202e", r"\u200f", r"\u2066", r"\U000e0041", r"\u200e", r"\u00ad", "שלום"):
        assert escaped in shown


@pytest.fixture(scope="module")
def server(start_fault_server: Callable[..., FaultServer], long_generator: Path) -> FaultServer:
    return start_fault_server(f"chat={long_generator}")


def own_terminal() -> None:
    """In the child: standard input is its controlling terminal, whose Ctrl-C is not ignored."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The real program in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.side, theirs = pty.openpty()
        self.text = ""
        command = [sys.executable, "-m", "polyhead", "chat", *arguments]
        variables = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, preexec_fn=own_terminal
        )
        os.close(theirs)

    def read(self) -> None:
        if select.select([self.side], [], [], 0.05)[0]:
            try:
                self.text += os.read(self.side, 1 << 16).decode("utf-8", "replace")
            except OSError:  # the program has ended
                time.sleep(0.01)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.text
            self.read()

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Wait until the pattern is in the text from `after` on. Returns where it ends."""
        self.until(lambda: re.search(pattern, self.text[after:]))
        found = re.search(pattern, self.text[after:])
        assert found is not None
        return after + found.end()


@pytest.fixture
def open_terminal(server: FaultServer) -> Iterator[Callable[..., Terminal]]:
    opened = list[Terminal]()

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal("--url", server.url, *arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.process.kill()
        each.process.wait()
        os.close(each.side)


@pytest.mark.parametrize("style", ["--markdown", "--no-markdown"])
def test_an_interrupt_ends_the_answer_and_not_the_program(
    server: FaultServer, open_terminal: Callable[..., Terminal], style: str
) -> None:
    aborted = server.page.total("requests_total", outcome="aborted")
    chat = open_terminal("--max-tokens", LONG, "--system", "Be brief.", "--temperature", "0", style)
    server.arm(Fault("hang", after=5))  # so that the answer lasts
    chat.wait_for("chat at http")
    chat.wait_for("> ")
    chat.type("Tell me \\\n")
    chat.wait_for(r"\.\.\. ")
    chat.type("a story\n")
    chat.wait_for("a story")
    chat.until(lambda: chat.read() or server.page.total("requests_running") == 1)
    chat.type("\x03")
    end = chat.wait_for(r"\(stopped\)")
    server.arm()
    assert server.rest().total("requests_total", outcome="aborted") == aborted + 1
    assert chat.process.poll() is None
    end = chat.wait_for("> ", end)
    chat.type("/clear\n")
    chat.wait_for("> ", chat.wait_for("/clear", end))  # before its prompt, the line editor does not see a Ctrl-D
    chat.type("\x04")
    chat.until(lambda: chat.read() or chat.process.poll() is not None)
    assert chat.process.returncode == 0


def test_a_pipe_gets_the_plain_answer(server: FaultServer) -> None:
    command = [sys.executable, "-m", "polyhead", "chat", "--url", server.url, "--max-tokens", "3", "--temperature", "0"]
    done = subprocess.run(command, input="Hi", capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n")
    assert done.stderr.startswith("(the answer was cut; ")
    assert "\x1b[" not in done.stdout + done.stderr, "no colours in a pipe"


def test_options_and_history_are_sent() -> None:
    sent = list[tuple[list[dict[str, str]], dict[str, object]]]()

    class Client:
        url = "http://testserver"

        def chat(self, messages: list[dict[str, str]], fields: dict[str, object]) -> Iterator[str]:
            sent.append((messages, fields))
            yield from ("an", "swer")

    options = conversation.ChatOptions("m", "Be brief.", {"top_p": 0.5}, renders_markdown=False)
    lines = iter(["One", "Two", "/clear", "Three"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation, "read_line", lambda prompt: next(lines, None) or end())
        conversation.hold_conversation(Client(), options)  # type: ignore[arg-type]
    assert [[message["content"] for message in messages] for messages, _ in sent] == [
        ["Be brief.", "One"],
        ["Be brief.", "One", "answer", "Two"],
        ["Be brief.", "Three"],
    ]
    assert sent[0][1] == {"model": "m", "top_p": 0.5}


def end() -> str:
    raise EOFError
