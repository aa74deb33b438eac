"""Folders of static embeddings: what is checked before a number of them is used. Their answers are compared with
model2vec's and sentence-transformers' in tests/contracts/test_retrieval_models.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.checkpoint.static_folder import DEFAULT_LENGTH, MAX_LENGTH, read_limit
from polyhead.models.core.errors import CheckpointError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, label_models, retrieval_models


@torch.inference_mode()
def test_states_are_rows_of_the_matrix(tmp_path: Path) -> None:
    folder = retrieval_models.shared_rows(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    loaded = load(str(folder))
    make_invariant(loaded.network, loaded.head)
    tokens = [5, 7, 5, 20]
    expected = stored["embeddings"][stored["mapping"][tokens]] * stored["weights"][tokens].float()[:, None]
    assert torch.equal(loaded.network(RaggedBatch.of([tokens])), expected)
    step = StepInput([*tokens, 9], [*range(4), 0], [0, 4, 5], [[], []], [1, 3])
    assert torch.equal(TorchExecutor(loaded.network).step(step), expected[[1, 3]])
    assert (loaded.config.static, loaded.pooling, loaded.width) == (True, "mean", retrieval_models.STATIC_WIDTH)
    assert "no layers" in unsupported_reason(loaded.config)


@torch.inference_mode()
def test_a_matrix_of_whole_numbers(tmp_path: Path) -> None:
    """model2vec keeps no scale for them; vectors are their mean in float32."""
    folder = retrieval_models.model2vec(tmp_path / "m")
    stored = torch.arange(26 * 8).view(26, 8).sub(100).to(torch.int8)
    save_file({"embeddings": stored}, folder / "model.safetensors")
    loaded = load(str(folder))
    tokens = [5, 7, 20]
    states = loaded.network(RaggedBatch.of([tokens]))
    assert torch.equal(states, stored[tokens].float())
    vector = loaded.head.postprocess(loaded.head(states, [0, 3]))[0]
    torch.testing.assert_close(vector, F.normalize(stored[tokens].float().mean(0), dim=0), rtol=0, atol=1e-6)
    assert loaded.default_precision.precision == "float32"


def test_no_tokens_are_added_around_a_text(tmp_path: Path) -> None:
    tokenizer = load(str(retrieval_models.static(tmp_path / "m"))).tokenizer
    assert len(tokenizer.encode("the fox").ids) == 2
    assert tokenizer.unknown_id == 3


def test_the_unknown_token_of_a_unigram_vocabulary(tmp_path: Path) -> None:
    folder = retrieval_models.model2vec(tmp_path / "m")
    made = label_models.tokenizer()
    made.backend_tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"embeddings": torch.ones(len(made), 4)}, folder / "model.safetensors")
    assert load(str(folder)).skipped_tokens == {3}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"other": torch.ones(26, 8)}, "it should hold one of embedding.weight and embeddings"),
        ({"embeddings": torch.ones(26, 8), "embedding.weight": torch.ones(26, 8)}, "it should hold one of"),
        ({"embeddings": torch.ones(26)}, r"its shape is \[26\], which should be rows of 1 to 16384 numbers"),
        ({"embeddings": torch.ones(26, 8).to(torch.int16)}, "its numbers are I16, and only"),
        ({"embeddings": torch.ones(26, 8), "weights": torch.ones(25)}, r"its shape is \[25\]"),
        (
            {"embeddings": torch.ones(26, 8), "mapping": torch.ones(26)},
            "its numbers are F32 of shape .*integer a token",
        ),
        (
            {"embeddings": torch.ones(7, 8), "mapping": torch.full((26,), 7)},
            "it names row 7, and the matrix has rows 0",
        ),
        ({"embeddings": torch.ones(7, 8), "mapping": torch.full((26,), -1)}, "it names row -1"),
        (
            {"embeddings": torch.ones(7, 8), "mapping": torch.full((27,), 7)},
            "it names the rows of 27 tokens, and the tokenizer has 26",
        ),
        ({"embeddings": torch.ones(3, 8)}, "its tokenizer makes token"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    folder = retrieval_models.shared_rows(tmp_path / "m")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=problem):
        load(str(folder))


def test_the_mapping_is_in_the_estimate(tmp_path: Path) -> None:
    source = str(retrieval_models.shared_rows(tmp_path / "m"))
    loaded = load(source, dtype=torch.bfloat16)
    expected = loaded.weight_bytes + 8 * loaded.config.vocab_size
    assert estimate_load(describe_source(source)).weight_bytes(torch.bfloat16) == expected


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, MAX_LENGTH),
        ({"model_type": "model2vec"}, DEFAULT_LENGTH),
        ({"model_type": "model2vec", "max_length": None}, MAX_LENGTH),
        ({"model_type": "model2vec", "max_length": 1 << 40}, MAX_LENGTH),
        ({"model_type": "model2vec", "max_length": 20}, 20),
    ],
)
def test_the_longest_text(config: dict[str, Any], limit: int) -> None:
    assert read_limit(Path("config.json"), config) == limit


def test_settings_that_are_refused(tmp_path: Path) -> None:
    folder = retrieval_models.shared_rows(tmp_path / "m")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"]}
    for settings, problem in (
        ({"max_length": "long"}, "max_length is 'long', which should be a positive number"),
        ({"normalize": 1}, "normalize is 1, which should be true or false"),
    ):
        checkpoints.write_json(folder / "config.json", config | settings)
        with pytest.raises(CheckpointError, match=problem):
            load(str(folder))
    folder = retrieval_models.static(tmp_path / "s")
    retrieval_models.write_modules(folder, [("0_StaticEmbedding", "StaticEmbedding"), ("1_Pooling", "Pooling")])
    checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "max"})
    with pytest.raises(CheckpointError, match="a Pooling after StaticEmbedding is not known"):
        load(str(folder))
