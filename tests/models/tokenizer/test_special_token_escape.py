"""Escaped text contains no control token, for any set of control tokens, and the search takes bounded time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer import special_token_escape as escape
from polyhead.models.tokenizer.special_token_escape import ESCAPE_MARK, SpecialTokenEscape
from tests.support.edits import edited

TEKKEN = [f"<SPECIAL_{index}>" for index in range(1000)]
pieces = st.lists(st.text(alphabet="ab<", min_size=1, max_size=6), max_size=8)


def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the length of each text that is searched from now on."""
    lengths: list[int] = []
    plain = escape.search_texts

    def counted(sought: Any, texts: Sequence[str]) -> list[Any]:
        lengths.extend(map(len, texts))
        return plain(sought, texts)

    monkeypatch.setattr(escape, "search_texts", counted)
    return lengths


@given(pieces, st.text(alphabet=f"ab<é{ESCAPE_MARK}", max_size=60), st.integers(1, 9))
@settings(deadline=None)
def test_escaped_text_contains_no_control_token(control: list[str], text: str, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(escape, "WINDOW_CHARACTERS", window)
        quoting = SpecialTokenEscape(control)
        quoted = quoting.quote(text)
        assert not [piece for piece in control if len(piece) > 1 and piece in quoted]
        assert quoted.replace(ESCAPE_MARK, "") == text.replace(ESCAPE_MARK, "")
        assert quoting.split_control(quoted) == [text.replace(ESCAPE_MARK, "")]
        if not any(piece in text for piece in control if len(piece) > 1):
            assert quoted == text, "text without control tokens is unchanged"


@given(pieces, st.text(alphabet="ab<", max_size=40), st.integers(1, 9))
@settings(deadline=None)
def test_text_is_split_at_the_first_and_longest_control_token(control: list[str], text: str, window: int) -> None:
    wanted, begin, at = [], 0, 0
    while at < len(text):
        found = max((piece for piece in control if len(piece) > 1 and text.startswith(piece, at)), key=len, default="")
        if found:
            wanted += [text[begin:at], found]
            begin = at + len(found)
        at += len(found) or 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(escape, "WINDOW_CHARACTERS", window)
        assert SpecialTokenEscape(control).split_control(text) == [*wanted, text[begin:]]


@pytest.mark.parametrize(
    ("control", "unit"),
    [
        (TEKKEN, "<"),
        (TEKKEN, "<SPECIAL_"),
        (TEKKEN, "<SPECIAL_7>"),
        (["a" * length for length in range(2, 400)], "a"),
        ([("abcdefghij" * 2)[first : first + 9] for first in range(10)], "abcdefghij"),
    ],
)
def test_a_text_is_searched_in_short_steps_at_most_three_times(
    monkeypatch: pytest.MonkeyPatch, control: list[str], unit: str
) -> None:
    monkeypatch.setattr(escape, "WINDOW_CHARACTERS", 4096)
    quoting, text = SpecialTokenEscape(control), unit * (40_000 // len(unit))
    lengths = searches(monkeypatch)
    quoted = quoting.quote(text)
    longest = max(map(len, control))
    assert max(lengths) <= 4096 + longest
    full_searches = (len(text) + len(quoted) + len(quoted)) / 4096
    assert len(lengths) <= full_searches + 3, "three searches of the text at most"


def test_each_control_token_is_broken_once() -> None:
    quoting = SpecialTokenEscape([*TEKKEN, "</s>", "[INST]"])
    assert quoting.quote("a<SPECIAL_12>b[INST]c</s") == f"a<SPECIAL_12{ESCAPE_MARK}>b[INST{ESCAPE_MARK}]c</s"


def with_control(folder: Path, place: Path, *contents: str) -> Path:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = max(vocabulary["model"]["vocab"].values()) + 1
    added = [{"id": first + row, "content": content, "special": True, **flags} for row, content in enumerate(contents)]
    return edited(folder, place, "tokenizer.json", added_tokens=vocabulary["added_tokens"] + added)


def test_a_control_token_with_the_escape_mark_is_refused(tiny_generator: Path, tmp_path: Path) -> None:
    Tokenizer.from_folder(with_control(tiny_generator, tmp_path / "fine", "<ab>"))
    with pytest.raises(CheckpointError, match=r"control token 'a\\ufdd0b', with the character U\+FDD0"):
        Tokenizer.from_folder(with_control(tiny_generator, tmp_path / "marked", "<ab>", f"a{ESCAPE_MARK}b"))


def test_the_number_of_control_tokens_is_limited(
    tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_control(tiny_generator, tmp_path / "many", *TEKKEN)
    Tokenizer.from_folder(folder)
    monkeypatch.setattr(escape, "MAX_CONTROL_TOKENS", 999)
    with pytest.raises(CheckpointError, match=r"has 1\d\d\d control tokens; 999 are the most"):
        Tokenizer.from_folder(folder)
