"""Tiny late-interaction models: a vector for each token."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints

WIDTH, OUTPUTS = 32, 16
PYLATE = {"model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 12}
EXPANSION = {"strategy": "fixed", "attend": False, "length": 12}


def projection() -> torch.Tensor:
    return torch.randn(OUTPUTS, WIDTH, generator=torch.Generator().manual_seed(7))


def bare(source: Path, folder: Path) -> Path:
    """A copy of an embedder without its modules, and with two prefix tokens in place of rare words."""
    shutil.copytree(source, folder)
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    rare = sorted(vocabulary, key=lambda word: -vocabulary[word])[:2]
    for word, prefix in zip(rare, ("[unused0]", "[unused1]"), strict=True):
        vocabulary[prefix] = vocabulary.pop(word)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def with_dense(folder: Path, modules: list[tuple[str, str]], **config: Any) -> Path:
    """Write modules.json, with a Transformer first, and a Dense module's files."""
    listed = [{"path": path, "type": kind} for path, kind in [("", "a.Transformer"), *modules]]
    checkpoints.write_json(folder / "modules.json", listed)
    activation = "torch.nn.modules.linear.Identity"
    dense = {"in_features": WIDTH, "out_features": OUTPUTS, "bias": False, "activation_function": activation}
    checkpoints.write_json(folder / "1_Dense" / "config.json", {**dense, **config})
    save_file({"linear.weight": projection()}, folder / "1_Dense" / "model.safetensors")
    return folder


def pylate(source: Path, folder: Path, **settings: Any) -> Path:
    """A folder as PyLate saves it."""
    made = with_dense(bare(source, folder), [("1_Dense", "pylate.models.Dense.Dense")])
    checkpoints.write_json(folder / "config_sentence_transformers.json", {**PYLATE, **settings})
    return made


def multi_vector(source: Path, folder: Path, mask: Any = None, **settings: Any) -> Path:
    """A folder as sentence-transformers' MultiVectorEncoder saves it."""
    modules = [("1_Dense", "a.Dense"), ("2_Mask", "a.MultiVectorMask"), ("3_Normalize", "a.Normalize")]
    made = with_dense(bare(source, folder), modules, module_input_name="token_embeddings")
    checkpoints.write_json(folder / "2_Mask" / "config.json", mask or {"skiplist_words": ["."]})
    checkpoints.write_json(folder / "3_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    described = {"model_type": "MultiVectorEncoder", "prompts": {"query": "the ", "document": "a "}}
    checkpoints.write_json(folder / "config_sentence_transformers.json", {**described, **settings.pop("described", {})})
    checkpoints.write_json(folder / "sentence_bert_config.json", {"query_expansion": EXPANSION, **settings})
    return made


def first_colbert(source: Path, folder: Path, **metadata: Any) -> Path:
    """A folder of the first implementation: the projection is among the network's tensors."""
    made = bare(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    checkpoints.write_json(folder / "config.json", config)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": projection()}, folder / "model.safetensors", {"format": "pt"})
    if metadata:
        checkpoints.write_json(folder / "artifact.metadata", metadata)
    return made
