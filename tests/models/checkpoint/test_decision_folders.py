"""Folders of laya and gliner2: what is read, and what is refused with the field's name. That answers equal those of
the packages is tested in tests/contracts/test_decision_models.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.core.decision_prompt import LabelSchemaPrompt, OptionMarkPrompt
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from tests.support import decision_models


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decision_models.laya(tmp_path_factory.mktemp("laya"), kind="bert", head_layers=1)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decision_models.gliner2(tmp_path_factory.mktemp("gliner2"))


def changed(source: Path, folder: Path, file: str, **fields: Any) -> Path:
    """A folder with the same files and other fields in one of them."""
    shutil.copytree(source, folder)
    config = json.loads((source / file).read_text())
    (folder / file).write_text(json.dumps({**config, **fields}))
    return folder


def test_folders_of_both_packages_are_read(marks: Path, schema: Path) -> None:
    first, second = load(str(marks)), load(str(schema))
    assert (first.task, second.task) == ("decide", "decide")
    prompt = first.decision_prompt
    assert isinstance(prompt, OptionMarkPrompt)
    assert (prompt.opening, prompt.separator, prompt.mark, prompt.question_tokens) == (1, 2, 4, 160)
    assert (first.max_tokens, second.max_tokens) == (320, 2048)
    assert prompt.temperatures == (1.5, 0.75, 2.0)
    found = [prompt.find_temperature("choice", count) for count in (1, 2, 3, 10, 11, 200)]
    assert found == [3.0, 3.0, 1.5, 1.5, 0.5, 0.5], "0.1 is below the least that is used"
    assert (prompt.find_temperature("score", 6), prompt.find_temperature("score", 5)) == (1.25, 0.75)
    assert prompt.find_temperature("noul", 2) == 2.0
    assert second.decision_prompt == LabelSchemaPrompt()
    kept, mine = load_file(marks / "model.safetensors"), dict(first.head.named_parameters())
    torch.testing.assert_close(mine["stack.0.fused.weight"], kept["head.layers.0.self_attn.in_proj_weight"])
    assert sum(name.startswith("act_head.") for name in kept) == 4, "which are not read"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"option_layout": "parallel"}, UnsupportedError, "option_layout is 'parallel'; only 'sequential' is known"),
        ({"head_layers": 99}, CheckpointError, "head_layers is 99, which should be a whole number from 0 to 32"),
        ({"head_layers": True}, CheckpointError, "head_layers is True"),
        ({"max_len": 1 << 40}, CheckpointError, "max_len is 1099511627776, which should be a whole number from 1 to"),
        ({"head_max_len": 0}, CheckpointError, "head_max_len is 0, which should be a whole number from 1 to 65536"),
        ({"temperature": None}, CheckpointError, "temperature is None, which should be a list of 3 numbers"),
        ({"temperature": [1, 1]}, CheckpointError, "temperature is [1, 1], which should be a list of 3 numbers"),
        ({"temperature": [1, True, 1]}, CheckpointError, "temperature[1] is True, which should be a number"),
        ({"temperature_by_options": [1]}, CheckpointError, "temperature_by_options is [1], which should be an object"),
        (
            {"temperature_by_options": {"score:3-5": "1"}},
            CheckpointError,
            "temperature_by_options.score:3-5 is '1', which should be a number",
        ),
    ],
)
def test_fields_of_laya_are_checked(
    marks: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        describe_source(str(changed(marks, tmp_path / "changed", "rl_agent_config.json", **fields)))
    assert words in str(caught.value)
    assert "rl_agent_config.json" in str(caught.value)


def test_small_files_of_laya_are_checked(marks: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cls_token is '\[X\]', which should be a token"):
        describe_source(str(changed(marks, tmp_path / "a", "tokenizer/tokenizer_config.json", cls_token="[X]")))
    with pytest.raises(CheckpointError, match="mask_token should be a token of the vocabulary"):
        describe_source(str(changed(marks, tmp_path / "b", "tokenizer/tokenizer_config.json", mask_token="[X]")))
    with pytest.raises(UnsupportedError, match="model_type 'qwen9' is not known here"):
        describe_source(str(changed(marks, tmp_path / "c", "encoder/config.json", model_type="qwen9")))
    sizes = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}
    rotary = decision_models.laya(tmp_path / "rotary", head_layers=0)
    with pytest.raises(UnsupportedError, match="its encoder is a causal network; only encoders are known"):
        describe_source(str(changed(marks, tmp_path / "d", "encoder/config.json", model_type="llama", **sizes)))
    with pytest.raises(CheckpointError, match="max_positions is 'x', which should be a whole number"):
        describe_source(str(changed(rotary, tmp_path / "f", "encoder/config.json", max_position_embeddings="x")))
    shutil.copytree(marks, tmp_path / "e")
    shutil.rmtree(tmp_path / "e" / "encoder")
    with pytest.raises(CheckpointError, match=r"encoder/config\.json: is not there, and is needed"):
        describe_source(str(tmp_path / "e"))
    (tmp_path / "e" / "encoder").symlink_to(marks / "encoder")
    with pytest.raises(CheckpointError, match="'encoder' is no folder inside this one"):
        describe_source(str(tmp_path / "e"))


def test_widths_that_the_heads_do_not_divide_are_refused(marks: Path, tmp_path: Path) -> None:
    folder = changed(marks, tmp_path / "wide", "encoder/config.json", hidden_size=132 + 62, num_attention_heads=1)
    with pytest.raises(CheckpointError, match="the states have 194 features, which should be a multiple of 3"):
        describe_source(str(folder))


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"architecture": "grid"}, UnsupportedError, "architecture 'grid' is not known; known are span, boundary"),
        ({"architecture": "boundary", "boundary_head": 3}, CheckpointError, "boundary_head is 3, which should be an"),
        (
            {"architecture": "boundary", "boundary_head": {"classification_temperature": 0}},
            CheckpointError,
            "boundary_head.classification_temperature is 0.0, which should be a number from 0.01 to 100.0",
        ),
        (
            {"architecture": "boundary", "boundary_head": {"classification_temperature": "1"}},
            CheckpointError,
            "boundary_head.classification_temperature is '1', which should be a number",
        ),
    ],
)
def test_fields_of_gliner2_are_checked(
    schema: Path, tmp_path: Path, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        describe_source(str(changed(schema, tmp_path / "changed", "config.json", **fields)))
    assert words in str(caught.value)


def test_a_vocabulary_without_the_marks_is_refused(schema: Path, marks: Path, tmp_path: Path) -> None:
    folder = changed(schema, tmp_path / "changed", "config.json")
    shutil.copy(marks / "tokenizer" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"its vocabulary has no token \[SEP_STRUCT\]"):
        describe_source(str(folder))


def test_tensors_without_a_place_and_missing_ones_are_refused(marks: Path, schema: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"head\.layers\.0\."):
        load(str(changed(marks, tmp_path / "fewer", "rl_agent_config.json", head_layers=0)))
    folder = changed(schema, tmp_path / "changed", "config.json")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if name != "classifier.2.bias"}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"classifier\.2\.bias"):
        load(str(folder))
