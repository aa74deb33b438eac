"""Fixtures of all tests: tiny checkpoints, made once a session.  A test that changes a checkpoint copies its folder."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny networks are slower with more threads on shared cores
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in a server: other tests share the cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # many child processes import everything: bytecode is cached

import pytest
import torch
from hypothesis import HealthCheck, settings

from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from tests.support import checked_tokenizers, checkpoints
from tests.support.audit import take_violations
from tests.support.crowd import Alone
from tests.support.edits import edited, with_tensors
from tests.support.processes import FaultServer, Process

sys.dont_write_bytecode = False
checked_tokenizers.remember()
gc.disable()  # until all tests are collected: what is imported stays, and would be examined again and again

# A slow example means that the machine is busy; it is no failure of the tested code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def no_remote_connection_and_no_unpickling() -> Iterator[None]:
    """Fails a test during which this process or a child connected to another machine or unpickled data.

    A child of a session fixture may be reported one test later.
    """
    yield
    assert not take_violations()


@pytest.fixture(autouse=True)
def thread_count_is_restored() -> Iterator[None]:
    """Sets torch's thread count back after each test, since opening a model in this process changes it."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def every_tokenizer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of this process try every tokenizer, also one that an earlier load has tried."""
    monkeypatch.setattr(TokenizerCheck, "_ask_child", checked_tokenizers.ask_child)


def pytest_collection_finish() -> None:
    """What was imported, a million objects, stays: no later collection examines it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="tests of the contract in their long form")
    parser.addoption(
        "--fuzz",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long the compiled step of each instruction set is driven with random rows under sanitizers",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long form of tests is requested (--full)."""
    return bool(request.config.getoption("--full"))


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


@pytest.fixture(scope="session")
def long_generator(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path) -> Path:
    """Folder of the same generator with a context of 16,384 tokens."""
    return edited(tiny_generator, tmp_path_factory.mktemp("long"), max_position_embeddings=16_384)


@pytest.fixture(scope="session")
def tiny_quick_start(long_generator: Path, tiny_embedder: Path, tiny_classifier: Path) -> Iterator[Process]:
    """A server of tiny networks under the names of the quick start."""
    process = Process(f"smollm2={long_generator}", f"minilm={tiny_embedder}", f"sentiment={tiny_classifier}")
    process.ready()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def start_fault_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FaultServer]]:
    """Starts servers that can inject faults, none armed. They are stopped after the session."""
    started: list[FaultServer] = []

    def start(*arguments: str) -> FaultServer:
        started.append(FaultServer(tmp_path_factory.mktemp("faults"), *arguments))
        started[-1].ready()
        return started[-1]

    yield start
    for process in started:
        process.child.kill()
        process.child.wait()


@pytest.fixture(scope="session")
def exact(
    start_fault_server: Callable[..., FaultServer],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_generator: Path,
    tiny_classifier: Path,
) -> FaultServer:
    """A deterministic server of the tiny generator and classifier, and of a copy of the generator named `fragile` with
    an untied output matrix."""
    folder = edited(tiny_generator, tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
    with_tensors(folder, folder, untie)
    models = f"chat={tiny_generator}", f"fragile={folder}", f"judge={tiny_classifier}"
    return start_fault_server(*models, "--deterministic", "true", "--cache-tokens", "8192", "--prefill-chunk", "32")


def untie(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.fixture(scope="session")
def alone() -> Alone:
    return Alone()
