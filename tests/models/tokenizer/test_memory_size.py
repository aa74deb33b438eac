"""The bytes that are counted for a tokenizer are an upper bound of what it takes, for each kind of model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.memory_size import count_nodes
from polyhead.service.runtime.tokenizer_check import TokenizerCheck

pytestmark = pytest.mark.usefixtures("every_tokenizer_is_checked")

MIB = 1 << 20
LETTERS, WIDE = "abcdefghijklmnopqrstuvwxyz0123456789", "".join(map(chr, range(0x4E00, 0x5000)))
UNKNOWN = "<unk>"
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux what is resident")


def random_words(count: int, length: int, letters: str = LETTERS) -> list[str]:
    dice = Random(1)
    return list(dict.fromkeys("".join(dice.choices(letters, k=length)) for _ in range(count)))


def numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate([UNKNOWN, *words])}


def unigram(words: list[str]) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": [[UNKNOWN, 0.0], *([word, -9.0] for word in words)]}


def merged(count: int) -> dict[str, Any]:
    """Byte pairs: as many merges as pieces."""
    pieces, merges = [*LETTERS], list[list[str]]()
    for left in pieces:
        merges += [[left, right] for right in LETTERS]
        pieces += [left + right for right in LETTERS]
        if len(pieces) > count:
            break
    return {"type": "BPE", "unk_token": UNKNOWN, "vocab": numbered(pieces), "merges": merges}


def added(words: list[str], *, special: bool) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": number, "content": word, "special": special, **flags} for number, word in enumerate(words, 1)]


def write_tokenizer(folder: Path, model: dict[str, Any], **other: Any) -> Path:
    folder.mkdir(exist_ok=True)
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    fields = {"version": "1.0", "added_tokens": [], **empty, "model": model, **other}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


def word_level(words: list[str]) -> dict[str, Any]:
    return {"type": "WordLevel", "unk_token": UNKNOWN, "vocab": numbered(words)}


def word_piece(words: list[str]) -> dict[str, Any]:
    fields = {"unk_token": UNKNOWN, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {"type": "WordPiece", **fields, "vocab": numbered(words)}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "unigram, long": lambda: {"model": unigram(random_words(4000, 60))},
    "unigram, long and wide": lambda: {"model": unigram(random_words(2000, 40, WIDE))},
    "unigram, short": lambda: {"model": unigram(random_words(60_000, 4))},
    "byte pairs": lambda: {"model": merged(60_000)},
    "word piece": lambda: {"model": word_piece(random_words(60_000, 6))},
    "word level": lambda: {"model": word_level(random_words(60_000, 8))},
    "added, long": lambda: {"model": word_level([]), "added_tokens": added(random_words(1600, 250), special=False)},
    "control, long": lambda: {"model": word_level([]), "added_tokens": added(random_words(1600, 250), special=True)},
    "control, short": lambda: {"model": word_level([]), "added_tokens": added(random_words(20_000, 12), special=True)},
}


@pytest.fixture(scope="module")
def checker() -> Iterator[TokenizerCheck]:
    checker = TokenizerCheck()
    yield checker
    checker.close()


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_counted_is_not_less_than_what_it_takes(kind: str, tmp_path: Path, checker: TokenizerCheck) -> None:
    folder = write_tokenizer(tmp_path / "a", **KINDS[kind]())
    taken, counted = checker.check_folder(folder, {}), Tokenizer.from_folder(folder).memory_bytes
    assert 0 < taken <= counted
    if kind.startswith("unigram"):  # nearly all of it is the tree
        assert counted <= 3 * taken


def test_nodes_are_the_different_beginnings_of_the_pieces() -> None:
    words = [*random_words(300, 3), *random_words(50, 5, WIDE), "a", "ab", "abc", ""]
    spelled = [word.encode() for word in words]
    assert count_nodes(words) == len({word[:end] for word in spelled for end in range(1, len(word) + 1)})


@linux
def test_what_is_not_counted_is_measured(tmp_path: Path, checker: TokenizerCheck) -> None:
    """A class of letters in a regular expression is a table of kilobytes, which its five characters do not show."""
    steps = [
        {"type": "Split", "pattern": {"Regex": r"\p{L}" * 1000 + str(step)}, "behavior": "Isolated", "invert": False}
        for step in range(6)
    ]
    cuts = {"type": "Sequence", "pretokenizers": steps}
    folder = write_tokenizer(tmp_path / "a", word_level([]), pre_tokenizer=cuts)
    taken = checker.check_folder(folder, {})
    assert taken > 20 * MIB
    assert Tokenizer.from_folder(folder).memory_bytes < MIB
    tokenizer = Tokenizer.from_folder(folder, taken)
    assert [each.memory_bytes for each in (tokenizer, tokenizer.lower_case())] == [taken] * 2
    assert tokenizer.without_boundary_tokens().memory_bytes == taken


@linux
def test_a_second_check_in_the_same_process_measures_the_same(tmp_path: Path, checker: TokenizerCheck) -> None:
    """The heap of the first one is free by then, and what is taken from it counts."""
    folder = write_tokenizer(tmp_path / "a", **KINDS["unigram, long"]())
    first, second = (checker.check_folder(folder, {}) for _ in range(2))
    assert first == pytest.approx(second, rel=0.1)
