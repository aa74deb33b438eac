"""Tiny models of retrieval in the folders that sentence-transformers, model2vec and FlagEmbedding save.

Weights are drawn by numpy, whose numbers stay the same, because `retrieval_answers.json` has the answers of those
packages for the folders of VARIANTS (FlagEmbedding 1.4, sentence-transformers 6.2, model2vec 0.10): see ANSWERS.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests.support.checkpoints import write_json
from tests.support.places import ROOT

ANSWERS = ROOT / "tests" / "contracts" / "retrieval_answers.json"
WIDTH, TOKEN_WIDTH, STATIC_WIDTH = 16, 12, 8
WORDS = "the a fox dog runs over jumps film good bad new paris capital of france is what lazy quick brown"
TEXTS = ("the quick fox jumps over the lazy dog", "what is the capital of France?", "paris")


def draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 0.3, shape).astype(np.float32))


def draw_network(network: torch.nn.Module, seed: int) -> None:
    """Give all parameters random numbers, and norms weights around one."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(draw(rng, *parameter.shape) + (1.0 if name.endswith("Norm.weight") else 0.0))


def word_tokenizer(*, roberta: bool) -> PreTrainedTokenizerFast:
    """A token for each word, with the special tokens of BERT or of XLM-R around a text."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if roberta else ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    vocabulary = {piece: id for id, piece in enumerate([*special, *WORDS.split(), "?"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special[3]))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    first, last = special[0], special[2]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=[(first, 0), (last, 2)]
    )
    roles = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    if roberta:
        roles |= {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **roles)


def sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    found = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**found, "intermediate_size": 24, "pad_token_id": 1}


def m3(folder: Path) -> Path:
    """FlagEmbedding's M3: an XLM-R whose first state is the vector, with two further layers."""
    tokenizer = word_tokenizer(roberta=True)
    network = XLMRobertaModel(XLMRobertaConfig(**sizes(tokenizer), max_position_embeddings=66), add_pooling_layer=False)
    draw_network(network, 1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_modules(folder, modules)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    rng = np.random.default_rng(2)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", TOKEN_WIDTH)):
        layer = {"weight": draw(rng, rows, WIDTH), "bias": draw(rng, rows)}
        save_file(layer, folder / f"{name}.safetensors")
    return folder


def write_modules(folder: Path, modules: list[tuple[str, str]], package: str = "models") -> None:
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{package}.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def static_tensors(*, seed: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"embeddings": draw(np.random.default_rng(seed), tokens, STATIC_WIDTH)}


def model2vec(folder: Path) -> Path:
    """A folder as model2vec saves it; it skips unknown words."""
    folder.mkdir(parents=True)
    tokenizer = word_tokenizer(roberta=False)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    save_file(static_tensors(seed=3, tokens=len(tokenizer)), folder / "model.safetensors")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True, "max_length": 512}
    write_json(folder / "config.json", config)
    write_modules(folder, [(".", "StaticEmbedding"), ("1_Normalize", "Normalize")])
    return folder


def shared_rows(folder: Path) -> Path:
    """A folder of model2vec with few rows that tokens share, a weight for each token, and no modules."""
    model2vec(folder)
    (folder / "modules.json").unlink()
    tokens, rng = len(word_tokenizer(roberta=False)), np.random.default_rng(4)
    tensors = static_tensors(seed=5, tokens=7)
    tensors["mapping"] = torch.from_numpy(rng.integers(0, 7, tokens))
    tensors["weights"] = torch.from_numpy(rng.uniform(0.5, 2, tokens))
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"]})
    return folder


def static(folder: Path) -> Path:
    """A folder with sentence-transformers' StaticEmbedding, which counts unknown words, and a Dense module."""
    inner = folder / "0_StaticEmbedding"
    inner.mkdir(parents=True)
    tokenizer = word_tokenizer(roberta=False)
    tokenizer.backend_tokenizer.save(str(inner / "tokenizer.json"))
    [matrix] = static_tensors(seed=6, tokens=len(tokenizer)).values()
    save_file({"embedding.weight": matrix}, inner / "model.safetensors")
    write_modules(folder, [("0_StaticEmbedding", "StaticEmbedding"), ("1_Dense", "Dense")])
    dense = {"in_features": STATIC_WIDTH, "out_features": 6, "bias": True}
    write_json(folder / "1_Dense" / "config.json", {**dense, "activation_function": "torch.nn.modules.activation.Tanh"})
    rng = np.random.default_rng(7)
    layer = {"linear.weight": draw(rng, 6, STATIC_WIDTH), "linear.bias": draw(rng, 6)}
    save_file(layer, folder / "1_Dense" / "model.safetensors")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "what is "}})
    return folder


