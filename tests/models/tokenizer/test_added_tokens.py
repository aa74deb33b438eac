"""Bounds of added tokens: the library makes an automaton of them, and other threads wait until it is made."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer, added_tokens, copy_without_control, tokenizer_files
from polyhead.models.tokenizer.vocabulary import Vocabulary
from tests.models.tokenizer.test_tokenizer import sentencepiece_fields
from tests.support.tokenizer_fields import bases

LONG = f"{0:0256}"


@pytest.fixture
def changed(tiny_generator: Path, tmp_path: Path) -> Callable[..., Path]:
    """A folder whose tokenizer.json adds these tokens; `write` changes its text."""

    def make(contents: list[str], write: Callable[[str], str] = str) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_generator, folder, dirs_exist_ok=True)
        values: dict[str, Any] = json.loads((tiny_generator / "tokenizer.json").read_text())
        first = max(values["model"]["vocab"].values()) + 1
        values["added_tokens"] += [
            {"id": first + row, "content": content, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for row, content in enumerate(contents)
        ]
        (folder / "tokenizer.json").write_text(write(json.dumps(values)))
        return folder

    return make


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gets no text: what is refused is refused before."""

    class Unread:
        @staticmethod
        def from_str(text: str) -> tokenizers.Tokenizer:
            raise AssertionError(f"the library reads {len(text)} characters")

    monkeypatch.setattr("polyhead.models.tokenizer.tokenizer_files.Tokenizer", Unread)


def test_a_long_added_token(changed: Callable[..., Path]) -> None:
    assert Tokenizer.from_folder(changed([LONG])).token_id(LONG)


@pytest.mark.usefixtures("unread")
def test_added_tokens_are_bounded_before_the_library_reads_them(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"'0+'\.\.\. has 257 characters; 256 are the most") as raised:
        Tokenizer.from_folder(folder := changed([f"0{LONG}"]))
    assert raised.value.file == str(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"added tokens have 10\d{5} characters in all; 1048576 are the most"):
        Tokenizer.from_folder(changed([f"{number:0256}" for number in range(4097)]))
    monkeypatch.setattr(added_tokens, "MAX_ADDED_TOKENS", 100)
    with pytest.raises(CheckpointError, match=r"has more than 100 added tokens"):
        Tokenizer.from_folder(changed([f"<{number}>" for number in range(101)]))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda text: text.replace('"added_tokens"', '"added\\u005ftokens"'), "has 257 characters"),
        (lambda text: text.replace('"added_tokens":', '"added_tokens"\n:\t'), "has 257 characters"),
        (lambda text: text.replace('"added_tokens":', '"added_tokens": [], "added_tokens":'), "has 2 lists of added"),
    ],
)
def test_the_list_of_added_tokens_is_found_however_it_is_written(
    changed: Callable[..., Path], write: Callable[[str], str], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        Tokenizer.from_folder(changed([f"0{LONG}"], write))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {f"0{LONG}": 384}),
        ("special_tokens_map.json", {"additional_special_tokens": [f"0{LONG}"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"384": {"content": f"0{LONG}"}}}),
    ],
)
def test_added_tokens_of_the_small_files_are_bounded(
    changed: Callable[..., Path], file: str, content: dict[str, Any]
) -> None:
    folder = changed([])
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has 257 characters; 256 are the most"):
        Tokenizer.from_folder(folder)


def test_tokens_of_the_small_files_are_added_in_one_call(changed: Callable[..., Path]) -> None:
    """The library makes its automaton again in each call."""
    calls = list[int]()

    class Counted:
        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.backend, name)
            return self.count(found) if name in ("add_tokens", "add_special_tokens") else found

        def count(self, add: Callable[[list[Any]], int]) -> Callable[[list[Any]], int]:
            return lambda tokens: calls.append(len(tokens)) or add(tokens)

    folder = changed([])
    first = Tokenizer.from_folder(folder).vocab_size
    names = {f"<{number}>": first + number for number in range(50)}
    (folder / "added_tokens.json").write_text(json.dumps(names))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": [*names][:20]}))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer_files._add_tokens(cast(Any, Counted(backend)), tokenizer_files._read_settings(folder), folder)
    assert len(calls) == 2
    added = backend.get_added_tokens_decoder()
    assert [added[index].content for index in names.values()] == list(names)
    assert [added[index].special for index in names.values()] == [True] * 20 + [False] * 30


def test_control_tokens_of_a_gguf_file_are_bounded() -> None:
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], f"0{LONG}"]
    fields["tokenizer.ggml.scores"] = [*fields["tokenizer.ggml.scores"], 0.0]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 3]
    with pytest.raises(CheckpointError, match="has 257 characters; 256 are the most"):
        Tokenizer.from_gguf(fields)


def test_the_encoder_without_control_tokens_is_equal_otherwise() -> None:
    for text in bases().values():
        backend = tokenizers.Tokenizer.from_str(text)
        backend.add_tokens(["<plain>", tokenizers.AddedToken("<wide>", lstrip=True, special=True), "<last>"])
        assert copy_without_control(backend).to_str() == backend.to_str()


def test_no_request_reads_the_vocabulary_again(changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(changed(["<|one|>", "<|two|>"])).with_text_tags(frozenset(("<|two|>",)))

    class Unread:
        def __init__(self, *_: Any) -> None:
            raise AssertionError("another tokenizer is made")

        from_str = __init__

    monkeypatch.setattr("polyhead.models.tokenizer.tokenizers.Tokenizer", Unread)
    monkeypatch.setattr("polyhead.models.tokenizer.special_token_escape.Tokenizer", Unread)
    [plain] = tokenizer.encode_batch(["<|one|>"], special=False, untrusted=True)
    assert plain.ids != [tokenizer.token_id("<|one|>")]
    assert tokenizer.encode_quoted(tokenizer.quote("<|one|>"))


def test_a_whole_vocabulary_is_listed_once(changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads wait while the library makes a table or a text of a vocabulary."""
    calls = list[str]()

    class Counted:
        def __init__(self, backend: tokenizers.Tokenizer) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self.backend, name)

    same, other = Tokenizer.from_folder(changed([])), Tokenizer.from_folder(changed(["<other>"]))
    backend = tokenizers.Tokenizer.from_file(str(changed([]) / "tokenizer.json"))
    monkeypatch.setattr("polyhead.models.tokenizer.copy_without_control", lambda _: backend)
    tokenizer = Tokenizer(Vocabulary(cast(Any, Counted(backend)), same.bos_token, same.eos_token))
    for _ in range(2):
        assert tokenizer.has_same_tokens(same)
        assert not tokenizer.has_same_tokens(other)
        assert other.digest != tokenizer.digest == Tokenizer.from_parts(*tokenizer.parts).digest
    assert calls.count("get_vocab") == 1
    assert calls.count("to_str") == 3  # two for the parts of this test


def test_a_vocabulary_with_another_piece_is_another(changed: Callable[..., Path]) -> None:
    one, two = (Tokenizer.from_folder(changed([name])) for name in ("<one>", "<two>"))
    assert one.vocab_size == two.vocab_size
    assert not one.has_same_tokens(two)
    assert one.has_same_tokens(Tokenizer.from_folder(changed(["<one>"])))
