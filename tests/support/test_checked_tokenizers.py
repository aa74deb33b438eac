"""A tokenizer that passed its check is not tried again; a changed one and one that was refused are."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.errors import CheckpointError
from polyhead.service.runtime import tokenizer_check
from polyhead.service.runtime.tokenizer_check import TokenizerCheck, TokenizerMemory
from tests.support import checked_tokenizers

FOUND = TokenizerMemory(kept=9 << 20, most=9 << 20)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the child is asked for. It refuses fields that name an error."""
    sources = list[str]()

    def ask(_: TokenizerCheck, source: Path, fields: Mapping[str, Any]) -> TokenizerMemory:
        sources.append(source.name)
        if "error" in fields:
            raise CheckpointError("is refused", file=str(source))
        return FOUND

    (tmp_path / "known").mkdir()
    monkeypatch.setenv(checked_tokenizers.VARIABLE, str(tmp_path / "known"))
    monkeypatch.setattr(checked_tokenizers, "ask_child", ask)
    return sources


def test_the_same_tokenizer_in_another_folder_is_not_tried_again(
    tried: list[str], tiny_classifier: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_classifier, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"other weights")
    assert [TokenizerCheck().check_folder(folder, {}) for folder in (tiny_classifier, copy)] == [FOUND.kept] * 2
    assert len(tried) == 1


def test_another_tokenizer_or_limit_is_tried(
    tried: list[str], tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TokenizerCheck().check_folder(tiny_classifier, {})
    copy = shutil.copytree(tiny_classifier, tmp_path / "copy")
    (copy / "tokenizer_config.json").write_text("{}")
    TokenizerCheck().check_folder(copy, {})
    monkeypatch.setattr(tokenizer_check, "CPU_SECONDS_PER_TEXT", 0.0)
    TokenizerCheck().check_folder(copy, {})
    assert tried == [tiny_classifier.name, "copy", "copy"]


def test_fields_of_a_file_are_what_is_compared(tried: list[str], tmp_path: Path) -> None:
    for fields in ({"a": 1}, {"a": 1}, {"a": 2}):
        TokenizerCheck().check_folder(tmp_path / "a.gguf", fields)
    assert len(tried) == 2


def test_a_refused_tokenizer_is_tried_again(tried: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is refused"):
            TokenizerCheck().check_folder(tmp_path / "a.gguf", {"error": 1})
    assert len(tried) == 2


def test_a_link_is_followed_by_the_child_and_not_remembered(
    tried: list[str], tiny_classifier: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_classifier, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").symlink_to(tiny_classifier / "tokenizer.json")
    for _ in range(2):
        TokenizerCheck().check_folder(copy, {})
    assert len(tried) == 2
