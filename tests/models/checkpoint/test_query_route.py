"""Folders whose Router leads queries and documents to modules of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.checkpoint.sentence_modules import choose_route
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, retrieval_models
from tests.support.edits import edited

WIDTH, OUTPUTS = 32, 8
IDENTITY = "torch.nn.modules.linear.Identity"


def write_dense(folder: Path, seed: int, outputs: int = OUTPUTS) -> torch.Tensor:
    """A Dense module without a bias; its matrix."""
    matrix = torch.randn(outputs, WIDTH, generator=torch.Generator().manual_seed(seed))
    config = {"in_features": WIDTH, "out_features": outputs, "bias": False, "activation_function": IDENTITY}
    checkpoints.write_json(folder / "config.json", config)
    save_file({"linear.weight": matrix}, folder / "model.safetensors")
    return matrix


def with_router(folder: Path, router: dict[str, Any], file: str = "router_config.json", kind: str = "Router") -> Path:
    """Add a Router at the end of an embedder's modules."""
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] = {"idx": 2, "name": "2", "path": "2_Router", "type": f"sentence_transformers.models.{kind}"}
    checkpoints.write_json(folder / "modules.json", modules)
    checkpoints.write_json(folder / "2_Router" / file, router)
    return folder


@torch.inference_mode()
@pytest.mark.parametrize(("file", "kind"), [("router_config.json", "Router"), ("config.json", "Asym")])
def test_layers_of_queries_and_of_documents(tmp_path: Path, file: str, kind: str) -> None:
    router = {
        "types": {"q": "a.Dense", "d": "a.Dense", "n": "a.Normalize"},
        "structure": {"query": ["q", "n"], "doc": ["d"]},
        "parameters": {"allow_empty_key": True},
    }
    folder = with_router(checkpoints.embedder(tmp_path / "e"), router, file, kind)
    query, document = (write_dense(folder / "2_Router" / name, seed) for seed, name in enumerate("qd"))
    loaded = load(str(folder))
    assert (loaded.task, loaded.width, loaded.has_queries) == ("embed", OUTPUTS, True)
    states = loaded.network(RaggedBatch.of([loaded.tokenizer.encode("the quick fox").ids]))
    head: Any = loaded.head
    found = [each.postprocess(each(states, [0, len(states)]))[0] for each in (head, head.query_vector)]
    torch.testing.assert_close(found[0], document @ states.mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], F.normalize(query @ states.mean(0), dim=-1), rtol=0, atol=1e-5)


def test_a_router_with_the_same_modules_for_all(tmp_path: Path) -> None:
    router = {"types": {"d": "a.Dense"}, "structure": {"text": ["d"]}, "parameters": {}}
    folder = with_router(checkpoints.embedder(tmp_path / "e"), router)
    write_dense(folder / "2_Router" / "d", 0)
    loaded = load(str(folder))
    assert (loaded.width, loaded.has_queries) == (OUTPUTS, False)


@pytest.mark.parametrize(
    ("settings", "routes", "expected"),
    [
        ({"default_route": "b"}, ("a", "b"), "b"),
        ({}, ("a", "b"), "a"),
        ({}, ("a", "query"), "query"),
        ({}, ("a", "text"), "text"),
        ({"route_mappings": {"('query', 'text')": "b", "(None, None)": "c"}}, ("a", "b", "c", "query"), "b"),
        ({"route_mappings": {"(None, 'text')": "c"}}, ("a", "c", "query"), "c"),
        ({"route_mappings": {"('document', None)": "c"}}, ("a", "c", "query"), "query"),
    ],
)
def test_routes_are_chosen_as_sentence_transformers_does(
    settings: dict[str, Any], routes: tuple[str, ...], expected: str
) -> None:
    assert choose_route(Path("r"), settings, dict.fromkeys(routes), ("query",)) == expected


ONE = {"types": {"d": "a.Dense"}, "structure": {"query": [], "document": ["d"]}}


@pytest.mark.parametrize(
    ("router", "problem"),
    [
        ({**ONE, "structure": [1]}, r"structure is \[1\], which should be an object"),
        ({**ONE, "structure": {"query": "d"}}, "structure should hold lists of names of modules"),
        ({**ONE, "structure": {"query": ["x"], "document": ["d"]}}, "module None is not known"),
        ({**ONE, "parameters": {"route_mappings": {"(None, None)": 7}}}, "route 7 is not in structure"),
        ({"types": {"../d": "a.Dense"}, "structure": {"query": ["../d"]}}, "'../d' is no folder inside this one"),
        ({"types": {"d": "a.Router"}, "structure": {"query": ["d"]}}, "Router' is not known in this place"),
        ({**ONE, "structure": {"query": ["d"] * 100}}, "has more than 64 modules"),
        (ONE, "vectors of queries have 32 numbers, those of documents 8; known are equal ones"),
        (
            {"types": {"d": "a.Dense", "t": "a.Transformer"}, "structure": {"query": ["t"], "document": ["d"]}},
            "Transformer' is not known in this place",
        ),
    ],
)
def test_routers_that_are_refused(tmp_path: Path, router: dict[str, Any], problem: str) -> None:
    folder = with_router(checkpoints.embedder(tmp_path / "e"), router)
    write_dense(folder / "2_Router" / "d", 0)
    with pytest.raises(CheckpointError, match=problem):
        load(str(folder))


