"""A malicious tokenizer is tried in a child process, and the server survives."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.cli.main import app
from polyhead.service.runtime import tokenizer_check as vetting
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from tests.models.tokenizer.test_tokenizer import sentencepiece_fields
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.service.runtime.test_registry import serving
from tests.support import hostile

PATIENCE_S = 120.0
WORDS = "a tokenizer: words of any length"  # takes minutes for a long word
HANGS, ABORTS = "a tokenizer: pieces of any length", "a normalizer that panics"
DIES = (
    r"the tokenizers library fails on the tokenizer: the process that tried it ended with signal 6; it may take 4 GiB"
)


@pytest.fixture
def spoiled(tiny_classifier: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint with one of the tokenizers of `hostile`."""

    def make(name: str) -> Path:
        folder = tmp_path / "spoiled" / str(len(name))
        shutil.copytree(tiny_classifier, folder)
        hostile.FOLDERS[name](folder)
        return folder

    return make


@pytest.fixture
def vet() -> Iterator[TokenizerCheck]:
    vet = TokenizerCheck()
    yield vet
    vet.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "CPU_SECONDS", 2)


def test_one_that_aborts_the_process_ends_the_child_and_the_next_is_tried(
    vet: TokenizerCheck, spoiled: Callable[[str], Path], tiny_classifier: Path
) -> None:
    """It allocates 4 GiB; a Rust library aborts if it does not get them."""
    folder = spoiled(ABORTS)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=DIES) as raised:
            vet.check_folder(folder, {})
        assert raised.value.file == str(folder)
        vet.check_folder(tiny_classifier, {})


def test_one_that_takes_all_time_is_ended(
    vet: TokenizerCheck, spoiled: Callable[[str], Path], tiny_classifier: Path
) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer takes more than 2 s of a processor to be read and tried"):
        vet.check_folder(spoiled(HANGS), {})
    vet.check_folder(tiny_classifier, {})


def test_one_that_takes_long_for_a_text_says_for_which(
    vet: TokenizerCheck, spoiled: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vetting, "CPU_SECONDS", 60)
    said = r"the tokenizer takes \S+ s of a processor for 8192 characters as 'a'; 0.25 s are the most"
    with pytest.raises(CheckpointError, match=said):
        vet.check_folder(spoiled("a tokenizer: a normalizer that multiplies within bounds"), {})


