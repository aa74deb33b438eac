"""Decoders that are published with code of their own, which is never run, or in an older layout: their folders and GGUF
files give the logits of a network of transformers that computes the same."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from tests.families.classic_decoders import VOCABULARY
from tests.families.modern_decoders import (
    GEMMA3,
    GEMMA4,
    GEMMA4_EXPERTS,
    GEMMA4_TIED,
    LONG_ROPE,
    SHAPE,
    SIGLIP,
    interleave,
    shape_of,
)
from tests.families.test_decoders import ROWS, SEQUENCES, assert_close, packed_logits, reference_logits, tokenizer
from tests.support import gguf_files
from tests.support.checkpoints import write_json
from tests.support.edits import edited

HEADS, KEY_HEADS, DEPTH, WIDTH = 4, 2, 3, 32
RENAMES = {
    "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def make_reference(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    theirs = kind(config).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    return theirs


def write_folder(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    tokenizer().save_pretrained(folder)
    write_json(folder / "config.json", {**SHAPE, "vocab_size": VOCABULARY, **config})
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def published(prefix: str, model_type: str) -> dict[str, Any]:
    """The fields that name the classes of a checkpoint's own code."""
    name = f"{prefix}ForCausalLM"
    places = {"AutoConfig": f"configuration.{prefix}Config", "AutoModelForCausalLM": f"modeling.{name}"}
    return {"model_type": model_type, "architectures": [name], "auto_map": places}


