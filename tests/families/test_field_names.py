"""A field of a configuration under its other name is read as transformers reads it; with two values it is refused."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.field_names import OTHER_NAMES, unify_names
from polyhead.models.checkpoint import folder as folder_module
from polyhead.models.checkpoint import load
from polyhead.models.core.errors import UnsupportedError
from tests.families.test_other_values import ROWS, Compared, is_close
from tests.support import checkpoints

# Fields that change no answer: of training, of the places of images, and numbers of tokens that no network here reads.
UNREAD = {
    *("attention_probs_dropout_prob", "initializer_range", "num_mtp_layers"),
    *("image_token_id", "boi_token_id", "eoi_token_id", "bos_index", "eos_index", "pad_index"),
}
SAMPLE = ("gpt2", "gpt_neo", "mpt", "xglm", "bloom", "nemotron-h", "ernie4_5_moe", "hunyuan_v1_moe", "sides-led")
# Rows whose reference computes another thing (see models/architectures/prophetnet.py), or cannot be built.
ODD = {"sides-prophetnet", "sides-prophetnet-streams", "dbrx"}
NAMED = [name for name, (_, kind) in ROWS.items() if name not in ODD and kind.config_class.attribute_map]


@pytest.fixture(autouse=True)
def _one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's tokenizer is read once: its fields are not those that are changed."""
    monkeypatch.setattr(folder_module, "load_tokenizer", cache(folder_module.load_tokenizer))
    tf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def read_names(config_class: Any) -> dict[str, str]:
    """The names that a class of transformers reads as those of another field, and that are read here."""
    return {name: field for name, field in config_class.attribute_map.items() if name not in UNREAD}


def list_classes() -> Iterator[tuple[str, Any]]:
    """The classes of configurations of all families that transformers has, with those of their text."""
    for name in FAMILIES:
        if name in CONFIG_MAPPING:
            yield name, CONFIG_MAPPING[name]
            text = CONFIG_MAPPING[name].sub_configs.get("text_config")
            if text is not None and getattr(text, "model_type", ""):
                yield text.model_type, text


def test_the_table_is_that_of_transformers() -> None:
    expected = {name: read_names(each) for name, each in list_classes()}
    assert {name: names for name, names in expected.items() if names} == OTHER_NAMES


def other_number(value: Any) -> Any:
    return value + 1 if type(value) is int else "another"


def check_names(name: str, path: Path) -> None:
    compared = Compared(name, path)
    for other, field in read_names(compared.kind.config_class).items():
        if (value := compared.config.get(field)) is None or other in compared.config:
            continue
        only = {(other if key == field else key): each for key, each in compared.config.items()}
        found = compared.ours(only)
        assert found is not None, (other, field)
        assert is_close(found, compared.theirs()), (other, field)  # type: ignore[arg-type]
        checkpoints.write_json(compared.file, {**compared.config, other: other_number(value)})
        with pytest.raises(UnsupportedError, match=rf"{re.escape(other)} is .* and {re.escape(field)} is .*; remove"):
            load(str(path))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_other_name_of_a_field_is_followed(name: str, tmp_path: Path) -> None:
    check_names(name, tmp_path / "x")


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMED)
def test_the_other_names_of_all_fields_are_followed(name: str, tmp_path: Path) -> None:
    check_names(name, tmp_path / "x")


def test_names_of_a_text_part() -> None:
    text = {"num_experts": 4, "hidden_size": 8}
    for config in ({"text_config": {**text, "model_type": "qwen3_vl_moe_text"}}, {"text_config": text}):
        found: Any = unify_names({"model_type": "qwen3_vl_moe", **config})
        assert found["text_config"]["num_local_experts"] == 4
        with pytest.raises(UnsupportedError, match="num_experts is 4 and num_local_experts is 5: two names"):
            unify_names(
                {"model_type": "qwen3_vl_moe", "text_config": {**config["text_config"], "num_local_experts": 5}}
            )


def test_a_list_of_one_number_for_all_layers_is_that_number() -> None:
    fields = {"model_type": "hunyuan_v1_moe", "num_experts_per_tok": 2}
    assert unify_names({**fields, "moe_topk": [2, 2]})["moe_topk"] == [2, 2]
    with pytest.raises(UnsupportedError, match="moe_topk"):
        unify_names({**fields, "moe_topk": [2, 1]})


def test_a_name_without_a_value_says_nothing() -> None:
    """Configurations that transformers has written name every field, some with null."""
    assert unify_names({"model_type": "gpt2", "n_embd": 32, "hidden_size": None})["n_embd"] == 32
    assert unify_names({"model_type": "gpt2", "n_embd": None, "hidden_size": 32})["n_embd"] == 32
    with pytest.raises(UnsupportedError, match="hidden_size is 64 and n_embd is 32"):
        unify_names({"model_type": "gpt2", "n_embd": 32, "hidden_size": 64})
