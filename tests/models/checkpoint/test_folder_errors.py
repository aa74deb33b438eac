"""Checkpoint folders that cannot be loaded: each error names the file, the field or tensor, and the problem."""

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models.architectures import dbrx
from polyhead.models.architectures.family import MAX_HEAD_WIDTH, MAX_LAYERS, MAX_SHARED_LAYERS
from polyhead.models.checkpoint import describe_source, description, load
from polyhead.models.checkpoint import folder as folder_of
from polyhead.models.checkpoint import tensor_files as tensors
from polyhead.models.checkpoint.description import (
    EXPERT_NUMBERS,
    MAX_EXPERTS,
    SMALL_EXPERTS,
    build_on_meta,
    invalid_fields,
)
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.core.errors import CheckpointError, ModelError, UnsupportedError
from polyhead.models.core.files import SourceFile
from polyhead.models.network.model_config import ExpertConfig, MixerConfig, MixerName, ModelConfig
from tests.support import checkpoints
from tests.support.edits import edited, with_tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "'rwkv' is not known here: it needs recurrent layers.*polyhead families"),
        ({"model_type": None}, "model_type None is not known here: it should be the name"),
        (
            {"architectures": ["BertForPictures"]},
            "BertForPictures.*BertForSequenceClassification",
        ),
        ({"architectures": None}, "BertForSequenceClassification"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map.*run code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unquantised"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "wrong kind"),
        ({"num_attention_heads": 0}, "wrong kind"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"vocab_size": 10**9}, r"word_embeddings.*\[1000000000, 32\]"),
        ({"vocab_size": -5}, "vocab_size is -5, which should be a whole number"),
        ({"vocab_size": 2**70}, "vocab_size is 1.18"),
        ({"hidden_size": 10**9}, "1000000000"),
        ({"hidden_size": 2**31 - 2}, "the network that it describes cannot be built .*widths are too large"),
        ({"layer_norm_eps": "small"}, "norm_eps is 'small'"),
        ({"layer_norm_eps": 1e16}, "norm_eps is 1e.16, which should be a number, not negative, within reason"),
        ({"type_vocab_size": -1}, "segments is -1"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers, but the files hold"),
        ({"num_hidden_layers": 3}, r"16 tensors are missing: .*encoder\.layer\.2\."),
        ({"num_hidden_layers": 1}, r"no place in the network.*encoder\.layer\.1\."),
        ({"id2label": {"0": "a", "1": "b"}}, r"classifier\.(weight|bias).*\[3.*\[2"),
        ({"id2label": {"0": "a", "2": "b"}}, "0 to n-1"),
        ({"id2label": {}}, "0 to n-1, not {}"),
        ({"id2label": None, "num_labels": 10**12}, "num_labels"),
        ({"id2label": {"0": "x" * 1001, "1": "b", "2": "c"}}, "id2label has a string of 1001 characters.*at most 1000"),
        (
            {"id2label": {str(index): "x" * 1000 for index in range(3500)}},
            "id2label has 3500000 characters in all; at most 3145728",
        ),
        ({"id2label": None, "num_labels": 1_000_000}, "num_labels has 11888890 characters in all"),
    ],
)
def test_unsupported_configurations_are_refused(
    tiny_classifier: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(tiny_classifier, tmp_path / "broken", **changes)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as raised:
        load(str(folder))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "size", "depth", "message"),
    [
        ("stranger.{}.weight", 1, 100, "100 layers, but the files hold 18 tensors of layers"),
        ("model.layers.{}.stranger.weight", 0, 100, "100 layers, but the files hold 18 tensors of layers"),
        ("model.layers.{}.stranger.weight", 1, MAX_LAYERS + 1, "1025 layers; networks of 1024 at most"),
    ],
)
def test_layers_are_not_built_without_their_tensors(
    tiny_generator: Path, tmp_path: Path, name: str, size: int, depth: int, message: str
) -> None:
    """Each layer takes memory even before its weights are read."""

    def add_unknown_tensors(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name.format(number): torch.zeros(size) for number in range(depth)}

    folder = with_tensors(tiny_generator, tmp_path / "deep", add_unknown_tensors)
    edited(folder, folder, num_hidden_layers=depth)
    with pytest.raises(CheckpointError, match=message):
        build_on_meta(describe_source(str(folder)))