def grouped_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Llama's weights as InternLM 2 stores them: for each key head its queries, the key and the value."""
    found = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            rows = [part.view(KEY_HEADS, -1, WIDTH // HEADS, WIDTH) for part in parts]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(rows, 1).reshape(-1, WIDTH)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for theirs, ours in RENAMES.items():
                name = name.replace(theirs, ours)
            found[name] = tensor
    return found


def test_internlm2_equals_a_llama_with_its_weights(tmp_path: Path) -> None:
    theirs = make_reference(tf.LlamaForCausalLM, tf.LlamaConfig(**SHAPE, vocab_size=VOCABULARY, rms_norm_eps=1e-5))
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "bias": False, "tie_word_embeddings": False}
    config |= {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    weights = grouped_weights(theirs.state_dict())
    loaded = load(str(write_folder(tmp_path, {**config, **published("InternLM2", "internlm2")}, weights)))
    assert_close(packed_logits(loaded), reference_logits(theirs))


def test_internlm3_has_biases_of_queries_keys_and_values_alone(tmp_path: Path) -> None:
    """As Qwen2, whose other projections have no bias."""
    theirs = make_reference(tf.Qwen2ForCausalLM, tf.Qwen2Config(**SHAPE, vocab_size=VOCABULARY, rms_norm_eps=1e-5))
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "qkv_bias": True, "bias": False, "head_dim": WIDTH // HEADS}
    folder = write_folder(tmp_path, {**config, **published("InternLM3", "internlm3")}, theirs.state_dict())
    assert_close(packed_logits(load(str(folder))), reference_logits(theirs))


def minicpm_reference() -> tuple[Any, dict[str, Any]]:
    """MiniCPM's formulas are Granite's: states of a part are multiplied by scale_depth / sqrt(layers) before the sum,
    states before the output matrix divided by hidden_size / dim_model_base."""
    scales = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8}
    config = tf.GraniteConfig(
        **SHAPE, vocab_size=VOCABULARY, embedding_multiplier=3.0, residual_multiplier=1.4 / DEPTH**0.5,
        attention_multiplier=(WIDTH // HEADS) ** -0.5, logits_scaling=WIDTH / 8, rms_norm_eps=1e-5,
    )  # fmt: skip
    return make_reference(tf.GraniteForCausalLM, config), {**scales, "rms_norm_eps": 1e-5, "rope_theta": 1e4}


def test_minicpm_equals_a_granite_with_its_scales(tmp_path: Path) -> None:
    theirs, config = minicpm_reference()
    folder = write_folder(tmp_path / "folder", {**config, **published("MiniCPM", "minicpm")}, theirs.state_dict())
    assert_close(packed_logits(load(str(folder))), reference_logits(theirs))
    changed = edited(folder, tmp_path / "changed", sparse_config={"block_size": 64})
    with pytest.raises(CheckpointError, match="sparse_config is "):
        load(str(changed))


def test_classes_that_are_not_the_familys_are_refused(tmp_path: Path) -> None:
    theirs, config = minicpm_reference()
    places = {"AutoModelForCausalLM": "modeling.MiniCPMSparseForCausalLM"}
    fields = {**config, **published("MiniCPM", "minicpm"), "auto_map": places}
    folder = write_folder(tmp_path, fields, theirs.state_dict())
    with pytest.raises(CheckpointError, match="auto_map asks to run code"):
        load(str(folder))


@pytest.mark.parametrize("layout", ["language_model.model.{}", "model.language_model.{}"])
def test_text_parts_are_read_under_older_and_newer_names(tmp_path: Path, layout: str) -> None:
    """The fields that the first configurations of Gemma 3 with images leave out have their values."""
    text = {**GEMMA3, "vocab_size": VOCABULARY}
    del text["num_attention_heads"], text["num_key_value_heads"]
    config = tf.Gemma3TextConfig(**text)
    theirs = make_reference(tf.Gemma3ForCausalLM, config)
    weights = {
        layout.format(name.removeprefix("model.")): tensor
        for name, tensor in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    weights["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(16)
    fields = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": SIGLIP}
    kept = {key: value for key, value in text.items() if key != "rope_parameters"}
    folder = write_folder(tmp_path, {**fields, "text_config": kept}, weights)
    assert_close(packed_logits(load(str(folder))), reference_logits(theirs))


@pytest.mark.parametrize("name", ["BaiChuanForCausalLM", "BaichuanForCausalLM"])
@torch.no_grad()
def test_baichuan_equals_a_llama_with_its_weights(tmp_path: Path, name: str) -> None:
    """The second generation divides the rows of the output matrix by their lengths."""
    shape = shape_of(num_key_value_heads=HEADS)
    theirs = make_reference(tf.LlamaForCausalLM, tf.LlamaConfig(**shape, vocab_size=VOCABULARY))
    weights = {}
    for key, tensor in theirs.state_dict().items():
        if ".q_proj." in key:
            parts = [theirs.state_dict()[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            weights[key.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif ".k_proj." not in key and ".v_proj." not in key:
            weights[key] = tensor.clone()
    if name == "BaichuanForCausalLM":
        theirs.lm_head.weight /= theirs.lm_head.weight.norm(dim=1, keepdim=True)
    fields = {**shape, **published("Baichuan", "baichuan"), "architectures": [name], "rms_norm_eps": 1e-6}
    folder = write_folder(tmp_path / "folder", {**fields, "tie_word_embeddings": False}, weights)
    assert_close(packed_logits(load(str(folder))), reference_logits(theirs))


@pytest.mark.parametrize("family", ["Gemma3", "Gemma4", "Qwen2VL"])
@torch.no_grad()
def test_text_parts_give_states(tmp_path: Path, family: str) -> None:
    name = f"{family.lower()}-images" if "Gemma" in family else "qwen2-images"
    theirs = make_reference(getattr(tf, f"{family}Model"), ROWS[name].make_config())
    theirs.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    expected = torch.cat([theirs(torch.tensor([each])).last_hidden_state[0] for each in SEQUENCES])
    assert_close(loaded.network(RaggedBatch.of(SEQUENCES)), expected)


def gguf_tensors(architecture: str, theirs: Any, convert: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """The weights of a network under GGUF's names."""
    dialect = next(arch for arch, spelled in gguf.MODEL_ARCH_NAMES.items() if spelled == architecture)
    names, found = gguf.get_tensor_name_map(dialect, theirs.config.num_hidden_layers), {}
    for name, tensor in theirs.state_dict().items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if scaled := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
            ours = f"blk.{scaled[1]}.{'ffn_gate_inp' if scaled[2] == 'scale' else 'ffn_down_exps'}.scale"
        assert ours, name
        found[ours] = (convert(theirs.config, name, tensor) if convert else tensor).contiguous()
    return found


def write_gguf(file: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    shared = {
        "block_count": DEPTH, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": 48,
        "attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS,
    }  # fmt: skip
    metadata = {**shared, **fields, **gguf_files.byte_level_metadata(tokenizer())}
    return gguf_files.write(file, architecture, metadata, tensors)


@pytest.mark.parametrize("architecture", ["internlm2", "minicpm"])
def test_gguf_files_of_published_decoders_equal_their_reference(tmp_path: Path, architecture: str) -> None:
    """The converter takes the fused matrix of InternLM 2 apart."""
    eps = {"attention.layer_norm_rms_epsilon": 1e-5}
    if architecture == "minicpm":
        theirs, _ = minicpm_reference()
        eps |= {"embedding_scale": 3.0, "residual_scale": 1.4 / DEPTH**0.5, "logit_scale": WIDTH / 8}
    else:
        theirs = make_reference(tf.LlamaForCausalLM, tf.LlamaConfig(**SHAPE, vocab_size=VOCABULARY, rms_norm_eps=1e-5))
    tensors = gguf_tensors("llama", theirs, interleave)
    file = write_gguf(tmp_path / "model.gguf", architecture, eps, tensors)
    assert_close(packed_logits(load(str(file))), reference_logits(theirs))


def test_a_gguf_file_with_longrope_has_its_short_factors(tmp_path: Path) -> None:
    fields = shape_of(max_position_embeddings=96, original_max_position_embeddings=48, rope_parameters=dict(LONG_ROPE))
    theirs = make_reference(tf.Phi3ForCausalLM, tf.Phi3Config(**fields, vocab_size=VOCABULARY))
    tensors = gguf_tensors("phi3", theirs)
    for kind in ("short", "long"):
        tensors[f"rope_factors_{kind}.weight"] = torch.tensor(LONG_ROPE[f"{kind}_factor"])
    magnitude = float((1 + torch.tensor(2.0).log() / torch.tensor(48.0).log()).sqrt())
    metadata = {
        "context_length": 96, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 4,
        "rope.scaling.original_context_length": 48, "rope.scaling.attn_factor": magnitude,
    }  # fmt: skip
    loaded = load(str(write_gguf(tmp_path / "model.gguf", "phi3", metadata, tensors)))
    assert loaded.config.max_positions == 48
    assert_close(packed_logits(loaded), reference_logits(theirs))
    tensors["rope_factors_short.weight"] = torch.ones(5)
    with pytest.raises(CheckpointError, match=r"shape is \[5\], but the rotated features ask for \[2\]"):
        load(str(write_gguf(tmp_path / "other.gguf", "phi3", metadata, tensors)))


def test_a_gguf_file_of_stablelm_has_norms_of_heads(tmp_path: Path) -> None:
    config = tf.StableLmConfig(**SHAPE, vocab_size=VOCABULARY, qk_layernorm=True, use_parallel_residual=True)
    theirs = make_reference(tf.StableLmForCausalLM, config)
    weights, names = {}, gguf.get_tensor_name_map(gguf.MODEL_ARCH.STABLELM, DEPTH)
    for name, tensor in theirs.state_dict().items():
        if "_layernorm.norms." not in name:
            weights[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    for layer, block in enumerate(theirs.model.layers):
        for part in "qk":
            norms = getattr(block.self_attn, f"{part}_layernorm").norms
            weights[f"blk.{layer}.attn_{part}_norm.weight"] = torch.stack([norm.weight.detach() for norm in norms])
    metadata = {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 2}
    loaded = load(str(write_gguf(tmp_path / "model.gguf", "stablelm", metadata, weights)))
    assert_close(packed_logits(loaded), reference_logits(theirs))


def gemma4_file(file: Path, theirs: Any, **changes: Any) -> Path:
    """As the converter writes it; files have keys of layers that read those of another layer."""
    config = theirs.config
    tensors = {
        re.sub(r"(layer_output_scale|_exps)$", r"\1.weight", name): tensor
        for name, tensor in gguf_tensors("gemma4", theirs).items()
    }
    tensors["rope_freqs.weight"] = torch.tensor(changes.pop("factors", [1.0] * 2 + [1e30] * 6))
    if config.num_kv_shared_layers:
        tensors["blk.5.attn_k.weight"] = torch.ones(32, 32)
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    fields = {
        "block_count": config.num_hidden_layers, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 4,
        "attention.sliding_window_pattern": windowed, "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 8,
        "attention.value_length_swa": 8, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 16,
        "rope.dimension_count_swa": 8, "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": [48 * (1 + (layer >= first)) for layer in range(config.num_hidden_layers)],
    }  # fmt: skip
    if config.attention_k_eq_v:
        fields["attention.head_count_kv"] = [2 if each else 1 for each in windowed]
    if config.enable_moe_block:
        fields |= {
            "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }  # fmt: skip
    if config.final_logit_softcapping:
        fields["final_logit_softcapping"] = config.final_logit_softcapping
    return write_gguf(file, "gemma4", {**fields, **changes}, tensors)


@pytest.mark.parametrize("shape", [GEMMA4, GEMMA4_TIED, GEMMA4_EXPERTS])
def test_a_gguf_file_of_gemma4_equals_its_reference(tmp_path: Path, shape: dict[str, Any]) -> None:
    theirs = make_reference(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**shape, vocab_size=VOCABULARY))
    for layer in theirs.model.layers:
        layer.layer_scalar.normal_(1.0, 0.2)
    assert_close(packed_logits(load(str(gemma4_file(tmp_path / "model.gguf", theirs)))), reference_logits(theirs))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expert_count": 4}, "top_k_experts is None, which should be a whole number"),
        ({"factors": [1.0] * 7 + [8.0]}, "its factors should be 1, and then 1e.30 for features that are not rotated"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern has 1 values, which should be 3"),
        ({"attention.value_length_swa": 4}, "attention.value_length_swa 4 differs from the head width 8"),
    ],
)
def test_a_gguf_file_of_gemma4_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    theirs = make_reference(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**GEMMA4_TIED, vocab_size=VOCABULARY))
    with pytest.raises(CheckpointError, match=sentence):
        load(str(gemma4_file(tmp_path / "model.gguf", theirs, **changes)))
