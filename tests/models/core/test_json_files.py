"""JSON of strangers: limits of bytes and values, and a parser that lets other threads compute."""

import json
import math
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from polyhead.models.checkpoint import describe_source
from polyhead.models.checkpoint.folder import list_sharded_tensors
from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.checkpoint.tensor_files import read_safetensors
from polyhead.models.core import json_files
from polyhead.models.core.errors import CheckpointError
from polyhead.models.core.json_files import HEADER_JSON, LARGE_JSON, PIECE_VALUES, SMALL_JSON, count_values, parse_json
from polyhead.models.tokenizer import Tokenizer, added_tokens, merges

VALUES: list[Any] = [
    {},
    [],
    {"a": [1, -2.5e3, True, None, {"b": []}], "ü": "\n😀", "": {"c": {"d": "e"}}},
    [[], {}, [[["x"]]]],
    "text",
    10**18,
]


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parser in C gets a text."""

    class Unused:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(raw: bytes) -> Any:
            raise AssertionError(f"{len(raw)} bytes are parsed in one piece")

    monkeypatch.setattr(json_files, "orjson", Unused)


def count_calls(work: Callable[[], object]) -> int:
    """The functions in Python that are called: at the beginning of each, other threads may compute."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("lenient", [False, True])
def test_both_parsers_read_the_same(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, value: Any, lenient: bool
) -> None:
    raw = json.dumps(value).encode()
    assert parse_json(raw, lenient=lenient) == value
    request.getfixturevalue("in_turns")
    monkeypatch.setattr(json_files, "PIECE_VALUES", 0)
    assert parse_json(raw, lenient=lenient) == value


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1e999", '"\\ud800"', '{"\\ud800": 1}', "[1] 2", "[", b"\xff"]
)
def test_what_both_parsers_refuse(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ValueError):  # noqa: PT011 - each parser has its own message
        parse_json(raw)
    monkeypatch.setattr(json_files, "PIECE_VALUES", 0)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parse_json(raw)
    assert str(raised.value).encode()


def test_the_lenient_parser_reads_what_json_reads() -> None:
    assert parse_json(b"[NaN, 1e999]", lenient=True)[1] == math.inf
    assert parse_json(b'"\\ud800"', lenient=True) == "\ud800"
    assert parse_json('{"a": 1}'.encode("utf-16"), lenient=True) == {"a": 1}
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', lenient=True) == {"a": 1}


@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("part", [b"[]", b"{}", b"1", b'"a"'])
def test_others_compute_while_many_values_are_parsed(part: bytes) -> None:
    count = PIECE_VALUES + 1
    raw = b"[" + b",".join([part] * count) + b"]"
    assert count_calls(lambda: parse_json(raw)) > count


@pytest.mark.usefixtures("in_turns")
def test_a_large_object_is_not_made_in_one_piece() -> None:
    count = PIECE_VALUES + 1
    raw = json.dumps({f"{number}": number for number in range(count)}).encode()
    assert parse_json(raw) == {f"{number}": number for number in range(count)}


@pytest.mark.parametrize("value", [*VALUES, {"a,[{": "b,b"}])
def test_no_value_is_left_out_of_the_count(value: Any) -> None:
    def count(value: Any) -> int:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, items))

    assert count_values(json.dumps(value).encode()) >= count(value)


def test_limits_of_published_files(tmp_path: Path) -> None:
    token = {"content": "<|s_65535|>"} | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    token["special"] = True
    for name, tokens, limit in (("small", 6_415, SMALL_JSON), ("large", 65_792, LARGE_JSON)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"added_tokens_decoder": {str(i): token for i in range(tokens)}}, indent=2))
        assert len(read_json(file, limit=limit)["added_tokens_decoder"]) == tokens
    for count, label in ((20_000, "Fracture of neck, part {}, initial encounter, closed, left"), (66_000, "label {}")):
        labels = {str(i): label.format(i) for i in range(count)}
        (tmp_path / "config.json").write_text(json.dumps({"id2label": labels, "label2id": labels}, indent=2))
        assert len(read_json(tmp_path / "config.json")["id2label"]) == count