def mixture(folder: Path) -> Path:
    """A tiny generator with one layer of 4 experts."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = tf.Qwen3MoeConfig(vocab_size=384, num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    return checkpoints.save(tf.Qwen3MoeForCausalLM(config), checkpoints.byte_level_bpe(), folder)


@pytest.mark.parametrize(("layers", "experts"), [(1, SMALL_EXPERTS + 1), (1, MAX_EXPERTS), (3, SMALL_EXPERTS // 2)])
def test_experts_are_not_built_without_their_numbers(tmp_path: Path, layers: int, experts: int) -> None:
    """Each expert takes memory even before its weights are read."""
    folder = mixture(tmp_path / "mixture")
    edited(folder, folder, num_local_experts=experts, num_hidden_layers=layers)
    message = rf"config\.json: experts: it describes {layers * experts} in all layers, and the files hold \d+ numbers; "
    with pytest.raises(CheckpointError, match=f"{message}more than {SMALL_EXPERTS} need {EXPERT_NUMBERS} numbers each"):
        build_on_meta(describe_source(str(folder)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"chosen": 64}, ""),
        ({"chosen": 65}, "with 64 at most chosen for a token"),
        ({"chosen": 65, "groups": 4, "chosen_groups": 4}, "with 64 at most chosen for a token"),
        ({"chosen": 9, "groups": 64, "chosen_groups": 1}, "with 8 at most chosen for a token"),
        ({"chosen": 2, "groups": 64, "chosen_groups": 64}, ""),
        ({"chosen": 2, "groups": 128, "chosen_groups": 128}, "in 64 groups at most"),
    ],
)
def test_few_experts_and_groups_are_chosen(fields: dict[str, int], problem: str) -> None:
    """Each choice of an expert compares all of them, for each row of a step; so does each choice of a group."""
    sizes = dict.fromkeys(("vocab_size", "depth", "heads", "kv_heads", "mlp_width", "max_positions"), 2)
    experts = ExpertConfig(count=512, width=2, **fields)
    config = ModelConfig(**sizes, width=4, head_width=2, causal=True, experts=experts)
    assert list(invalid_fields(config)) == ([("experts", problem)] if problem else [])


def test_experts_with_numbers_may_be_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mixture(tmp_path / "mixture")
    described = describe_source(str(folder))
    numbers = sum(math.prod(entry.shape) for entry in described.entries.values())
    monkeypatch.setattr(description, "SMALL_EXPERTS", 0)
    monkeypatch.setattr(description, "EXPERT_NUMBERS", numbers // 4)
    assert build_on_meta(described)[0].config.experts is not None
    monkeypatch.setattr(description, "EXPERT_NUMBERS", numbers // 4 + 1)
    with pytest.raises(CheckpointError, match="experts: it describes 4 in all layers"):
        build_on_meta(described)


def test_tensors_are_no_more_than_a_network_has(
    tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name is matched with all patterns of a family, several times."""
    monkeypatch.setattr(description, "OTHER_TENSORS", 0)
    monkeypatch.setattr(description, "LAYER_TENSORS", 15)  # of 2 layers, of which the second may be a decoder's
    monkeypatch.setattr(tensors, "_parse_entry", lambda *_: pytest.fail("an entry was made"))

    def add_strays(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"s.{number}": torch.zeros(1) for number in range(61 - len(tensors))}

    folder = with_tensors(tiny_generator, tmp_path / "strays", add_strays)
    message = r"model\.safetensors: it has 61 tensors; a network with as many layers and experts as .* has 60 at most"
    with pytest.raises(CheckpointError, match=message):
        describe_source(str(folder))


