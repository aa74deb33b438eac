"""Folders of gliner and gliclass: what is read, and what is refused with the field's name. That answers equal those of
the packages is tested in tests/contracts/test_label_models.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.label_heads import Recurrence
from tests.support import label_models


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return label_models.gliner(tmp_path_factory.mktemp("gliner"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return label_models.gliclass(tmp_path_factory.mktemp("gliclass"))


def changed(source: Path, folder: Path, **fields: Any) -> Path:
    """A folder with the same files and other fields in its configuration."""
    shutil.copytree(source, folder)
    name = "gliner_config.json" if (source / "gliner_config.json").is_file() else "config.json"
    config = json.loads((source / name).read_text())
    (folder / name).write_text(json.dumps({**config, **fields}))
    return folder


def test_folders_of_both_packages_are_read(finder: Path, classifier: Path) -> None:
    spans, texts = load(str(finder)), load(str(classifier))
    assert (spans.task, texts.task) == ("label_spans", "label_texts")
    assert spans.label_prompt is not None
    assert texts.label_prompt is not None
    assert (spans.label_prompt.max_words, spans.label_prompt.max_width, spans.max_tokens) == (400, 3, 1000)
    assert (texts.label_prompt.label, texts.label_prompt.max_words, texts.max_tokens) == ("<<LABEL>>", 0, 1024)
    assert spans.config.max_positions == 1000, "distances above the farthest are one"
    kept = load_file(finder / "model.safetensors")
    mine = dict(spans.head.named_parameters())
    torch.testing.assert_close(mine["span.out.weight"], kept["span_rep_layer.span_rep_layer.out_project.3.weight"])
    torch.testing.assert_close(mine["recurrence.bias_hh_l0_reverse"], kept["rnn.lstm.bias_hh_l0_reverse"])


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"encoder_config": None}, CheckpointError, "encoder_config is None, which should be the configuration"),
        ({"encoder_config": {"model_type": "qwen9"}}, UnsupportedError, "model_type 'qwen9' is not known here"),
        ({"span_mode": "marker"}, UnsupportedError, "span_mode 'marker' is not known; known are markerV0, token_level"),
        ({"subtoken_pooling": "mean"}, UnsupportedError, "subtoken_pooling 'mean' is not known; known are first, last"),
        ({"fuse_layers": True}, UnsupportedError, "fuse_layers is True; only None or False is known"),
        ({"labels_encoder": "bert"}, UnsupportedError, "labels_encoder is 'bert'; only None is known"),
        ({"words_splitter_type": "spacy"}, UnsupportedError, "words_splitter_type is 'spacy'"),
        ({"max_width": 0}, CheckpointError, "max_width is 0, which should be a whole number from 1 to 128"),
        ({"max_len": 1 << 40}, CheckpointError, "max_len is 1099511627776, which should be a whole number"),
        (
            {"max_width": 128, "max_len": 2048},
            CheckpointError,
            "max_width is 128, which should be 16 at most",
        ),
        ({"hidden_size": True}, CheckpointError, "hidden_size is True"),
        ({"hidden_size": 11}, CheckpointError, "hidden_size is 11, which should be even for an LSTM"),
        (
            {"hidden_size": 2048, "max_width": 12, "max_len": 2048},
            CheckpointError,
            "hidden_size is 2048, which should be 803 at most for 26624 rows",
        ),
        (
            {"hidden_size": 1 << 14, "span_mode": "token_level", "max_len": 65},
            CheckpointError,
            "hidden_size is 16384, which should be 16257 at most for 65 rows",
        ),
        ({"num_rnn_layers": 99}, CheckpointError, "num_rnn_layers is 99"),
        ({"embed_ent_token": 1}, CheckpointError, "embed_ent_token is 1, which should be true or false"),
        ({"ent_token": "<<X>>"}, CheckpointError, "ent_token is '<<X>>', which should be a token of the vocabulary"),
        ({"class_token_index": -1}, CheckpointError, "class_token_index is -1, and <<ENT>> is token"),
    ],
)
def test_fields_of_gliner_are_checked(
    finder: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        describe_source(str(changed(finder, tmp_path / "changed", **fields)))
    assert words in str(caught.value)
    assert "gliner_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architecture_type": "bi-encoder"}, "architecture_type is 'bi-encoder'; only None or 'uni-encoder' is known"),
        ({"scorer_type": "hopfield"}, "scorer_type 'hopfield' is not known; known are simple, mlp, weighted-dot"),
        ({"pooling_strategy": "pass"}, "pooling_strategy 'pass' is not known; known are first, last"),
        ({"class_token_pooling": "max"}, "class_token_pooling 'max' is not known; known are first, average"),
        ({"squeeze_layers": True}, "squeeze_layers is True"),
        ({"use_calibrator": True}, "use_calibrator is True"),
        ({"projector_hidden_act": "mish"}, "activation 'mish' is not one of"),
    ],
)
def test_fields_of_gliclass_are_checked(classifier: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        describe_source(str(changed(classifier, tmp_path / "changed", **fields)))
    assert words in str(caught.value)


def test_the_largest_published_gliner_is_described(finder: Path, tmp_path: Path) -> None:
    described = describe_source(str(changed(finder, tmp_path / "large", hidden_size=768, max_width=12, max_len=2048)))
    assert described.labels is not None
    assert (described.head.width, described.labels.max_words, described.labels.max_width) == (768, 2048, 12)


def test_pickled_weights_are_refused(finder: Path, tmp_path: Path) -> None:
    folder = changed(finder, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="pickled weights"):
        describe_source(str(folder))


def test_tensors_without_a_place_are_refused(finder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rnn\.lstm\."):
        load(str(changed(finder, tmp_path / "changed", num_rnn_layers=0)))


@torch.inference_mode()
def test_recurrence_equals_the_lstm_of_torch() -> None:
    theirs, mine = nn.LSTM(6, 3, num_layers=2, bidirectional=True, batch_first=True), Recurrence(6, 2)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mine(x), theirs(x[None])[0][0])
