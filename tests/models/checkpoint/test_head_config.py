"""The choice of a head from the files of a folder, and the tensors that are read for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyhead.models.checkpoint import describe_source, head_config, load
from polyhead.models.checkpoint.tensor_files import TensorEntry, has_same_bytes
from polyhead.models.core.errors import CheckpointError
from tests.support.edits import with_tensors
from tests.support.translators import translator

Tensors = dict[str, torch.Tensor]
Comparisons = list[tuple[str, str]]


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    """The names of the tensors whose contents are compared."""
    compared: Comparisons = []

    def compare(one: TensorEntry, other: TensorEntry) -> bool:
        compared.append((one.name, other.name))
        return has_same_bytes(one, other)

    monkeypatch.setattr(head_config, "has_same_bytes", compare)
    return compared


def longer(output: str, tokens: str) -> Callable[[Tensors], None]:
    """Two equal tensors with one row more than the network's vocabulary."""

    def change(tensors: Tensors) -> None:
        rows = tensors[tokens]
        tensors[tokens] = torch.cat([rows, rows[:1]])
        tensors[output] = tensors[tokens].clone()

    return change


def flat(output: str, tokens: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[tokens] = tensors[tokens].flatten()
        tensors[output] = tensors[tokens].clone()

    return change


def test_an_output_of_the_embedding_s_shape_is_compared(
    comparisons: Comparisons, tiny_generator: Path, tmp_path: Path
) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    describe_source(str(with_tensors(tiny_generator, tmp_path / "same", copy)))
    assert comparisons == [("lm_head.weight", "model.embed_tokens.weight")]


@pytest.mark.parametrize("change", [longer, flat])
def test_an_output_of_another_shape_is_refused_before_it_is_read(
    comparisons: Comparisons,
    tiny_generator: Path,
    tmp_path: Path,
    change: Callable[[str, str], Callable[[Tensors], None]],
) -> None:
    folder = with_tensors(tiny_generator, tmp_path / "model", change("lm_head.weight", "model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"embed_tokens|lm_head"):
        load(str(folder))
    assert comparisons == []


def test_decoder_embeddings_of_another_shape_are_refused_before_they_are_read(
    comparisons: Comparisons, tmp_path: Path
) -> None:
    translator(tmp_path / "made", "marian")
    decoder = "model.decoder.embed_tokens.weight"
    folder = with_tensors(tmp_path / "made", tmp_path / "model", longer(decoder, "model.shared.weight"))
    with pytest.raises(CheckpointError, match="the two sides have embeddings of their own"):
        describe_source(str(folder))
    assert comparisons == []
