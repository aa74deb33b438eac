"""Writes networks trained here as transformers folders: config.json, and weights under transformers' names.

A table for each family's body and each of its heads maps our names to theirs; "{n}" is the number of a block.
Transposed and fused matrices are listed beside them. models.architectures has the reverse mapping, and tests compare
the two.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from polyhead.models.network.encoder_decoder import EncoderDecoder
from polyhead.models.network.model_config import EncoderDecoderConfig, ModelConfig
from polyhead.models.network.transformer import Transformer

GPT_NAMES = {
    "tokens": "transformer.wte",
    "position.table": "transformer.wpe",
    "blocks.{n}.attention_norm": "transformer.h.{n}.ln_1",
    "blocks.{n}.attention.output": "transformer.h.{n}.attn.c_proj",
    "blocks.{n}.mlp_norm": "transformer.h.{n}.ln_2",
    "blocks.{n}.mlp.up": "transformer.h.{n}.mlp.c_fc",
    "blocks.{n}.mlp.down": "transformer.h.{n}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
}
GPT_TRANSPOSED = ("c_proj.weight", "c_fc.weight", "c_attn.weight")
BERT_NAMES = {
    "tokens": "bert.embeddings.word_embeddings",
    "position.table": "bert.embeddings.position_embeddings",
    "segments": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "blocks.{n}.attention.query": "bert.encoder.layer.{n}.attention.self.query",
    "blocks.{n}.attention.key": "bert.encoder.layer.{n}.attention.self.key",
    "blocks.{n}.attention.value": "bert.encoder.layer.{n}.attention.self.value",
    "blocks.{n}.attention.output": "bert.encoder.layer.{n}.attention.output.dense",
    "blocks.{n}.attention_norm": "bert.encoder.layer.{n}.attention.output.LayerNorm",
    "blocks.{n}.mlp.up": "bert.encoder.layer.{n}.intermediate.dense",
    "blocks.{n}.mlp.down": "bert.encoder.layer.{n}.output.dense",
    "blocks.{n}.mlp_norm": "bert.encoder.layer.{n}.output.LayerNorm",
}
BERT_MASK_HEAD = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "output": "cls.predictions",
}
BERT_NEXT_HEAD = {"dense": "bert.pooler.dense", "out": "cls.seq_relationship"}
BERT_HEADS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "BertModel": (),
    "BertForPreTraining": (BERT_MASK_HEAD, BERT_NEXT_HEAD),
    "BertForSequenceClassification": ({"dense": "bert.pooler.dense", "out": "classifier"},),
    "BertForTokenClassification": ({"out": "classifier"},),
    "BertForQuestionAnswering": ({"out": "qa_outputs"},),
}
GPT_HEADS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "GPT2LMHeadModel": ({},),  # its matrix is that of the tokens
    "GPT2ForSequenceClassification": ({"out": "score"},),
}

TRANSLATOR_NAMES = {
    "blocks.{n}.attention.query": "layers.{n}.self_attn.q_proj",
    "blocks.{n}.attention.key": "layers.{n}.self_attn.k_proj",
    "blocks.{n}.attention.value": "layers.{n}.self_attn.v_proj",
    "blocks.{n}.attention.output": "layers.{n}.self_attn.out_proj",
    "blocks.{n}.attention_norm": "layers.{n}.self_attn_layer_norm",
    "blocks.{n}.cross.query": "layers.{n}.encoder_attn.q_proj",
    "blocks.{n}.cross.key": "layers.{n}.encoder_attn.k_proj",
    "blocks.{n}.cross.value": "layers.{n}.encoder_attn.v_proj",
    "blocks.{n}.cross.output": "layers.{n}.encoder_attn.out_proj",
    "blocks.{n}.cross_norm": "layers.{n}.encoder_attn_layer_norm",
    "blocks.{n}.mlp.up": "layers.{n}.fc1",
    "blocks.{n}.mlp.down": "layers.{n}.fc2",
    "blocks.{n}.mlp_norm": "layers.{n}.final_layer_norm",
    "final_norm": "layer_norm",
}
TRANSLATOR_KINDS = {"post": ("marian", "MarianMTModel"), "pre": ("pegasus", "PegasusForConditionalGeneration")}


def renamed_tensors(module: nn.Module, names: Mapping[str, str], depth: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the modules in a table, under transformers' names."""
    tensors = module.state_dict()
    for own_name, name in names.items():
        for n in range(depth if "{n}" in own_name else 1):
            for kind in ("weight", "bias"):
                if (key := f"{own_name.format(n=n)}.{kind}") in tensors:
                    yield f"{name.format(n=n)}.{kind}", tensors[key]


