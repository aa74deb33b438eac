"""A field of a configuration that is missing, null or 0 means what it means to the reference, or is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.architectures import FAMILIES
from polyhead.models.architectures.family import no_decoder
from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError, ModelError
from polyhead.models.network.model_config import EncoderDecoderConfig, ModelConfig
from tests.families import test_decoders, test_encoder_decoders, test_encoders, test_experts
from tests.families.test_decoders import assert_close, packed_logits, reference_logits, save_reference

ROUNDING = 1e-4  # of the largest number
MISSING = object()  # in place of the value of a field that is left out
# Fields of which a wrong default is refused, by the shapes or the number of tensors.
SIZES = frozenset((
    "architectures", "model_type", "text_config", "encoder", "decoder", "vocab_size", "vocab_size_per_layer_input",
    "type_vocab_size", "num_key_value_heads", "head_dim", "v_head_dim", "q_lora_rank", "n_shared_experts",
    "shared_expert_intermediate_size", "num_decoder_layers", "num_hidden_layers", "n_layer",
    "mamba_n_heads", "mamba_expand", "mamba_d_head", "num_heads", "expand",
))  # fmt: skip
NESTED = ("text_config", "rope_parameters", "attn_config", "encoder", "full_attention", "sliding_attention")
Way = tuple[str, ...]
Configured = tuple[Any, Any]  # configuration and class of the reference


def all_rows() -> Iterator[tuple[str, Configured]]:
    """One row for each `model_type`."""
    known = set()
    for name, (config, kind) in decoder_rows():
        known.add(config.model_type)
        yield name, (config, kind)
    encoders = (
        (name, row.config(**{"vocab_size": 300, "pad_token_id": 0, **row.fields}), row.kind)
        for name, row in test_encoders.ROWS.items()
    )
    sides = ((name, row.config(**row.fields), row.kind) for name, row in test_encoder_decoders.ROWS.items())
    for name, config, kind in (*encoders, *sides):
        if config.model_type not in known:
            known.add(config.model_type)
            yield name, (config, kind)


def decoder_rows() -> Iterator[tuple[str, Configured]]:
    """As `all_rows`, of decoders."""
    known = set()
    plain = ((name, (row.make_config(), row.kind)) for name, row in test_decoders.ROWS.items())
    for name, (config, kind) in (*plain, *test_experts.ROWS.items()):
        if config.model_type not in known:
            known.add(config.model_type)
            yield name, (config, kind)


ROWS = dict(all_rows())
DECODERS = dict(decoder_rows())


def list_fields(config: dict[str, Any], way: Way = ()) -> Iterator[tuple[Way, Any]]:
    for key, value in config.items():
        yield (*way, key), value
        if key in NESTED and isinstance(value, dict):
            yield from list_fields(value, (*way, key))


def changed(config: dict[str, Any], way: Way, value: Any) -> dict[str, Any]:
    """A copy with another value of a field, or without it."""
    copy = json.loads(json.dumps(config))
    holder = copy
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    if value is MISSING:
        del holder[way[-1]]
    return copy


def read_fields(config: dict[str, Any]) -> list[ModelConfig]:
    """What the family reads from a configuration: one stack, or two."""
    family = FAMILIES[config["model_type"]]
    spec = family.variant(family, config).heads[config["architectures"][0]]
    found: list[ModelConfig] = [family.config(config)]
    if spec.decoder is not no_decoder:
        both: EncoderDecoderConfig = spec.decoder(config, 0)
        found.append(both.decoder)
    return [effective(each) for each in found]


def effective(config: ModelConfig) -> ModelConfig:
    """The configuration with the defaults of its fields written out."""
    layers = range(config.depth)
    return replace(
        config,
        windowed=tuple(config.is_windowed(layer) for layer in layers),
        rotated=tuple(config.is_rotated(layer) for layer in layers),
        score_scale=config.score_scale or config.head_width**-0.5,
    )


def reread(config: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The configuration as the reference writes it after it has read it, with the values of all fields."""
    found: dict[str, Any] = json.loads(json.dumps(kind.from_dict(config).to_dict()))
    return found | {key: config[key] for key in ("architectures", "model_type")}


def described(name: str) -> tuple[dict[str, Any], Any]:
    """All fields of a row, and the class of its configuration."""
    config, kind = ROWS[name]
    fields = {**config.to_dict(), "architectures": [kind.__name__], "model_type": config.model_type}
    return json.loads(json.dumps(fields)), type(config)


