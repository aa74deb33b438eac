"""Encoders that are published with code of their own, which is never run: folders with the names and fields of that
code give the numbers of its formulas, written here as small functions, or of the class that transformers has."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.executors.torch_executor import TorchExecutor
from tests.families.conformance import BERT, CLOSE, LABELS, TEXTS, Row, head_output, reference_output, save_checkpoint
from tests.support import checkpoints

WIDTH, HEADS, INNER, DEPTH, EPS = 32, 4, 48, 3, 1e-5
COMMON = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": DEPTH,
    "intermediate_size": INNER,
    "max_position_embeddings": checkpoints.POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": EPS,
    "id2label": LABELS,
}
COUNT = 300  # embeddings; the tests' tokenizer has as many tokens at most
EMBEDDINGS = r"(^|\.)(word_embeddings|encoder)\.(weight|parametrizations\.weight\.original)$"
Weights = Mapping[str, Tensor]
Oracle = Callable[[Weights, list[int], list[int]], Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    norms = {name for name, shape in shapes.items() if len(shape) == 1 and name.endswith("weight")}
    return {name: torch.randn(shape, generator=generator) * 0.2 + (name in norms) for name, shape in shapes.items()}


def write_folder(folder: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    """A folder with a tokenizer of as many tokens as the first matrix has rows, or fewer."""
    count = max(len(tensor) for name, tensor in weights.items() if re.search(EMBEDDINGS, name))
    checkpoints.word_piece(count).save_pretrained(folder)
    checkpoints.write_json(folder / "config.json", {**config, "vocab_size": count})
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)


def mix(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Attention of [T, H, D] queries, keys and values: [T, H * D]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.size(-1)) + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def by_heads(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, -1)


# Jina's second embeddings


def alibi_shapes(count: int, types: int = 2) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (count, WIDTH),
        "embeddings.token_type_embeddings.weight": (types, WIDTH),
    }
    named = ["embeddings.LayerNorm"]
    for layer in range(DEPTH):
        at = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}.attention.{part}.weight": (WIDTH, WIDTH), f"{at}.attention.{part}.bias": (WIDTH,)}
        shapes |= {
            f"{at}.mlp.gated_layers.weight": (2 * INNER, WIDTH),
            f"{at}.mlp.wo.weight": (WIDTH, INNER),
            f"{at}.mlp.wo.bias": (WIDTH,),
        }
        named += [f"{at}.attention.output.LayerNorm", f"{at}.mlp.layernorm"]
    return shapes | {f"{name}.{part}": (WIDTH,) for name in named for part in ("weight", "bias")}


def alibi_states(weights: Weights, tokens: list[int], segments: list[int]) -> Tensor:
    """Post-norm layers; scores minus a rate times the distance; the first half of the wide matrix is the gate."""
    x = (
        weights["embeddings.word_embeddings.weight"][tokens]
        + weights["embeddings.token_type_embeddings.weight"][segments]
    )
    x = norm(weights, "embeddings.LayerNorm", x)
    place = torch.arange(len(tokens))
    rates = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])
    bias = -rates[:, None, None] * (place[:, None] - place).abs()
    for layer in range(DEPTH):
        at = f"encoder.layer.{layer}"
        parts = [by_heads(linear(weights, f"{at}.attention.self.{part}", x)) for part in ("query", "key", "value")]
        mixed = linear(weights, f"{at}.attention.output.dense", mix(*parts, bias))
        x = norm(weights, f"{at}.attention.output.LayerNorm", x + mixed)
        gate, up = linear(weights, f"{at}.mlp.gated_layers", x).chunk(2, dim=-1)
        x = norm(weights, f"{at}.mlp.layernorm", x + linear(weights, f"{at}.mlp.wo", F.gelu(gate) * up))
    return x


def alibi_logits(weights: Weights, tokens: list[int], segments: list[int]) -> Tensor:
    """The head of BERT over the vocabulary: a dense layer, GELU, a norm, and a matrix of its own with a bias."""
    body = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    x = F.gelu(linear(weights, "cls.predictions.transform.dense", alibi_states(body, tokens, segments)))
    return linear(weights, "cls.predictions.decoder", norm(weights, "cls.predictions.transform.LayerNorm", x))


# NeoBERT


def neobert_shapes(count: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"encoder.weight": (count, WIDTH), "layer_norm.weight": (WIDTH,)}
    for layer in range(DEPTH):
        at = f"transformer_encoder.{layer}"
        shapes |= {
            f"{at}.qkv.weight": (3 * WIDTH, WIDTH),
            f"{at}.wo.weight": (WIDTH, WIDTH),
            f"{at}.ffn.w12.weight": (2 * INNER, WIDTH),
            f"{at}.ffn.w3.weight": (WIDTH, INNER),
            f"{at}.attention_norm.weight": (WIDTH,),
            f"{at}.ffn_norm.weight": (WIDTH,),
        }
    return shapes


def turned(x: Tensor) -> Tensor:
    """[T, H, D] rotated in pairs of neighbours, as complex numbers."""
    half = x.size(-1) // 2
    angles = torch.outer(torch.arange(len(x)).float(), 10_000.0 ** -(torch.arange(half) / half))
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(rotated).flatten(-2)


def neobert_states(weights: Weights, tokens: list[int], segments: list[int]) -> Tensor:
    """Pre-norm; each head has its query, key and value side by side; a gated MLP."""

    def rms(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), weights[f"{name}.weight"], EPS)

    x = weights["encoder.weight"][tokens]
    for layer in range(DEPTH):
        at = f"transformer_encoder.{layer}"
        query, key, value = by_heads(linear(weights, f"{at}.qkv", rms(f"{at}.attention_norm", x))).chunk(3, dim=-1)
        x = x + linear(weights, f"{at}.wo", mix(turned(query), turned(key), value))
        gate, up = linear(weights, f"{at}.ffn.w12", rms(f"{at}.ffn_norm", x)).chunk(2, dim=-1)
        x = x + linear(weights, f"{at}.ffn.w3", F.silu(gate) * up)
    return rms("layer_norm", x)


def neobert_scores(weights: Weights, tokens: list[int], segments: list[int]) -> Tensor:
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    first = neobert_states(body, tokens, segments)[:1]
    return linear(weights, "classifier", linear(weights, "dense", first).tanh())


def neobert_logits(weights: Weights, tokens: list[int], segments: list[int]) -> Tensor:
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    return linear(weights, "decoder", neobert_states(body, tokens, segments))


def with_prefix(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


DENSE = {
    "dense.weight": (WIDTH, WIDTH),
    "dense.bias": (WIDTH,),
    "classifier.weight": (3, WIDTH),
    "classifier.bias": (3,),
}
PREDICTIONS = {
    "cls.predictions.transform.dense.weight": (WIDTH, WIDTH),
    "cls.predictions.transform.dense.bias": (WIDTH,),
    "cls.predictions.transform.LayerNorm.weight": (WIDTH,),
    "cls.predictions.transform.LayerNorm.bias": (WIDTH,),
    "cls.predictions.decoder.weight": (COUNT, WIDTH),
    "cls.predictions.decoder.bias": (COUNT,),
}
NEOBERT = {**COMMON, "model_type": "neobert", "intermediate_size": 3 * INNER // 2, "norm_eps": EPS, "max_length": 256}
JINA = {
    **COMMON,
    "model_type": "bert",
    "architectures": ["JinaBertModel"],
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "auto_map": {"AutoConfig": "a--b.JinaBertConfig", "AutoModel": "jinaai/jina-bert-implementation--b.JinaBertModel"},
}
OWN_FORMULAS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], Oracle]] = {
    "jina": (JINA, alibi_shapes(COUNT), alibi_states),
    "jina-masks": (
        {**JINA, "architectures": ["JinaBertForMaskedLM"], "tie_word_embeddings": False},
        {**with_prefix(alibi_shapes(COUNT), "bert"), **PREDICTIONS},
        alibi_logits,
    ),
    "neobert": (
        {**NEOBERT, "architectures": ["NeoBERT"], "auto_map": {"AutoModel": "model.NeoBERT"}},
        neobert_shapes(COUNT),
        neobert_states,
    ),
    "neobert-classifier": (
        {**NEOBERT, "architectures": ["NeoBERTForSequenceClassification"]},
        {**with_prefix(neobert_shapes(COUNT), "model"), **DENSE},
        neobert_scores,
    ),
    "neobert-masks": (
        {**NEOBERT, "architectures": ["NeoBERTLMHead"], "auto_map": {"AutoModelForMaskedLM": "model.NeoBERTLMHead"}},
        {
            **with_prefix(neobert_shapes(COUNT), "model"),
            "decoder.weight": (COUNT, WIDTH),
            "decoder.bias": (COUNT,),
        },
        neobert_logits,
    ),
}


@pytest.mark.parametrize("name", OWN_FORMULAS)
@torch.inference_mode()
def test_it_equals_the_formulas_of_the_published_code(name: str, tmp_path: Path) -> None:
    config, shapes, oracle = OWN_FORMULAS[name]
    weights = random_weights(shapes)
    loaded = load(str(write_folder(tmp_path, config, weights)))
    encodings = loaded.tokenizer.encode_batch(TEXTS)
    expected = [oracle(weights, list(each.ids), list(each.segments)) for each in encodings]
    if loaded.task == "embed":
        expected = [states.mean(0, keepdim=True) for states in expected]
    found = head_output(loaded, TorchExecutor(loaded.network))
    assert float((found - torch.cat(expected)).abs().max()) < CLOSE


@torch.inference_mode()
def test_a_published_folder_of_jina_is_an_embedder(tmp_path: Path) -> None:
    """Its configuration names the class for masks, its files hold the body and modules.json the pooling."""
    weights = random_weights(alibi_shapes(COUNT))
    folder = write_folder(tmp_path, {**JINA, "architectures": ["JinaBertForMaskedLM"]}, weights)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    checkpoints.write_json(folder / "modules.json", modules)
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    checkpoints.write_json(folder / "1_Pooling" / "config.json", pooling)
    loaded = load(str(folder))
    assert loaded.task == "embed"
    encodings = loaded.tokenizer.encode_batch(TEXTS)
    expected = [alibi_states(weights, list(e.ids), list(e.segments)).mean(0, keepdim=True) for e in encodings]
    assert float((head_output(loaded, TorchExecutor(loaded.network)) - torch.cat(expected)).abs().max()) < CLOSE


# Names and fields of published code, for networks that transformers has

ATTENTION = ("q_proj", "k_proj", "v_proj")


def publish_nomic(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As nomic-embed-text is published."""
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    names |= {"intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon"}
    fields = {theirs: config.pop(ours) for ours, theirs in names.items()}
    fields |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "prenorm": False}
    fields |= {"n_positions": config.pop("max_position_embeddings"), "architectures": ["NomicBertModel"]}
    config.pop("rope_parameters"), config.pop("hidden_act")
    mapped = {"AutoModel": "nomic-ai/nomic-bert-2048--m.NomicBertModel", "AutoConfig": "c.NomicBertConfig"}
    renames = {
        "embeddings.LayerNorm": "emb_ln",
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
    }
    fused = fuse(weights, "self_attn", ATTENTION, "attn.Wqkv")
    return {**config, **fields, "auto_map": mapped}, rename(fused, {**renames, "layers.": "encoder.layers."})