def test_matrices_of_fused_tensors_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of few bytes, or of none, may be the matrices of thousands of experts."""
    folder, fused = mixture(tmp_path / "mixture"), "model.layers.0.mlp.experts.down_proj"
    edited(folder, folder, num_hidden_layers=4)
    with_tensors(folder, folder, lambda found: found.update({fused: torch.zeros(4096, 0, 0)}))
    monkeypatch.setattr(description, "OTHER_TENSORS", 0)
    with pytest.raises(
        CheckpointError, match=r"the files hold 41\d\d tensors or more; the network that .* has 2048 at"
    ):
        describe_source(str(folder))


def test_tensors_stop_being_translated_beyond_their_bound(tmp_path: Path) -> None:
    entries = {f"{number}": TensorEntry(SourceFile(tmp_path, ()), "", "F32", (), 0, None) for number in range(10)}
    translated = list[str]()

    def translate(name: str, _: TensorEntry) -> description.NamedPieces:
        translated.append(name)
        return [("ours", torch.empty(0))] * 8

    with pytest.raises(CheckpointError, match="the files hold 24 tensors or more; the network that c describes has 23"):
        list(description.list_pieces("c", entries, 23, translate))
    assert translated == ["0", "1"]
    assert len(list(description.list_pieces("c", entries, 80, translate))) == 10


def test_matrices_of_experts_that_lie_below_each_other_are_bounded() -> None:
    with pytest.raises(ValueError, match="it should hold the matrices of 4096 experts at most"):
        dbrx.split_fused([1, 1, 1], 4097, "blocks.0.ffn.experts.mlp.w1", torch.empty(4097, 1, device="meta"))


def test_rotary_tables_are_bounded_before_shapes_are_compared(tiny_generator: Path, tmp_path: Path) -> None:
    """The frequencies are computed when the network is built, before the files' shapes are compared with it."""
    folder = edited(tiny_generator, tmp_path / "wide", head_dim=MAX_HEAD_WIDTH + 2)
    with pytest.raises(CheckpointError, match="head_width is 16386, which should be 16384 at most, for rotary"):
        build_on_meta(describe_source(str(folder)))


@pytest.mark.parametrize("windowed", [0.0, 10_000.0])
def test_tables_of_a_network_without_its_weights_are_small(tiny_generator: Path, windowed: float) -> None:
    """A network on the meta device has no weights; the tables that it computes take the memory of the process."""
    described = describe_source(str(tiny_generator))
    for name, value in (("head_width", MAX_HEAD_WIDTH), ("width", 2**30), ("heads", 2**30), ("max_positions", 2**30)):
        config = replace(described.config, window_rope_base=windowed, **{"kv_heads": 1, name: value})
        network, _ = build_on_meta(replace(described, config=config))
        assert sum(table.nbytes for table in network.buffers() if not table.is_meta) <= 4 * MAX_HEAD_WIDTH


@pytest.mark.parametrize(
    ("position", "changes", "field"),
    [
        ("alibi", {"heads": 2**20, "kv_heads": 2**20}, "heads"),
        ("closed-sines-cosines", {"position_offset": 2**30}, "max_positions"),
    ],
)
def test_computed_positions_are_bounded_before_they_are_computed(
    position: Any, changes: dict[str, int], field: str
) -> None:
    """Rates of linear biases and sinusoids are computed when a network is built without memory."""
    sizes = dict.fromkeys(("vocab_size", "depth", "heads", "kv_heads", "mlp_width", "max_positions"), 2)
    config = ModelConfig(**sizes, width=4, head_width=2, causal=True, position=position)
    assert not list(invalid_fields(config))
    assert [name for name, _ in invalid_fields(replace(config, **changes))] == [field]


@pytest.mark.parametrize("mixer", ["state_space", "delta"])
def test_a_state_has_fewer_numbers_than_its_layer_has_weights(mixer: MixerName) -> None:
    """Each token of a prompt reads and writes all of it. A small state may be wider, as in networks for tests."""
    sizes = dict.fromkeys(("vocab_size", "heads", "kv_heads", "mlp_width", "max_positions"), 2)
    state = MixerConfig(kernel=4, heads=1 << 10, head_width=1 << 6, key_heads=1, key_width=128)
    config = ModelConfig(**sizes, width=128, head_width=2, depth=1, causal=True, mixers=(mixer,), recurrent=state)

    def names(changed: MixerConfig) -> list[str]:
        return [name for name, _ in invalid_fields(replace(config, recurrent=changed))]

    assert not names(state)
    assert names(replace(state, key_width=129)) == ["recurrent"]
    assert not names(replace(state, heads=1, key_width=1 << 10))