def gpt_body(network: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Return a GPT-2 body: query, key and value fused, matrices transposed."""
    tensors = dict(renamed_tensors(network, GPT_NAMES, config.depth))
    state = network.state_dict()
    for n in range(config.depth):
        for kind in ("weight", "bias"):
            parts = [state[f"blocks.{n}.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            tensors[f"transformer.h.{n}.attn.c_attn.{kind}"] = torch.cat(parts)
    return {name: each.t() if name.endswith(GPT_TRANSPOSED) else each for name, each in tensors.items()}


def gpt_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_positions,
        "n_embd": config.width,
        "n_layer": config.depth,
        "n_head": config.heads,
        "n_inner": config.mlp_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
    }


def bert_body(network: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    return dict(renamed_tensors(network, BERT_NAMES, config.depth))


def bert_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.segments,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class FamilyFormat:
    """How a family's folder is written: the tensors of its body, the module names of each head, and its config.json."""

    body_tensors: Callable[[nn.Module, ModelConfig], dict[str, Tensor]]
    head_names: Mapping[str, tuple[Mapping[str, str], ...]]
    describe_config: Callable[[ModelConfig], dict[str, Any]]


FAMILY_FORMATS: Mapping[str, FamilyFormat] = {
    "bert": FamilyFormat(bert_body, BERT_HEADS, bert_config),
    "gpt2": FamilyFormat(gpt_body, GPT_HEADS, gpt_config),
}


def write_network(
    form: FamilyFormat, architecture: str, modules: Sequence[nn.Module], folder: Path, config_fields: Mapping[str, Any]
) -> None:
    """Write a Transformer and the modules of its head for transformers' class `architecture`.  `config_fields` is
    added to config.json.
    """
    network, *heads = modules
    assert isinstance(network, Transformer)
    tensors = form.body_tensors(network, network.config)
    for head, names in zip(heads, form.head_names[architecture], strict=True):
        tensors |= dict(renamed_tensors(head, names))
    tensors.pop("cls.predictions.weight", None)  # tied to the token embeddings
    write_folder(folder, tensors, {**config_fields, "architectures": [architecture]})


def write_translator(network: EncoderDecoder, config: EncoderDecoderConfig, ids: tuple[int, int], folder: Path) -> None:
    """Write a translation Transformer as transformers' MarianMTModel, or a pre-norm one as
    PegasusForConditionalGeneration.

    `ids` are those of padding and end.
    """
    shape, (pad, end) = config.encoder, ids
    tensors = {"model.shared.weight": network.encoder.tokens.weight}
    for side, half in (("encoder", network.encoder), ("decoder", network.decoder)):
        tensors |= {f"model.{side}.{name}": each for name, each in renamed_tensors(half, TRANSLATOR_NAMES, shape.depth)}
    tensors["final_logits_bias"] = torch.zeros(1, shape.vocab_size)
    kind, architecture = TRANSLATOR_KINDS[shape.norm_order]
    sides = {"layers": shape.depth, "attention_heads": shape.heads, "ffn_dim": shape.mlp_width}
    special = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": config.start}
    described = {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": shape.vocab_size,
        "d_model": shape.width,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()},
        "max_position_embeddings": shape.max_positions,
        "activation_function": shape.activation,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "forced_eos_token_id": None,
        "tie_word_embeddings": True,
        **special,
    }
    folder.mkdir(parents=True, exist_ok=True)
    writing = {**special, "max_length": shape.max_positions, "bad_words_ids": [[pad]]}
    (folder / "generation_config.json").write_text(json.dumps(writing, indent=2) + "\n")
    write_folder(folder, tensors, described)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write weights and config.json.  The latter comes last: without it the folder is no checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: each.detach().to("cpu", torch.float32).contiguous().clone() for name, each in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(stored, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps({**described, "dtype": "float32"}, indent=2) + "\n")