def publish_gte(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As gte-multilingual is published, with its scaled rotary frequencies."""
    rope = config.pop("rope_parameters")
    factor, width = 8.0, config["hidden_size"] // config["num_attention_heads"]
    assert rope["factor"] == pytest.approx(factor ** (2 / width))
    fields = {
        "model_type": "new",
        "architectures": ["NewForSequenceClassification"],
        "position_embedding_type": "rope",
        "rope_theta": rope["rope_theta"] / factor,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "auto_map": {
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
            "AutoModelForMultipleChoice": "Alibaba-NLP/new-impl--modeling.NewForMultipleChoice",
        },
    }
    renames = {
        "gte.layers.": "new.encoder.layer.",
        "gte.": "new.",
        "self_attn.o_proj": "attention.o_proj",
        "post_attention_layernorm": "attn_ln",
        "post_mlp_layernorm": "mlp_ln",
    }
    fused = fuse(weights, "self_attn", ATTENTION, "attention.qkv_proj")
    return {**config, **fields}, rename(fuse(fused, "mlp", ("up_proj", "gate_proj"), "mlp.up_gate_proj"), renames)


def publish_jina(config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As jina-embeddings-v3 is published, with adapters for tasks beside each weight."""
    base = config.pop("rope_parameters")["rope_theta"]
    fields = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "position_embedding_type": "rotary",
        "rotary_emb_base": base,
        "use_flash_attn": True,
        "auto_map": {
            "AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA",
            "AutoModelForMaskedLM": "jinaai/xlm-roberta-flash-implementation--modeling.XLMRobertaForMaskedLM",
            "AutoModelForPreTraining": "jinaai/xlm-roberta-flash-implementation--m.XLMRobertaPreTrainedModel",
        },
    }
    renames = {
        "embeddings.LayerNorm": "emb_ln",
        "layers.": "encoder.layers.",
        "self_attn.o_proj": "mixer.out_proj",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
    }
    named = rename(fuse(weights, "self_attn", ATTENTION, "mixer.Wqkv"), renames)
    out: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if tensor.dim() < 2:
            out[f"roberta.{name}"] = tensor
            continue
        at = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        out |= {f"{at}.original": tensor, f"{at}.0.lora_A": torch.ones(5, 4, 2), f"{at}.0.lora_B": torch.ones(5, 2, 4)}
    return {**config, **fields}, out


