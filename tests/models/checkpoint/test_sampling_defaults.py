"""The sampling options that checkpoints suggest, of folders and GGUF files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.checkpoint import describe_source
from polyhead.models.checkpoint.gguf_file import sampling_file
from polyhead.models.checkpoint.sampling_defaults import read_folder_sampling, read_gguf_sampling
from polyhead.models.core.errors import CheckpointError
from tests.models.checkpoint.test_gguf_file import llama, write_llama

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def test_the_options_of_a_generation_config_are_read(tiny_generator: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_generator, folder)
    (folder / "generation_config.json").write_text(json.dumps({**QWEN, "min_p": None}))
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert describe_source(str(folder)).sampling == expected
    (folder / "generation_config.json").unlink()
    assert describe_source(str(folder)).sampling == {}


def test_the_options_of_a_gguf_file_are_read() -> None:
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": -1, "general.sampling.mirostat": 1}
    assert read_gguf_sampling("file", metadata) == {"temperature": 0.5, "top_k": 0}


def test_a_generation_config_beside_a_gguf_file_fills_what_the_file_leaves_open(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", llama(), **{".general.sampling.temp": 0.25})
    assert describe_source(str(path)).sampling == {"temperature": 0.25}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')  # of another model
    assert describe_source(str(path)).sampling == {"temperature": 0.25}
    (tmp_path / "tiny.generation_config.json").write_text(json.dumps(QWEN))
    expected = {"temperature": 0.25, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert describe_source(str(path)).sampling == expected


@pytest.mark.parametrize("content", ['{"top_p": 3}', "{bad", "[]", '{"a": [' + "1," * 200_000 + "1]}", "\udcff", None])
def test_a_bad_file_beside_a_gguf_file_is_a_warning(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", llama(), **{".general.sampling.temp": 0.25})
    beside = tmp_path / "tiny.generation_config.json"
    if content is None:
        os.mkfifo(beside)
    else:
        beside.write_text(content, errors="surrogateescape")
    assert describe_source(str(path)).sampling == {"temperature": 0.25}
    assert f"{beside} is not used" in caplog.text


def test_the_parts_of_a_gguf_file_share_the_name_of_their_sampling() -> None:
    assert sampling_file(Path("a/m-00001-of-00003.gguf")) == Path("a/m.generation_config.json")
    assert sampling_file(Path("a/m.Q4.gguf")) == Path("a/m.Q4.generation_config.json")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', which should be a number from 0 to 100"),
        ({"temperature": True}, "temperature is True, which should be a number"),
        ({"top_p": 1.5}, "top_p is 1.5, which should be a number from 0 to 1"),
        ({"top_k": 2.5}, "top_k is 2.5, which should be a whole number from 0"),
        ({"top_k": 1 << 40}, "top_k is 1099511627776, which should be a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, which should be a number from 0.01 to 100"),
        ({"min_p": float("nan")}, "min_p is nan, which should be a number"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_folder_sampling("generation_config.json", fields)
