"""A tokenizer.json with any value in any field works or is refused with a message; it never crashes the process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.merges import MAX_AFFIX_LENGTH
from tests.support import tokenizer_fields

COUNT, MANY = 200, 4000
PATIENCE = 240.0  # seconds for all changes
LONG_PATIENCE = 3000.0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [24])
def test_any_value_in_any_field_loads_or_is_refused(
    tiny_classifier: Path, tmp_path: Path, seed: int, full: bool
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_classifier, folder)
    command = [sys.executable, tokenizer_fields.__file__, str(folder), str(seed), str(MANY if full else COUNT)]
    with (tmp_path / "errors.txt").open("w") as errors:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=LONG_PATIENCE if full else PATIENCE,
            check=False,
            text=True,
            env=os.environ | {"RUST_BACKTRACE": "0"},
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert done.returncode == 0, f"the process ended at {lines[-1:]}"
    assert len(lines) == 2 * (MANY if full else COUNT)
    wrong = [(what, said) for what, said in zip(lines[::2], lines[1::2], strict=True) if said]
    assert not wrong


def written(folder: Path, base: str, *place: str, new: object) -> Path:
    values = tokenizer_fields.mutated(json.loads(tokenizer_fields.bases()[base]), place, new)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(("member", "new"), [("tokens", []), ("ids", []), ("tokens", ["a", "b"])])
def test_inconsistent_special_tokens_are_refused(tmp_path: Path, member: str, new: list[str]) -> None:
    folder = written(tmp_path, "WordPiece", "post_processor", "special_tokens", "[CLS]", member, new=new)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: post_processor: what it adds around a text has \d ids, "
    ):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("base", ["byte-level BPE", "RoBERTa's BPE"])
def test_a_prefix_that_contradicts_the_merges_is_refused(tmp_path: Path, base: str) -> None:
    """Without the check, the library would abort the process."""
    folder = written(tmp_path, base, "model", "continuing_subword_prefix", new=" ")
    with pytest.raises(CheckpointError, match=r"model\.merges\[0\] has '.*' where model\.continuing_subword_prefix"):
        Tokenizer.from_folder(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("continuing", "\\u0063ontinuing"))
    with pytest.raises(CheckpointError, match=r"model\.merges\[0\] has"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_a_long_prefix_or_suffix_is_refused(tmp_path: Path, name: str) -> None:
    """It would turn a short text into millions of tokens."""
    folder = written(tmp_path, "SentencePiece BPE", "model", name, new="a" * (MAX_AFFIX_LENGTH + 1))
    with pytest.raises(CheckpointError, match=f"model.{name} has 17 characters, at most 16 are read"):
        Tokenizer.from_folder(folder)
