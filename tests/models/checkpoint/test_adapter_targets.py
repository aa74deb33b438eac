"""Which modules an adapter's settings leave out: the same as in peft."""

from pathlib import Path
from typing import Any

import peft
import pytest
import transformers as tf
from peft.tuners.tuners_utils import check_target_module_exists

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.adapter_targets import MAX_NAMES, AdaptedModules, check_target_settings
from polyhead.models.checkpoint.module_patterns import ignore_steps
from polyhead.models.core.errors import UnsupportedError
from tests.models.checkpoint.test_merged_adapter import adapted, generator, language_difference
from tests.support import checkpoints
from tests.support.edits import edited

MODULES = [
    *(f"model.layers.{layer}.{part}" for layer in (0, 1, 11) for part in ("self_attn.q_proj", "mlp.down_proj")),
    "layers.0.self_attn.q_proj",
    "a.layers.1.experts.0.q_proj",
    "encoder.layer.3.attention.self.query",
    "h.2.mlp.xq_proj",
    "lm_head",
    "score",
    "classifier.dense",
]
SETTINGS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "score"]},
    {"target_modules": ["self_attn.q_proj", "dense"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj"]},
    {"target_modules": "q_proj"},
    {"target_modules": r".*q_proj"},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj)|lm_head"},
    {"target_modules": "model.*(q_proj|down_proj)$"},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["q_proj", "dense", "score"], "modules_to_save": ["classifier", "score"]},
    {"target_modules": ["q_proj", "query"], "modules_to_save": ["self_attn"]},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0, 2]},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "down_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "query"], "layers_to_transform": [0, 3], "layers_pattern": "layers"},
    {"target_modules": ["q_proj", "query"], "layers_to_transform": [0, 3], "layers_pattern": ["experts", "layer"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": []},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_modules_that_are_left_out_are_those_of_peft(settings: dict[str, Any]) -> None:
    check_target_settings(Path("adapter_config.json"), settings)
    modules, config = AdaptedModules(settings, ignore_steps), peft.LoraConfig(**settings)
    found = {name: not modules.find_exclusion(name) for name in MODULES}
    assert found == {name: bool(check_target_module_exists(config, name)) for name in MODULES}


def test_matrices_that_the_settings_leave_out_are_refused(tiny_generator: Path, tmp_path: Path) -> None:
    adapted(generator(tiny_generator), tmp_path / "plain", task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    for field, value in (
        ("target_modules", ["v_proj"]),
        ("exclude_modules", ["q_proj"]),
        ("layers_to_transform", [5]),
        ("modules_to_save", ["q_proj"]),
    ):
        folder = edited(tmp_path / "plain", tmp_path / field, "adapter_config.json", **{field: value})
        with pytest.raises(UnsupportedError, match=rf"{field} leaves model\.layers\.\d\.self_attn\.._proj out"):
            load(f"{tiny_generator}+{folder}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": 3}, "target_modules is 3, which should be a list of names"),
        ({"target_modules": ["a", {}]}, "target_modules is .*, which should be a list of names"),
        ({"modules_to_save": "a"}, "modules_to_save is 'a', which should be a list of names"),
        ({"modules_to_save": ["a"] * (MAX_NAMES + 1)}, "modules_to_save has 1025 names; 1024 are the most"),
        ({"layers_to_transform": [True]}, "layers_to_transform is .*, which should be a number of a layer"),
        ({"layers_to_transform": [1], "layers_pattern": "a.*"}, "layers_pattern is .*, which should be plain names"),
        ({"target_modules": "a", "layers_to_transform": [1]}, "layers_to_transform needs target_modules to be a list"),
    ],
)
def test_settings_that_are_not_evaluated_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"some\.json.*{message}"):
        check_target_settings(Path("some.json"), settings)


def test_an_expression_that_is_not_evaluated_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"target_modules": r"(?:.*?(?:language|text).*?(?:q_proj|k_proj).*?)"}
    check_target_settings(Path("some.json"), settings)
    assert "some.json: target_modules is an expression that is not evaluated" in caplog.text
    assert not AdaptedModules(settings, ignore_steps).find_exclusion("model.layers.0.q_proj")


@pytest.mark.parametrize("pattern", [r".*?vision.*", r"^(?!.*language_model).*$", r"(?:model\.)?(visual|audio).*"])
def test_an_exclusion_that_is_not_evaluated_is_logged(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    settings = {"target_modules": ["q_proj"], "exclude_modules": pattern}
    check_target_settings(Path("some.json"), settings)
    assert "some.json: exclude_modules is an expression that is not evaluated" in caplog.text
    assert not AdaptedModules(settings, ignore_steps).find_exclusion("model.layers.0.q_proj")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_matrices_are_transposed_by_their_kind_and_not_by_the_flag(
    tiny_generator: Path, tmp_path: Path, kind: str, flag: bool
) -> None:
    """peft sets fan_in_fan_out itself: true for Conv1D, false for Linear. Square matrices fit both ways."""
    base, targets = tiny_generator, ["q_proj"]
    if kind == "gpt2":
        base, targets = tmp_path / "base", ["attn.c_proj"]
        config = tf.GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        checkpoints.save(tf.GPT2LMHeadModel(config), checkpoints.byte_level_bpe(), base)
    merged = adapted(generator(base), tmp_path / "plain", task_type="CAUSAL_LM", target_modules=targets)
    folder = edited(tmp_path / "plain", tmp_path / "other", "adapter_config.json", fan_in_fan_out=flag)
    assert language_difference(load(f"{base}+{folder}"), merged) < 1e-4
