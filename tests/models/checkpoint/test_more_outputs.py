"""Files of further outputs of an embedder. Their answers are compared with FlagEmbedding's in
tests/contracts/test_retrieval_models.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyhead.models.checkpoint import describe_source, load, save_folder
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.embedding_head import LaterTokensHead
from tests.support import retrieval_models

WIDTH = retrieval_models.WIDTH


def test_each_output_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = retrieval_models.m3(tmp_path / "m")
    (folder / "colbert_linear.safetensors").unlink()
    assert load(str(folder)).more_forms == ("words",)
    (folder / "sparse_linear.safetensors").unlink()
    assert load(str(folder)).more_forms == ()


def test_pickles_are_not_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = retrieval_models.m3(tmp_path / "m")
    (folder / "sparse_linear.safetensors").unlink()
    (folder / "sparse_linear.pt").write_bytes(b"no pickle at all")
    loaded = load(str(folder))
    assert loaded.more_forms == ("tokens",)
    [(form, hint)] = loaded.missing_forms.items()
    assert (form, hint) == ("words", caplog.messages[-1].partition(": ")[2])
    assert "sparse_linear.pt is pickled and is never opened here" in hint
    assert "save_file(torch.load('sparse_linear.pt', weights_only=True), 'sparse_linear.safetensors')" in hint


@pytest.mark.parametrize(
    ("stem", "layer", "problem"),
    [
        ("sparse_linear", {"weight": torch.ones(1, WIDTH)}, "it should hold the tensors weight and bias"),
        (
            "sparse_linear",
            {"weight": torch.ones(2, WIDTH), "bias": torch.ones(2)},
            r"\[2, 16\], which should be 1 rows",
        ),
        (
            "colbert_linear",
            {"weight": torch.ones(17, WIDTH), "bias": torch.ones(17)},
            "which should be 1 to 16 rows of",
        ),
        ("colbert_linear", {"weight": torch.ones(4, 8), "bias": torch.ones(4)}, r"\[4, 8\], which should be 1 to 16"),
        ("colbert_linear", {"weight": torch.ones(4, WIDTH), "bias": torch.ones(5)}, r"\[5\], which should be \[4\]"),
    ],
)
def test_layers_that_are_refused(tmp_path: Path, stem: str, layer: dict[str, torch.Tensor], problem: str) -> None:
    folder = retrieval_models.m3(tmp_path / "m")
    save_file(layer, folder / f"{stem}.safetensors")
    with pytest.raises(CheckpointError, match=rf"{stem}\.safetensors.*{problem}"):
        load(str(folder))


def test_the_layers_are_copied_when_a_folder_is_saved_again(tmp_path: Path) -> None:
    folder = retrieval_models.m3(tmp_path / "m")
    names = {path.name for path in save_folder.list_copied_files(folder)}
    assert {"sparse_linear.safetensors", "colbert_linear.safetensors"} <= names
    assert describe_source(str(folder)).head.more_forms == ("words", "tokens")


def test_the_first_row_has_no_vector() -> None:
    head = LaterTokensHead(())
    assert head.needed_rows([0, 3, 4, 6]) == ([1, 2, 3, 5], [0, 2, 3, 4]), "of a lone row that one"
