"""The folder of a recurrent encoder-decoder: saved and loaded networks are equal, and errors name the damaged part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint import load as load_any
from polyhead.models.checkpoint.recurrent_folder import save_recurrent
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from tests.support import checkpoints
from tests.support.edits import edited, with_tensors

SHAPE: dict[str, Any] = dict(vocab_size=400, width=8, hidden=8, depth=2, start=0, end=2, pad=0)
VARIANTS = [
    {"cell": "lstm"},
    {"attention": "bahdanau", "tied": True},
    {"attention": "luong", "score": "general", "reach": "local-p", "input_feeding": True},
]


def load(folder: Path) -> Checkpoint:
    return load_any(str(folder))


def network_of(changes: dict[str, Any]) -> RecurrentTranslator:
    torch.manual_seed(1)
    return RecurrentTranslator(RecurrentConfig(**SHAPE, **changes)).eval()


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    checkpoints.byte_level_bpe().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def saved_folder(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    save_recurrent(folder, network_of(VARIANTS[1]), tokenizer_file)
    return folder


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_saved_network_is_loaded_unchanged(changes: dict[str, Any], tokenizer_file: Path, tmp_path: Path) -> None:
    network = network_of(changes)
    save_recurrent(tmp_path / "new", network, tokenizer_file)
    loaded = load(tmp_path / "new")
    loaded_network, tokenizer = loaded.head, loaded.tokenizer
    assert isinstance(loaded_network, RecurrentTranslator)
    texts = ["The quick brown fox", "café"]
    assert loaded_network.config == network.config
    assert not loaded_network.training
    assert tokenizer.encode_batch(texts)[1].ids
    batch = RaggedBatch.of([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    assert torch.equal(loaded_network(batch, batch), network(batch, batch))
    assert (loaded_network.output.weight is loaded_network.tokens.weight) == loaded_network.config.tied
    loaded_network.train()(batch, batch).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded_network.parameters())


def test_a_network_can_be_saved_over_its_own_folder(saved_folder: Path) -> None:
    network = load(saved_folder).head
    assert isinstance(network, RecurrentTranslator)
    before = (saved_folder / "model.safetensors").read_bytes()
    save_recurrent(saved_folder, network, saved_folder / "tokenizer.json")
    assert (saved_folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["RecurrentModel"]}, r"\['RecurrentModel'\] is not"),
        ({"hidden": None}, "hidden: missing"),
        ({"eos_token_id": None, "width": None}, "width, eos_token_id: missing"),
        ({"colour": "red", "size": 3}, "colour, size: no such field is known"),
        ({"attention": "self"}, "attention is 'self', which should be one of none, bahdanau, luong"),
        ({"cell": ["gru"]}, "cell is .*, which should be one of"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": 300}, "it knows 384 tokens, .* the network knows 300"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id is -1, which should be a token below 400"),
        ({"depth": 10**9}, "1000000000 layers, but the files hold"),
        ({"depth": 3}, r"12 tensors are missing: encoder\.layers\.weight_ih_l2, .*and 7 more"),
        ({"depth": 1}, r"tensor '..coder\.layers\..*_l1.*': it has no place"),
        ({"hidden": 12}, r"its shape is \[.*\], but config.json asks for \["),
        ({"hidden": 2**19}, r"its shape is \[.*\], but config.json asks for \["),
        ({"hidden": 2**30}, "hidden is 1073741824, which should be a whole number from 1 to 1048575"),
        ({"tied": False}, "1 tensors are missing: output.weight"),
    ],
)
def test_unsupported_configurations_are_refused_by_field(
    saved_folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(saved_folder, tmp_path / "broken", **changes)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as raised:
        load(folder)
    assert str(folder) in str(raised.value)


def remove_bias(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["decoder.bridge.bias"]


def add_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["decoder.narrow.weight"] = torch.zeros(8, 8)


def transpose_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tokens.weight"] = tensors["tokens.weight"].T.contiguous()


def make_bias_integer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["output.bias"] = tensors["output.bias"].to(torch.int32)


def make_bias_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["output.bias"][3] = torch.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_bias, r"decoder\.bridge\.bias.*1 tensors are missing"),
        (add_tensor, r"decoder\.narrow\.weight.*has no place"),
        (transpose_embedding, r"tokens\.weight.*its shape is \[8, 400\], but config\.json asks for \[400, 8\]"),
        (make_bias_integer, r"output\.bias.*its numbers are I32"),
        (make_bias_nan, r"output\.bias.*infinite or NaN"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    saved_folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    folder = with_tensors(saved_folder, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"config\.json is not there|config\.json: is not there"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_file_that_is_missing_is_named(saved_folder: Path, tmp_path: Path, file: str, message: str) -> None:
    folder = edited(saved_folder, tmp_path / "broken")
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_truncated_file_is_named(saved_folder: Path, tmp_path: Path) -> None:
    folder = edited(saved_folder, tmp_path / "broken")
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-10])
    with pytest.raises(CheckpointError, match="the file is truncated"):
        load(folder)


def test_special_tokens_have_the_field_names_of_transformers(saved_folder: Path) -> None:
    config = json.loads((saved_folder / "config.json").read_text())
    assert (config["decoder_start_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 2, 0)