def test_a_network_of_its_own_for_queries(tmp_path: Path) -> None:
    folder = retrieval_models.asymmetric(tmp_path / "a")
    described = describe_source(str(folder))
    assert described.queries is not None
    assert (described.config.width, described.queries.config.width) == (16, 8)
    assert described.vector_width == described.queries.vector_width == 16
    assert described.queries.queries is None
    assert described.queries.default_precision.precision == "float32"
    loaded = load(str(folder))
    assert (loaded.has_queries, loaded.max_tokens, loaded.query_tokens) == (True, 64, 64)


@pytest.mark.parametrize(
    ("file", "changes", "problem"),
    [
        (
            "query_2_Dense/config.json",
            {"out_features": 5},
            "vectors of queries: 5 numbers, of documents: 16; known are",
        ),
        (
            "query_0_Transformer/config.json",
            {"vocab_size": 27},
            "network of queries: 27 tokens, of documents: 26; known",
        ),
        ("query_1_Pooling/config.json", {"include_prompt": False}, "include_prompt: false for one of queries and"),
        (
            "query_0_Transformer/tokenizer.json",
            {"normalizer": None},
            "tokenizers of queries and of documents have diff",
        ),
        ("query_0_Transformer/config.json", {"model_type": "mine"}, "model_type 'mine' is not known here"),
    ],
)
def test_networks_for_queries_that_are_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], problem: str
) -> None:
    folder = retrieval_models.asymmetric(tmp_path / "a")
    with pytest.raises(UnsupportedError, match=problem):
        describe_source(str(edited(folder, folder, file, **changes)))


def test_further_outputs_of_documents_alone_are_refused(tmp_path: Path) -> None:
    folder = retrieval_models.asymmetric(tmp_path / "a")
    layer = {"weight": torch.ones(1, 16), "bias": torch.ones(1)}
    save_file(layer, folder / "sparse_linear.safetensors")
    with pytest.raises(UnsupportedError, match=r"further outputs \(words\) of a network that reads documents only"):
        describe_source(str(folder))


def test_what_queries_alone_may_not_be_read_by(tmp_path: Path) -> None:
    folder = retrieval_models.routed_splade(tmp_path / "s")
    router = json.loads((folder / "router_config.json").read_text())
    router["types"]["query_0_SparseStaticEmbedding"] = "a.Transformer"
    checkpoints.write_json(folder / "router_config.json", router)
    with pytest.raises(UnsupportedError, match="leads queries to 'Transformer'; known are layers after the same"):
        load(str(folder))


def test_tables_of_queries_that_are_refused(tmp_path: Path) -> None:
    folder = retrieval_models.routed_splade(tmp_path / "s")
    query = folder / "query_0_SparseStaticEmbedding"
    save_file({"weight": torch.ones(9)}, query / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"should have the one tensor weight, of 26 numbers, one a token"):
        load(str(folder))
    save_file({"weight": torch.ones(26)}, query / "model.safetensors")
    assert load(str(folder)).has_queries
    checkpoints.word_piece().save_pretrained(query)
    with pytest.raises(UnsupportedError, match="its tokenizers of queries and of documents have different tokens"):
        load(str(folder))


def listed_table(folder: Path, name: str = "idf.json") -> dict[str, float]:
    """A folder whose queries have the weights of a JSON file; what is written there."""
    retrieval_models.routed_splade(folder)
    query = folder / "query_0_SparseStaticEmbedding"
    (query / "model.safetensors").unlink()
    checkpoints.write_json(query / "config.json", {"frozen": True, "path": f"someone/a-model/{name}"})
    weights = {"fox": 1.5, "the": 0.25, "paris": 3, "not a word": 0.125}
    checkpoints.write_json(query / name, weights)
    return weights


@pytest.mark.parametrize("place", ["module", "root", "no modules"])
def test_weights_of_queries_out_of_a_json_file(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "folder"
    weights = listed_table(folder)
    if place == "root":
        (folder / "query_0_SparseStaticEmbedding" / "idf.json").rename(folder / "idf.json")
    if place == "no modules":
        folder = tmp_path / "plain"
        retrieval_models.save_masked(folder)
        checkpoints.write_json(folder / "idf.json", weights)
    loaded = load(str(folder))
    head: Any = loaded.head
    expected = torch.zeros(loaded.config.vocab_size)
    for name, weight in weights.items():
        token = loaded.tokenizer.token_id(name)
        expected[loaded.tokenizer.unk_id if token is None else token] = weight
    assert loaded.has_queries
    assert torch.equal(head.query_words.weight, expected)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"fox": "1"}, "the weight of 'fox' is '1', which should be a number"),
        ({"fox": True}, "'fox' is True, which"),
        ({"fox": -1e39}, "'fox' is -1e\\+39, which"),
    ],
)
def test_weights_that_are_no_numbers(tmp_path: Path, weights: dict[str, Any], problem: str) -> None:
    listed_table(tmp_path / "folder")
    checkpoints.write_json(tmp_path / "folder" / "query_0_SparseStaticEmbedding" / "idf.json", weights)
    with pytest.raises(CheckpointError, match=problem):
        load(str(tmp_path / "folder"))


def test_weights_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    listed_table(tmp_path / "folder")
    (tmp_path / "folder" / "query_0_SparseStaticEmbedding" / "idf.json").unlink()
    with pytest.raises(CheckpointError, match=r"path is 'someone/a-model/idf\.json', and idf\.json is neither in this"):
        load(str(tmp_path / "folder"))
