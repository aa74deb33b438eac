"""Late-interaction models: the folders of three programs, and the vectors of tokens that no token attends to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn import functional as F

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.errors import CheckpointError, StepInputError, UnsupportedError
from polyhead.models.core.late_interaction import LateInteraction
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.packed_network import unsupported_reason
from tests.support import late_models


def late(loaded: Checkpoint) -> LateInteraction:
    assert loaded.late is not None
    return loaded.late


def step(texts: list[list[int]], hidden: list[int] | None) -> StepInput:
    tokens = [token for text in texts for token in text]
    positions = [position for text in texts for position in range(len(text))]
    starts = [sum(map(len, texts[:n])) for n in range(len(texts) + 1)]
    return StepInput(tokens, positions, starts, [[]] * len(texts), list(range(len(tokens))), hidden=hidden)


@torch.inference_mode()
@pytest.mark.parametrize(
    "made", [late_models.pylate, late_models.multi_vector, late_models.first_colbert], ids=lambda made: made.__name__
)
def test_vectors_of_hidden_tokens_equal_transformers(
    tiny_embedder: Path, tmp_path: Path, made: Callable[[Path, Path], Path]
) -> None:
    """The reference masks the tokens that fill up a query, and computes their states all the same."""
    loaded = load(str(made(tiny_embedder, tmp_path / "late")))
    theirs = tf.BertModel.from_pretrained(tiny_embedder, attn_implementation="eager").eval()
    texts, hidden = [[2, 9, 8, 3, 4, 4, 4, 4], [2, 7, 3], [2, 5, 6, 3, 4]], [4, 0, 1]
    executor = TorchExecutor(loaded.network)
    states = executor.step(step(texts, hidden))
    found = loaded.head(states, [0, len(states)])
    row = 0
    for text, count in zip(texts, hidden, strict=True):
        mask = torch.tensor([[1] * (len(text) - count) + [0] * count])
        wanted = theirs(torch.tensor([text]), attention_mask=mask).last_hidden_state[0] @ late_models.projection().T
        torch.testing.assert_close(found[row : row + len(text)], F.normalize(wanted, dim=-1), rtol=0, atol=1e-5)
        row += len(text)
    assert (loaded.task, loaded.pooling, loaded.width) == ("embed", "tokens", late_models.OUTPUTS)
    assert "no token attends" in unsupported_reason(loaded.config)


def test_hidden_rows_are_checked(tiny_embedder: Path, tmp_path: Path) -> None:
    executor = TorchExecutor(load(str(late_models.pylate(tiny_embedder, tmp_path / "late"))).network)
    for hidden, problem in (([3], "3 of 3 rows"), ([-1], "-1 of 3 rows"), ([1, 1], "there are 2, which should be 1")):
        with pytest.raises(StepInputError, match=f"hidden: {problem}"):
            executor.step(step([[2, 5, 3]], hidden))
    plain = TorchExecutor(load(str(tiny_embedder)).network)
    with pytest.raises(StepInputError, match="hidden: this network has no rows"):
        plain.step(step([[2, 5, 3]], [1]))


def test_settings_of_pylate(tiny_embedder: Path, tmp_path: Path) -> None:
    read = load(str(late_models.pylate(tiny_embedder, tmp_path / "a", skiplist_words=[".", "no such word"])))
    token = read.tokenizer.token_id
    query, document = late(read).query, late(read).document
    assert (query.prefix, document.prefix) == (token("[unused0]"), token("[unused1]"))
    assert (query.max_tokens, query.expanded, document.max_tokens, document.expanded) == (12, 12, 180, 0)
    assert (query.skipped, document.skipped) == (frozenset(), {token(".")} - {None})
    assert (late(read).expansion_token, late(read).hides_expansion) == (read.tokenizer.mask_id, True)
    seen = late(load(str(late_models.pylate(tiny_embedder, tmp_path / "b", attend_to_expansion_tokens=True))))
    assert (seen.hides_expansion, seen.query.expanded) == (False, 12)
    short = late(load(str(late_models.pylate(tiny_embedder, tmp_path / "c", do_query_expansion=False))))
    assert (short.hides_expansion, short.query.expanded, short.expansion_token) == (False, 0, -1)
    written = late(load(str(late_models.pylate(tiny_embedder, tmp_path / "d", query_prefix="find: "))))
    assert (written.query.prompt, written.query.prefix) == ("find: ", -1), "no token of the vocabulary"


def test_settings_of_the_first_implementation(tiny_embedder: Path, tmp_path: Path) -> None:
    given = {"query_maxlen": 20, "doc_maxlen": 30, "attend_to_mask_tokens": True, "mask_punctuation": False}
    read = load(str(late_models.first_colbert(tiny_embedder, tmp_path / "a", **given)))
    query, document = late(read).query, late(read).document
    assert (query.expanded, document.max_tokens, late(read).hides_expansion) == (20, 30, False)
    assert document.skipped == frozenset()
    assert document.prefix == read.tokenizer.token_id("[unused1]")
    assert late(load(str(late_models.first_colbert(tiny_embedder, tmp_path / "b")))).query.expanded == 32


def test_settings_of_sentence_transformers(tiny_embedder: Path, tmp_path: Path) -> None:
    described = {"similarity_fn_name": "meanmaxsim"}
    mask = {"skiplist_words": ["."], "skiplist_tasks": ["query", "document"]}
    folder = late_models.multi_vector(
        tiny_embedder, tmp_path / "a", mask, described=described, document_length=30, max_seq_length=40
    )
    read = late(load(str(folder)))
    assert (read.query.prompt, read.document.prompt, read.averages) == ("the ", "a ", True)
    assert (read.query.max_tokens, read.query.expanded, read.document.max_tokens) == (12, 12, 30)
    assert read.query.skipped == read.document.skipped
    least = {"query_expansion": {"strategy": "min", "attend": True, "length": 8}, "query_length": 20}
    longer = late(load(str(late_models.multi_vector(tiny_embedder, tmp_path / "b", **least))))
    assert (longer.query.max_tokens, longer.query.expanded, longer.hides_expansion) == (20, 8, False)
    none = late(load(str(late_models.multi_vector(tiny_embedder, tmp_path / "c", query_expansion=None))))
    assert (none.query.expanded, none.hides_expansion) == (0, False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"query_length": "long"}, "query_length is 'long', which should be a positive number"),
        ({"document_length": 0}, "document_length is 0, which should be a positive number"),
        ({"skiplist_words": "."}, "skiplist_words should be a list of at most 4096 strings"),
        ({"skiplist_words": ["."] * 5000}, "skiplist_words should be a list of at most 4096 strings"),
        ({"query_prefix": 7}, "query_prefix has 7, which should be a string"),
        ({"do_query_expansion": "yes"}, "do_query_expansion is 'yes', which should be true or false"),
    ],
)
def test_settings_of_pylate_that_are_refused(
    tiny_embedder: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load(str(late_models.pylate(tiny_embedder, tmp_path / "late", **settings)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mask": {"keep_only_token_ids": [1]}}, "keep_only_token_ids is not known"),
        ({"query_expansion": {"strategy": "odd"}}, r"query_expansion \{'strategy': 'odd'\} is not known"),
        ({"query_expansion": {**late_models.EXPANSION, "token": "no such"}}, "query_expansion.token 'no such' is no"),
        ({"described": {"similarity_fn_name": "cosine"}}, "similarity_fn_name 'cosine' is not known"),
    ],
)
def test_settings_of_sentence_transformers_that_are_refused(
    tiny_embedder: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load(str(late_models.multi_vector(tiny_embedder, tmp_path / "late", **settings)))


def test_modules_that_are_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = late_models.pylate(tiny_embedder, tmp_path / "a")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "a.Pooling", "path": "1_Pooling"}]))
    with pytest.raises(UnsupportedError, match=r"module 'a\.Pooling' is not known for vectors of tokens"):
        load(str(folder))
    bare = late_models.bare(tiny_embedder, tmp_path / "b")
    config = json.loads((bare / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"linear\.weight is missing, or no matrix"):
        load(str(bare))