def test_an_index_has_32_mib_and_a_header_131_072_tensors(tmp_path: Path) -> None:
    places = {
        f"model.layers.{i}.mlp.experts.down_proj.weight_packed{'x' * 20}": "a.safetensors" for i in range(200_000)
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}, indent=2))
    assert (tmp_path / "model.safetensors.index.json").stat().st_size > LARGE_JSON.bytes
    with pytest.raises(CheckpointError, match=r"shard a\.safetensors is missing"):
        list_sharded_tensors(tmp_path)
    entry = {"dtype": "U8", "shape": [1, 0, 1], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": entry for i in range(1 << 17)}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert len(read_safetensors(tmp_path / "a.safetensors")) == 1 << 17


def test_files_beyond_a_limit_are_refused_before_they_are_parsed(tmp_path: Path, in_turns: None) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"[" + b"1," * PIECE_VALUES + b"1]")
    with pytest.raises(CheckpointError, match="has 131074 values, and 131072 are the most of such a file") as raised:
        read_json(file, kind=list)
    assert raised.value.file == str(file)
    file.write_bytes(b'"' + b"a" * SMALL_JSON.bytes + b'"')
    with pytest.raises(CheckpointError, match="is longer than 4 MiB"):
        read_json(file)


def test_files_that_are_nested_too_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"[" * 100_000 + b"]" * 100_000)
    for values in (PIECE_VALUES, 0):
        monkeypatch.setattr(json_files, "PIECE_VALUES", values)
        with pytest.raises(CheckpointError, match="is no valid JSON"):
            read_json(file, kind=list)


@pytest.mark.parametrize("entry", ['"w": "\\ud800.safetensors"', '"\\ud800": "a.safetensors"'])
def test_no_large_index_has_half_of_a_character(tmp_path: Path, entry: str) -> None:
    others = ",".join(f'"n{i}":"a.safetensors"' for i in range(PIECE_VALUES))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{entry},{others}}}}}')
    with pytest.raises(CheckpointError, match="is no valid JSON") as raised:
        list_sharded_tensors(tmp_path)
    assert str(raised.value).encode()


SMALL_FILES = ("generation_config.json",)
LARGE_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@pytest.mark.parametrize("name", [*SMALL_FILES, *LARGE_FILES])
def test_no_file_of_a_folder_has_millions_of_values(tiny_generator: Path, tmp_path: Path, name: str) -> None:
    """Commas count, too: strings and numbers take many times their bytes in memory."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_generator, folder)
    path = folder / name
    begin = path.read_text().rstrip().removesuffix("}") + "," if path.exists() else "{"
    limit = SMALL_JSON if name in SMALL_FILES else LARGE_JSON
    path.write_text(f'{begin}"unknown": [{",".join(["1"] * limit.values)}]}}')
    with pytest.raises(CheckpointError, match=f"values, and {limit.values} are the most of such a file") as raised:
        describe_source(str(folder))
    assert raised.value.file == str(path)


def test_metadata_of_a_safetensors_file_has_a_limit(tmp_path: Path, in_turns: None) -> None:
    def write(pairs: int) -> Path:
        header = json.dumps({"__metadata__": {str(number): "a" for number in range(pairs)}}).encode()
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        return tmp_path / "a.safetensors"

    assert read_safetensors(write(PIECE_VALUES)) == {}
    with pytest.raises(CheckpointError, match=r"its header has \d+ values, and 1310720 are the most"):
        read_safetensors(write(HEADER_JSON.values))


def test_a_tokenizer_json_is_not_parsed_in_one_piece(
    tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of added tokens is read token by token, the whole of it only where it has few values."""
    fields = json.loads((tiny_generator / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"

    def refuse(change: dict[str, Any], message: str) -> None:
        path.write_text(json.dumps(fields | change))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_folder(tmp_path)

    text = f'{{"added_tokens": [ ], "more": {json.dumps(["a"] * 2000)}}}'
    added_tokens.check_added_tokens(text, str(path))
    item = {"content": "<a>", "more": "a" * added_tokens.MAX_ITEM_LENGTH}
    refuse({"added_tokens": [item]}, r"added_tokens\[0\] is no token of at most 4096 characters")
    refuse({"added_tokens": [["a"] * 2000]}, r"added_tokens\[0\] is no token of at most 4096 characters")
    monkeypatch.setattr(merges, "MAX_PARSED_VALUES", 100)
    suffixed = fields["model"] | {"end_of_word_suffix": "</w>"}
    refuse({"model": suffixed}, r"has \d+ values, and 100 are the most with a prefix or suffix")


def test_lines_of_a_vocabulary_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\n" * (1 << 21))
    with pytest.raises(CheckpointError, match="has 2097152 lines, and 1048576 are the most"):
        Tokenizer.from_folder(tmp_path)