def fuse(weights: Mapping[str, Tensor], owner: str, parts: tuple[str, ...], name: str) -> dict[str, Tensor]:
    """The matrices of `parts` as one, under another name."""
    out = dict(weights)
    for key in weights:
        if f".{owner}.{parts[0]}." in key:
            pieces = [out.pop(key.replace(parts[0], part)) for part in parts]
            out[key.replace(f"{owner}.{parts[0]}", name)] = torch.cat(pieces)
    return out


def rename(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    out = {}
    for key, tensor in weights.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs, 1)
        out[key] = tensor
    return out


SCALED = {"rope_type": "linear", "factor": 8.0 ** (2 / 8), "rope_theta": 160_000.0}
PUBLISHED: dict[str, tuple[Row, Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]]] = {
    "nomic": (Row(tf.NomicBertConfig, tf.NomicBertModel, BERT), publish_nomic),
    "gte": (
        Row(tf.GteConfig, tf.GteForSequenceClassification, dict(BERT, type_vocab_size=2, rope_parameters=SCALED)),
        publish_gte,
    ),
    "jina-v3": (
        Row(tf.JinaEmbeddingsV3Config, tf.JinaEmbeddingsV3Model, dict(BERT, type_vocab_size=2)),
        publish_jina,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_give_what_transformers_gives(name: str, tmp_path: Path) -> None:
    row, publish = PUBLISHED[name]
    own = save_checkpoint(row, tmp_path / "own")
    theirs = row.kind.from_pretrained(own, attn_implementation="eager").eval()
    config, weights = publish(theirs.config.to_dict(), {key: each.clone() for key, each in theirs.state_dict().items()})
    loaded = load(str(write_folder(tmp_path / "published", config, weights)))
    found = head_output(loaded, TorchExecutor(loaded.network))
    assert float((found - reference_output(loaded, theirs)).abs().max()) < CLOSE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModel": "other.MyBertModel"}}, "auto_map asks to run code"),
        (
            {"auto_map": {"AutoModel": "b.JinaBertModel", "AutoModelForCausalLM": "b.Other"}},
            "auto_map asks to run code",
        ),
        ({"auto_map": {}}, "auto_map asks to run code"),
        ({"auto_map": ["b.JinaBertModel"]}, "auto_map asks to run code"),
        ({"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--b.JinaBertModel"}}, "qk-post-norm"),
        ({"feed_forward_type": "original"}, "feed_forward_type is 'original'"),
    ],
)
def test_other_code_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    weights = random_weights(alibi_shapes(COUNT))
    folder = write_folder(tmp_path, {**JINA, **changes}, weights)
    with pytest.raises(UnsupportedError, match=words):
        load(str(folder))
