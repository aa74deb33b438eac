"""What tests share: tiny checkpoints, made once a session, read-only by agreement (copy a folder to break it)."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny networks gain nothing from threads, and lose much on shared cores

import checkpoints
import pytest


@pytest.fixture(scope="session")
def tiny_generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama-like generator with a chat template."""
    return checkpoints.generator(tmp_path_factory.mktemp("generator"))


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT classifier with the labels `checkpoints.LABELS`."""
    return checkpoints.classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def tiny_ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT cross-encoder with one output."""
    return checkpoints.ranker(tmp_path_factory.mktemp("ranker"))


@pytest.fixture(scope="session")
def tiny_embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT with sentence-transformers' modules.json (mean pooling, normalised)."""
    return checkpoints.embedder(tmp_path_factory.mktemp("embedder"))