@pytest.mark.parametrize("name", ROWS)
def test_fields_that_are_left_out_have_the_values_of_the_reference(name: str) -> None:
    """All fields but sizes and those without which the configuration is refused."""
    config, kind = described(name)
    for key in [key for key in config if key not in SIZES]:
        fewer = changed(config, (key,), MISSING)
        try:
            read_fields(fewer)
        except (KeyError, ModelError):
            continue
        config = fewer
    assert read_fields(config) == read_fields(reread(config, kind))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("value", [MISSING, None], ids=["missing", "null"])
def test_each_field_that_is_left_out_or_null_has_the_value_of_the_reference(name: str, value: Any) -> None:
    config, kind = described(name)
    for way in [way for way, _ in list_fields(config) if way[-1] not in SIZES]:
        fewer = changed(config, way, value)
        try:
            expected, found = reread(fewer, kind), read_fields(fewer)
        except Exception:  # noqa: BLE001  the reference raises errors of many kinds; ours are compared with logits
            continue
        assert found == read_fields(expected), way


# The row, the field with dots between names, its value, and the sentence with which it is refused; empty: the answers
# are those of the reference.
VALUES: list[tuple[str, str, Any, str]] = [
    ("gemma3", "attn_logit_softcapping", 0.5, ""),
    ("gemma3", "rope_parameters.sliding_attention.rope_theta", MISSING, ""),
    ("gemma2", "attn_logit_softcapping", 0.0, "attn_logit_softcapping is 0.0, which should be a positive number"),
    ("gemma2", "final_logit_softcapping", 0, "final_logit_softcapping is 0, which"),
    ("gemma2", "final_logit_softcapping", None, ""),
    ("gemma4", "final_logit_softcapping", 0.0, "final_logit_softcapping is 0.0, which"),
    ("nanochat", "final_logit_softcapping", 0.0, "final_logit_softcapping is 0.0, which"),
    ("cohere", "logit_scale", 0.0, "logit_scale is 0.0, which"),
    ("granite", "attention_multiplier", 0.0, "attention_multiplier is 0.0, which"),
    ("granite", "embedding_multiplier", 0.0, ""),
    ("granite", "residual_multiplier", 0.0, ""),
    ("granite", "logits_scaling", 0.0, "wrong kind"),
    ("olmo", "clip_qkv", 0.0, "clip_qkv is 0.0, which"),
    ("olmo", "clip_qkv", None, ""),
    ("dbrx", "attn_config.clip_qkv", 0.0, "clip_qkv is 0.0, which"),
    ("gpt_oss", "swiglu_limit", 0.0, "swiglu_limit is 0.0, which"),
    ("gpt_oss", "rope_parameters", {}, ""),
    ("gpt_neox", "rope_parameters.partial_rotary_factor", 0.0, "partial_rotary_factor is 0.0: no feature of 8"),
    ("gpt_neox", "layer_norm_eps", 0.0, ""),
    ("llama", "rope_parameters.rope_theta", 0.0, "rope_theta is 0.0, which should be a positive number"),
    ("llama-yarn", "rope_parameters.attention_factor", 1e16, "with a positive attention_factor, within reason"),
    ("llama", "num_key_value_heads", None, "tensor"),
    ("llama", "head_dim", None, ""),
    ("gpt2", "n_inner", None, ""),
    ("gpt_neo", "attention_layers", ["local", "global", "local", "global"], ""),
    ("gpt_neo", "window_size", 0, "window_size is 0, which"),
    ("modernbert-decoder", "local_attention", 0, "local_attention is 0, which"),
    ("modernbert-decoder", "local_attention", MISSING, ""),
    ("smollm3-window", "use_sliding_window", False, ""),
    ("olmo-hybrid", "rope_parameters", None, ""),
    ("olmo-hybrid", "rope_parameters", {}, ""),
    ("olmo-hybrid", "rope_parameters.rope_theta", None, ""),
    ("nemotron-h", "time_step_min", 0.1, ""),
    ("nemotron-h", "time_step_limit", [0.0, 0.001], ""),
    ("nemotron-h", "topk_group", 0, "topk_group is 0, which should be a whole number from 1"),
    ("bamba", "time_step_limit", [0.5, 0.9], ""),
    ("mamba2", "time_step_min", 0.1, ""),
    ("falcon-rw", "alibi", False, ""),
    ("falcon-40b", "alibi", True, ""),
    ("falcon-7b", "alibi", True, ""),
    ("glm4_moe", "n_group", 0, "n_group is 0, which should be a whole number from 1"),
    ("glm4_moe", "norm_topk_prob", MISSING, ""),
    ("mistral4", "topk_group", 0, "topk_group is 0: only 1 is known"),
    ("mistral4", "routed_scaling_factor", 0.0, ""),
    ("deepseek_v3", "rope_interleave", None, ""),
    ("minimax_m2", "rope_parameters.partial_rotary_factor", 0.75, ""),
    ("mixtral", "rms_norm_eps", MISSING, ""),
    ("mixtral", "rope_parameters", None, ""),
    ("mixtral", "num_local_experts", 0, "num_local_experts|experts|count"),
    ("phi3-longrope", "original_max_position_embeddings", MISSING, ""),
    ("gpt_oss", "original_max_position_embeddings", 8, ""),
    ("llama-yarn", "original_max_position_embeddings", 4096, ""),
    ("llama-3", "original_max_position_embeddings", 4, ""),
    ("ministral3", "original_max_position_embeddings", 16, ""),
    ("kolibri1", "norm_topk_prob", MISSING, ""),
    ("llama", "partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5: llama networks rotate all features"),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 4.0}, "rope_scaling and rope_parameters are both"),
    ("llama", "rope_parameters", {"full_attention": {}, "sliding_attention": {}}, "llama networks have one rotation"),
    ("gemma3", "rope_parameters", {"rope_type": "linear", "factor": 4.0}, "has no object for each type of layers"),
    ("gemma3-images", "text_config.final_logit_softcapping", 2.0, "final_logit_softcapping is 2.0: only None"),
    ("gemma3-images", "text_config.is_causal", False, "text_config.is_causal is False, and in this network"),
    ("mimo_v2_flash", "rope_parameters.full_attention.partial_rotary_factor", MISSING, ""),
    ("mellum", "partial_rotary_factor", 0.5, "or a share of features of sliding"),
    (
        "mellum",
        "rope_parameters.full_attention.partial_rotary_factor",
        0.5,
        "a share of features of sliding",
    ),
    ("xglm", "pad_token_id", 2, "pad_token_id is 2: only 0 and 1 are known"),
]
FolderOf = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Saves the reference of a row once. Returns its folder and its class."""
    folders: dict[str, tuple[Path, Any]] = {}
    configs = {name: (row.make_config(), row.kind) for name, row in test_decoders.ROWS.items()}

    def make(name: str) -> tuple[Path, Any]:
        if name not in folders:
            config, kind = {**configs, **test_experts.ROWS}[name]
            folder = tmp_path_factory.mktemp("values") / name
            save_reference(kind, config, folder)
            folders[name] = folder, kind
        return folders[name]

    return make


@pytest.mark.parametrize(("name", "way", "value", "sentence"), VALUES)
def test_a_value_means_what_it_means_to_the_reference_or_is_refused(
    folder_of: FolderOf, name: str, way: str, value: Any, sentence: str
) -> None:
    folder, kind = folder_of(name)
    file = folder / "config.json"
    saved = file.read_text()
    file.write_text(json.dumps(changed(json.loads(saved), tuple(way.split(".")), value)))
    try:
        if sentence:
            with pytest.raises(CheckpointError, match=sentence):
                load(str(folder))
        else:
            expected = reference_logits(kind.from_pretrained(folder).eval())
            assert_close(packed_logits(load(str(folder))), expected)
    finally:
        file.write_text(saved)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DECODERS)
def test_each_field_that_is_missing_or_null_or_0_is_followed_or_refused(folder_of: FolderOf, name: str) -> None:
    """Where the reference answers and its tensors are those of the folder."""
    folder, kind = folder_of(name)
    file = folder / "config.json"
    saved = file.read_text()
    config = json.loads(saved)
    for way, known in list_fields(config):
        empty = None if isinstance(known, bool | str | list | dict | None) else type(known)(0)
        for value in (MISSING, None, *([] if empty is None else [empty])):
            file.write_text(json.dumps(changed(config, way, value)))
            try:
                found = packed_logits(load(str(folder)))
            except ModelError:
                continue
            try:
                theirs, report = kind.from_pretrained(folder, output_loading_info=True)
                expected = reference_logits(theirs.eval())
            except Exception:  # noqa: BLE001  the reference raises errors of many kinds
                continue
            if not any(report.values()) and expected.isfinite().all():
                assert float((found - expected).abs().max()) < 1e-4 * max(1.0, float(expected.abs().max())), (
                    way,
                    value,
                )
    file.write_text(saved)