def splade(folder: Path) -> Path:
    """A BERT whose words' logits become weights of words (SPLADE), as sentence-transformers saves it."""
    save_masked(folder)
    write_modules(folder, [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")], "sparse_encoder.models")
    write_json(folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": "relu"})
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return folder


def save_masked(folder: Path) -> None:
    tokenizer = word_tokenizer(roberta=False)
    network = BertForMaskedLM(BertConfig(**sizes(tokenizer), max_position_embeddings=64, type_vocab_size=1))
    draw_network(network, 8)
    network.tie_weights()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def routed_splade(folder: Path) -> Path:
    """Documents are read by SPLADE, queries by a table of weights, as sentence-transformers' Router saves them."""
    save_masked(folder / "document_0_MLMTransformer")
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu"}
    write_json(folder / "document_1_SpladePooling" / "config.json", pooling)
    query = folder / "query_0_SparseStaticEmbedding"
    query.mkdir()
    tokenizer = word_tokenizer(roberta=False)
    tokenizer.save_pretrained(query)
    write_json(query / "config.json", {"frozen": False})
    save_file({"weight": draw(np.random.default_rng(9), len(tokenizer)).abs()}, query / "model.safetensors")
    names = ("query_0_SparseStaticEmbedding", "document_0_MLMTransformer", "document_1_SpladePooling")
    router = {
        "types": {name: f"sentence_transformers.sparse_encoder.models.{name.rpartition('_')[2]}" for name in names},
        "structure": {"query": [names[0]], "document": list(names[1:])},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / "router_config.json", router)
    write_modules(folder, [("", "Router")])
    write_json(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    return folder


def asymmetric(folder: Path) -> Path:
    """Documents are read by one network, queries by a smaller one, whose vectors a Dense module makes as wide."""
    tokenizer = word_tokenizer(roberta=False)
    settings = {"query": {"hidden_size": 8, "num_hidden_layers": 1, "hidden_act": "relu"}, "document": {}}
    for seed, (role, own) in enumerate(settings.items()):
        network = BertModel(BertConfig(**{**sizes(tokenizer), **own}, max_position_embeddings=64))
        draw_network(network, 11 + seed)
        network.save_pretrained(folder / f"{role}_0_Transformer")
        tokenizer.save_pretrained(folder / f"{role}_0_Transformer")
        write_json(folder / f"{role}_0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 64})
    pooling = {"embedding_dimension": 8, "pooling_mode": "cls"}
    write_json(folder / "query_1_Pooling" / "config.json", pooling)
    write_json(folder / "document_1_Pooling" / "config.json", {"embedding_dimension": WIDTH, "pooling_mode": "mean"})
    dense = {"in_features": 8, "out_features": WIDTH, "bias": True}
    write_json(
        folder / "query_2_Dense" / "config.json", {**dense, "activation_function": "torch.nn.modules.activation.Tanh"}
    )
    rng = np.random.default_rng(13)
    layer = {"linear.weight": draw(rng, WIDTH, 8), "linear.bias": draw(rng, WIDTH)}
    save_file(layer, folder / "query_2_Dense" / "model.safetensors")
    write_json(folder / "document_2_Normalize" / "config.json", {})
    structure = {
        "query": ["query_0_Transformer", "query_1_Pooling", "query_2_Dense"],
        "document": ["document_0_Transformer", "document_1_Pooling", "document_2_Normalize"],
    }
    names = [name for route in structure.values() for name in route]
    types = {name: f"sentence_transformers.models.{name.rpartition('_')[2]}" for name in names}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write_json(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    write_modules(folder, [("", "Router")])
    return folder


VARIANTS: Mapping[str, Callable[[Path], Path]] = {
    "m3": m3,
    "model2vec": model2vec,
    "shared-rows": shared_rows,
    "static": static,
    "splade": splade,
    "routed-splade": routed_splade,
    "asymmetric": asymmetric,
}


def read_answers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ANSWERS.read_text())
    return found
