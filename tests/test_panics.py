"""A panic of a library written in Rust is an error of what was asked for, and of nothing else."""

import shutil
from pathlib import Path
from typing import Any

import hostile
import pytest
from typer.testing import CliRunner

from models.errors import CheckpointError
from models.tokenizer import Tokenizer, TokenizerError
from service.cli import app

PANICS = {"normalizer": hostile.panicking_normalizer, "template": hostile.panicking_template}
SENTENCE = r"tokenizer\.json: the tokenizers library fails on the tokenizer: "


class PanicException(BaseException):
    """As the library names its own."""


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds\nnote: and so on")


@pytest.fixture(params=PANICS)
def panicking(request: pytest.FixtureRequest, tiny_classifier: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer makes the library panic."""
    folder = tmp_path / "panicking"
    shutil.copytree(tiny_classifier, folder)
    hostile.vocabulary(folder, PANICS[request.param])
    return folder


def test_a_tokenizer_on_which_the_library_panics_is_refused(panicking: Path) -> None:
    with pytest.raises(CheckpointError, match=SENTENCE):
        Tokenizer.from_folder(panicking)


class Panicking:
    """A backend that panics on every text."""

    encode_batch = encode_batch_fast = decode = panic


def test_a_panic_over_a_text_says_so(tiny_classifier: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_classifier)
    tokenizer._backend = Panicking()
    with pytest.raises(TokenizerError, match=r"library fails on this text: index out of bounds$"):
        tokenizer.encode("a fox")


def test_a_check_of_it_says_so(panicking: Path, tiny_classifier: Path) -> None:
    result = CliRunner().invoke(app, ["check", f"sick={panicking}", f"well={tiny_classifier}"])
    assert result.exit_code == 1
    assert "polyhead: sick: " in result.output
    assert "the tokenizers library fails on the tokenizer" in result.output
    assert "well" in result.output
    assert "Traceback" not in result.output