def test_one_call_of_the_library_has_a_bound(
    vet: TokenizerCheck, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps the interpreter's lock in a call, so the server would wait as long."""
    monkeypatch.setattr(vetting, "CPU_SECONDS_PER_CALL", 0.0)
    said = r"reading the tokenizer takes \S+ s of a processor in one call, while no other thread runs; 0 s are the most"
    with pytest.raises(CheckpointError, match=said) as raised:
        vet.check_folder(tiny_classifier, {})
    assert raised.value.file == str(tiny_classifier)


def test_a_call_that_keeps_the_interpreter_is_measured_whole() -> None:
    with vetting.InterpreterWatch() as watch:
        before = time.process_time()
        sum(range(20_000_000))  # one call, in which no other thread runs
        spent = time.process_time() - before
    assert watch.longest >= spent / 2


def test_texts_of_the_vocabulary_s_own_pieces_are_tried_too(
    vet: TokenizerCheck, tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow only on a letter that is in none of the fixed texts, and the only one with a token in the vocabulary."""
    folder = tmp_path / "z"
    shutil.copytree(tiny_classifier, folder)

    def slow(values: dict[str, Any]) -> None:
        hostile.repeated_unseen(values)
        values["post_processor"] = None
        hostile.normalized(*[hostile.replacing("z", "zz")] * 8)(values)

    hostile.vocabulary(folder, slow)
    monkeypatch.setattr(vetting, "CPU_SECONDS", 60)
    monkeypatch.setattr(vetting, "CPU_SECONDS_PER_TEXT", 0.05)  # of two million tokens
    with pytest.raises(CheckpointError, match="s of a processor for 8192 characters as 'z'"):
        vet.check_folder(folder, {})


def test_long_pieces_of_its_own_are_cut_before_they_are_repeated(
    vet: TokenizerCheck, tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined they have 1.5 million characters, which 8,192 times would not fit in memory."""
    folder = tmp_path / "long"
    shutil.copytree(tiny_classifier, folder)

    def lengthened(values: dict[str, Any]) -> None:
        names = ["[UNK]", "[CLS]", "[SEP]", *(f"{number:03}" + "x" * 3000 for number in range(509))]
        values["model"] |= {"vocab": {name: number for number, name in enumerate(names)}, "unk_token": "[UNK]"}
        values["added_tokens"], values["post_processor"] = [], None

    hostile.vocabulary(folder, lengthened)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    monkeypatch.setattr(vetting, "CPU_SECONDS", 60)
    vet.check_folder(folder, {})


def test_the_vocabulary_of_a_gguf_file_is_tried_too(vet: TokenizerCheck, tmp_path: Path) -> None:
    file, fields = tmp_path / "a.gguf", sentencepiece_fields()
    vet.check_folder(file, fields)
    vet.check_folder(
        file, fields | {"tokenizer.ggml.tokens_of_another": ["x" * 100] * 50_000}
    )  # a question of megabytes
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model is missing"):
        vet.check_folder(file, {name: value for name, value in fields.items() if not name.endswith(".model")})


def test_a_question_is_a_line_of_json() -> None:
    for fields in (
        {},
        {"one": "a\n\u00e9\U0001f642\x01"},
        {"one": ["a", "b"], "two": [1, 2.5, float("inf")], "three": True},
    ):
        line = vetting.write_question({"source": "a\nb", "memory": 3}, fields)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert json.loads(line) == {"source": "a\nb", "memory": 3, "fields": fields}


def test_a_child_that_ends_by_itself_is_no_failure_of_the_library() -> None:
    assert vetting.describe_exit(1).startswith(
        "the tokenizer cannot be tried: the process that tried it ended with status 1"
    )
    assert vetting.describe_exit(-6).startswith("the tokenizers library fails on the tokenizer: ")


def test_what_is_wrong_otherwise_is_said_as_by_whoever_reads_it(
    vet: TokenizerCheck, spoiled: Callable[[str], Path]
) -> None:
    folder = spoiled("a template that panics")
    with pytest.raises(CheckpointError) as here:
        Tokenizer.from_folder(folder)
    with pytest.raises(CheckpointError) as there:
        vet.check_folder(folder, {})
    assert (str(there.value), there.value.file) == (str(here.value), here.value.file)


def test_a_child_that_was_ended_from_outside_is_started_again(vet: TokenizerCheck, tiny_classifier: Path) -> None:
    vet.check_folder(tiny_classifier, {})
    process = vet._process
    assert process is not None
    process.kill()
    process.wait()
    vet.check_folder(tiny_classifier, {})
    vet.close()
    assert vet._process is None


def test_a_child_that_does_not_answer_is_ended(
    vet: TokenizerCheck, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vet.check_folder(tiny_classifier, {})
    assert vet._process is not None
    os.kill(vet._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr(vetting, "WALL_SECONDS", 0.2)
        with pytest.raises(CheckpointError, match=r"could not be tried: the machine is too busy, it had 0\.2 s"):
            vet.check_folder(tiny_classifier, {})
    vet.check_folder(tiny_classifier, {})


def test_the_child_imports_no_torch() -> None:
    loaded = "'torch' in sys.modules or 'numpy' in sys.modules"
    command = f"import sys, polyhead.service.runtime.tokenizer_check; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_a_check_says_so(spoiled: Callable[[str], Path], tiny_classifier: Path) -> None:
    result = CliRunner().invoke(app, ["check", f"sick={spoiled(ABORTS)}", f"well={tiny_classifier}"])
    assert result.exit_code == 1
    assert "polyhead: sick: " in result.output
    assert "ended with signal 6" in result.output
    assert "well" in result.output
    assert "Traceback" not in result.output


def test_a_server_has_the_others(spoiled: Callable[[str], Path], tiny_classifier: Path) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
        states = registry.states()
        assert [states[name].phase for name in ("aborts", "hangs", "well")] == ["broken", "broken", "ready"]
        assert "ended with signal 6" in states["aborts"].reason
        assert "more than 2 s of a processor" in states["hangs"].reason

    serving({"aborts": spoiled(ABORTS), "hangs": spoiled(HANGS), "well": tiny_classifier}, act)


def test_a_load_of_it_fails_and_the_server_lives(spoiled: Callable[[str], Path], tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        for name in (ABORTS, HANGS, WORDS):
            asked: dict[str, Any] = {"name": "sick", "source": str(spoiled(name))}
            async with asyncio.timeout(PATIENCE_S):
                refused = await client.ask("POST", "/admin/models", asked)
            assert refused.status_code == 400
            assert "the tokenize" in refused.json()["error"]["message"]
            assert (await client.ask("POST", "/predict", {"inputs": "good"})).status_code == 200
        assert await client.names() == ["judge"]

    served(act, {"judge": tiny_classifier})


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_that_request_s_error(tiny_classifier: Path) -> None:
    """A vocabulary without an unknown token; the library then raises a bare Exception."""

    def lacking(values: dict[str, Any]) -> None:
        pieces = [[piece, -1.0] for piece in values["model"]["vocab"]]
        values["model"] = {"type": "Unigram", "unk_id": None, "vocab": pieces, "byte_fallback": False}

    async def act(client: Client) -> None:
        answer = await client.ask("POST", "/tokenize", {"inputs": "\u4e2d"})
        assert answer.status_code in (400, 422)
        assert "the tokenizer cannot read this text: Encountered an unknown token" in answer.text

    folder = tiny_classifier.parent / "lacking"
    shutil.copytree(tiny_classifier, folder)
    hostile.vocabulary(folder, lacking)
    served(act, {"judge": folder})