def test_layers_with_shared_tensors_may_be_many(tmp_path: Path) -> None:
    """ALBERT has one set of tensors for all layers; its large models have more layers than this set has tensors."""
    config = tf.AlbertConfig(vocab_size=400, hidden_size=32, num_hidden_layers=24, num_attention_heads=4)
    folder = checkpoints.save(tf.AlbertModel(config), checkpoints.word_piece(), tmp_path / "albert")
    assert len(build_on_meta(describe_source(str(folder)))[0].blocks) == 24
    edited(folder, folder, num_hidden_layers=MAX_SHARED_LAYERS)
    assert len(build_on_meta(describe_source(str(folder)))[0].blocks) == MAX_SHARED_LAYERS
    for depth in (MAX_SHARED_LAYERS + 1, MAX_LAYERS, 10**9):
        edited(folder, folder, num_hidden_layers=depth)
        with pytest.raises(UnsupportedError, match=f"{depth} layers that share their tensors; 48 at most are known"):
            build_on_meta(describe_source(str(folder)))


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\xff"])
def test_a_config_that_is_no_json_object(tiny_classifier: Path, tmp_path: Path, content: str) -> None:
    folder = edited(tiny_classifier, tmp_path / "broken")
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(str(folder))


def test_missing_tensors_are_listed_and_counted(tiny_classifier: Path, tmp_path: Path) -> None:
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layer.1." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"16 tensors are missing: .*and 11 more") as raised:
        load(str(with_tensors(tiny_classifier, tmp_path / "c", remove)))
    assert raised.value.tensor.startswith("bert.encoder.layer.1.")
    assert raised.value.file.endswith("model.safetensors")


def test_only_tensors_that_are_named_are_looked_up(monkeypatch: pytest.MonkeyPatch, tiny_classifier: Path) -> None:
    """Each look-up compares a name with those of all tensors: thousands of experts would take hours."""
    looked_up = list[str]()
    monkeypatch.setattr(description, "checkpoint_name", lambda name, _: looked_up.append(name) or name)
    described = describe_source(str(tiny_classifier))
    with pytest.raises(CheckpointError, match=r"100 tensors are missing: a0, .* and 95 more"):
        description.check_missing(described, [f"a{number}" for number in range(100)], {})
    assert len(looked_up) == description.MAX_NAMED


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_tensor_name(
    tiny_classifier: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"

    def corrupt(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 5] = value

    folder = with_tensors(tiny_classifier, tmp_path / "c", corrupt)
    with pytest.raises(CheckpointError, match="infinite or NaN") as raised:
        load(str(folder), dtype=dtype)
    assert raised.value.tensor == name
    assert raised.value.file.endswith("model.safetensors")


def test_finite_weights_with_an_infinite_sum_are_loaded(tiny_classifier: Path, tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["classifier.bias"][:] = 3e38

    loaded = load(str(with_tensors(tiny_classifier, tmp_path / "c", enlarge)))
    assert float(loaded.head.out.bias.detach().sum()) == float("inf")


def test_a_wrong_shape_is_named_with_the_expected_one(tiny_classifier: Path, tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.intermediate.dense.weight"

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    with pytest.raises(CheckpointError, match=r"\[63, 32\].*\[64, 32\]") as raised:
        load(str(with_tensors(tiny_classifier, tmp_path / "c", narrow)))
    assert raised.value.tensor == name


def test_a_fused_tensor_that_does_not_divide(tmp_path: Path) -> None:
    config = tf.GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    folder = checkpoints.save(tf.GPT2LMHeadModel(config), checkpoints.byte_level_bpe(), tmp_path / "g")

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(32, 96, 1)

    with pytest.raises(CheckpointError, match=r"c_attn\.weight.*\[32, 96, 1\]"):
        load(str(with_tensors(folder, tmp_path / "f", flatten)))


def test_a_convolution_with_one_side_is_refused(tmp_path: Path) -> None:
    """Its side of one element is removed, which a tensor of one side does not have."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.Lfm2Config(vocab_size=384, num_hidden_layers=1, layer_types=["conv"], **sizes)
    folder = checkpoints.save(tf.Lfm2ForCausalLM(config), checkpoints.byte_level_bpe(), tmp_path / "c")

    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.conv.conv.weight"] = torch.zeros(96)

    with pytest.raises(CheckpointError, match=r"conv\.conv\.weight.*\[96\] is not that of such a tensor"):
        load(str(with_tensors(folder, tmp_path / "f", flatten)))


def test_an_unknown_tensor_is_refused(tiny_classifier: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["bert.encoder.layer.0.attention.self.gate.weight"] = torch.zeros(3)

    with pytest.raises(CheckpointError, match=r"no place.*self\.gate\.weight"):
        load(str(with_tensors(tiny_classifier, tmp_path / "c", add)))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low_freq_factor": 0.0}, "positive low_freq_factor and a high_freq_factor above it"),
        ({"low_freq_factor": -1.0}, "positive low_freq_factor"),
        ({"low_freq_factor": 4.0}, "high_freq_factor above it"),
        ({"high_freq_factor": 0.0}, "high_freq_factor above it"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings from 1 on"),
        ({"factor": 0.0}, "by a positive factor"),
    ],
)
def test_rope_scaling_that_divides_by_zero(
    tiny_generator: Path, tmp_path: Path, changes: dict[str, float], message: str
) -> None:
    load(str(edited(tiny_generator, tmp_path / "fine", rope_parameters=LLAMA3)))
    folder = edited(tiny_generator, tmp_path / "broken", rope_parameters=LLAMA3 | changes)
    with pytest.raises(CheckpointError, match=f"rope_scaling.*{message}"):
        load(str(folder))


def test_output_and_embeddings_in_an_unsupported_dtype_are_refused(tiny_generator: Path, tmp_path: Path) -> None:
    """Output and embeddings are compared where both exist, which needs a readable dtype."""

    def store_as_integers(tensors: dict[str, torch.Tensor]) -> None:
        tokens = tensors["model.embed_tokens.weight"].to(torch.int32)
        tensors |= {"model.embed_tokens.weight": tokens, "lm_head.weight": tokens.clone()}

    folder = with_tensors(tiny_generator, tmp_path / "integers", store_as_integers)
    with pytest.raises(UnsupportedError, match=r"I32"):
        load(str(edited(folder, folder, tie_word_embeddings=True)))


def test_integer_weights_are_refused(tiny_classifier: Path, tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.intermediate.dense.weight"

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(UnsupportedError, match=r"I8.*BF16") as raised:
        load(str(with_tensors(tiny_classifier, tmp_path / "c", quantise)))
    assert raised.value.tensor == name


def test_truncated_safetensors_files_are_reported(tiny_classifier: Path, tmp_path: Path) -> None:
    folder = edited(tiny_classifier, tmp_path / "cut")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for length in (0, 5, 8, start // 2, start, start + 10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated") as raised:
            load(str(folder))
        assert bool(raised.value.tensor) == (length >= start)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1]",
        b'{"a": 5}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
    ],
)
def test_damaged_headers_are_refused(tiny_classifier: Path, tmp_path: Path, header: bytes) -> None:
    folder = edited(tiny_classifier, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(str(folder))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "no weight_map"),
        ({"a": "../../outside.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/outside.safetensors"}, "not a file of this folder"),
        ({"a": ".."}, "not a file of this folder|missing"),
        ({"a": 5}, "not a file of this folder"),
        ({"a": "x" * 5000}, "not a file of this folder"),
        ({"a": "a\0b"}, "not a file of this folder"),
        ({"a": "model-00002-of-00002.safetensors"}, "model-00002-of-00002.safetensors is missing"),
        ({"nowhere": "shard.safetensors"}, "places it here, but it is not"),
    ],
)
def test_broken_indices_are_refused(tiny_classifier: Path, tmp_path: Path, weight_map: Any, message: str) -> None:
    folder = edited(tiny_classifier, tmp_path / "s", "model.safetensors.index.json", weight_map=weight_map)
    (folder / "model.safetensors").rename(folder / "shard.safetensors")  # which would be read without the index
    with pytest.raises(CheckpointError, match=message):
        load(str(folder))


def test_tensors_of_all_shards_are_counted(
    tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards may be links to one file, so a small file could declare many tensors."""
    folder = edited(tiny_classifier, tmp_path / "s")
    count = len(tensors.read_safetensors(folder / "model.safetensors"))
    names = [f"model-{number}.safetensors" for number in range(3)]
    for name in names:
        (folder / name).symlink_to("model.safetensors")
    weight_map = dict(zip(tensors.read_safetensors(folder / "model.safetensors"), names, strict=False))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert folder_of.list_sharded_tensors(folder).keys() == weight_map.keys()
    with pytest.raises(CheckpointError, match=f"it has {2 * count} tensors; a network .* has {2 * count - 1} at most"):
        folder_of.list_sharded_tensors(folder, 2 * count - 1)
    monkeypatch.setattr(tensors, "MAX_TENSORS", 3 * count - 1)
    with pytest.raises(CheckpointError, match=f"it has {3 * count} tensors; {3 * count - 1} are the most"):
        folder_of.list_sharded_tensors(folder)


CONVERT = r"save_pretrained\(folder\) writes safetensors"
UNREAD = {
    "pytorch_model.bin": rf"can run code when opened.*{CONVERT}",
    "model.pt": rf"can run code.*{CONVERT}",
    "model.pth": rf"can run code.*{CONVERT}",
    "model.ckpt": rf"can run code.*{CONVERT}",
    "model.pickle": rf"can run code.*{CONVERT}",
    "model.pkl": rf"can run code.*{CONVERT}",
    "graph.onnx": "read only as model.onnx.*name the safetensors folder or the GGUF file",
    "tf_model.h5": "can hold code.*convert them to safetensors",
    "flax_model.msgpack": "not read; convert them to safetensors",
}


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("name", UNREAD)
def test_folders_of_formats_that_are_not_read(
    tiny_classifier: Path, tmp_path: Path, name: str, configured: bool
) -> None:
    """The error is about the format, with and without a config.json."""
    folder = edited(tiny_classifier, tmp_path / "p")
    (folder / "model.safetensors").rename(folder / name)
    if not configured:
        (folder / "config.json").unlink()
    with pytest.raises(UnsupportedError, match=rf"p: only .*\({name}\).*{UNREAD[name]}"):
        load(str(folder))


@pytest.mark.parametrize("name", UNREAD)
def test_files_of_formats_that_are_not_read(tmp_path: Path, name: str) -> None:
    """They are refused by name; their content is not read."""
    (tmp_path / name).touch()
    with pytest.raises(UnsupportedError, match=rf"{name}: .*{UNREAD[name]}"):
        load(str(tmp_path / name))


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    for name, message in (("a.safetensors", "name the folder that has its config.json"), ("a.txt", "name the folder")):
        (tmp_path / name).touch()
        with pytest.raises(UnsupportedError, match=message):
            load(str(tmp_path / name))


def test_weights_in_unsupported_formats_beside_safetensors_are_ignored(tiny_classifier: Path, tmp_path: Path) -> None:
    """They change no other error either."""
    folder = edited(tiny_classifier, tmp_path / "b")
    for name in UNREAD:
        (folder / name).touch()
    load(str(folder))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor .*only other\.safetensors"):
        load(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: is not there, and is needed"):
        load(str(folder))


def test_folders_without_weights_tokenizer_or_config(tiny_classifier: Path, tmp_path: Path) -> None:
    folder = edited(tiny_classifier, tmp_path / "w")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        load(str(folder))
    folder = edited(tiny_classifier, tmp_path / "t")
    for file in folder.glob("tokenizer.json"):
        file.rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is no SentencePiece model"):
        load(str(folder))
    folder = edited(tiny_classifier, tmp_path / "c")
    (folder / "config.json").unlink()
    (folder / "some.gguf").touch()
    with pytest.raises(CheckpointError, match=r"config\.json.*some\.gguf"):
        load(str(folder))


def test_missing_sources_are_refused() -> None:
    for source in ("./nowhere", "nowhere", "", "+", "a+b", "/nowhere/at/all"):
        with pytest.raises(CheckpointError, match="no such folder or file"):
            load(source)


VALUES: list[Any] = [None, [], {}, "x", -1, 0, 1e308, True, [[]], {"a": 1}, 2**40]
MORE_KEYS = ("tie_word_embeddings", "sliding_window", "layer_types", "rope_parameters", "rope_scaling", "num_labels")


@pytest.mark.parametrize("kind", [checkpoints.generator, checkpoints.classifier, checkpoints.embedder])
def test_any_value_in_any_file_loads_or_is_refused_with_a_message(kind: Callable[[Path], Path], tmp_path: Path) -> None:
    """With any value in any field the folder loads, or a ModelError has a message."""
    folder, choice = kind(tmp_path / "c"), random.Random(0)
    files = [file for file in sorted(folder.rglob("*.json")) if file.name != "tokenizer.json"]
    values = {file: json.loads(file.read_text()) for file in files}
    cases = [(file, key) for file in files for key in (*values[file], *MORE_KEYS) if isinstance(values[file], dict)]
    messages = []
    for file, key in choice.choices([*cases, *((file, None) for file in files)], k=60):
        value = choice.choice(VALUES)
        file.write_text(json.dumps(value if key is None else {**values[file], key: value}))
        try:
            load(str(folder))
        except ModelError as error:
            messages.append(str(error))
        file.write_text(json.dumps(values[file]))
    assert len(messages) > 5
    assert all(messages)
    load(str(folder))
