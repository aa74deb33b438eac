"""Rerankers of sentence-transformers that answer yes or no: the score, and the prompt of a pair."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models.chat.pair_prompt import PairPrompt
from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints
from tests.support.rerankers import NO, YES, reranker


@torch.inference_mode()
def score(loaded: Checkpoint, *texts: list[int]) -> torch.Tensor:
    """The scores of tokens, computed together."""
    batch = RaggedBatch.of(texts)
    states = loaded.network(batch)
    rows, starts = loaded.head.needed_rows(list(batch.starts))
    return loaded.head.postprocess(loaded.head(states[torch.tensor(rows)], starts))[:, 0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("no", [NO, None])
@torch.inference_mode()
def test_scores_equal_those_of_the_logits(tmp_path: Path, tied: bool, no: int | None) -> None:
    folder = reranker(tmp_path, tied=tied, score={"true_token_id": YES, "false_token_id": no})
    loaded = load(str(folder))
    theirs = tf.Qwen3ForCausalLM.from_pretrained(folder)
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    last = torch.stack([theirs(torch.tensor([text])).logits[0, -1] for text in texts])
    raw = last[:, YES] if no is None else last[:, YES] - last[:, no]
    torch.testing.assert_close(score(loaded, *texts), raw.sigmoid(), rtol=0, atol=1e-6)
    assert (loaded.task, loaded.labels) == ("rank", ("LABEL_0",))


def test_the_last_function_is_that_of_the_file(tmp_path: Path) -> None:
    folder = reranker(tmp_path)
    checkpoints.write_json(folder / "config_sentence_transformers.json", {"activation_fn": "torch.nn.Identity"})
    assert load(str(folder)).head.score_activation == "none"
    checkpoints.write_json(folder / "config_sentence_transformers.json", {"activation_fn": "mine.Tanh"})
    with pytest.raises(UnsupportedError, match=r"activation_fn 'mine\.Tanh' is not known; known are Identity"):
        load(str(folder))


def test_messages_of_a_pair() -> None:
    assert PairPrompt().build_messages("q", "d") == [
        {"role": "query", "content": "q"},
        {"role": "document", "content": "d"},
    ]
    [system, *_] = PairPrompt("s", in_parts=True).build_messages("q", "d")
    assert system == {"role": "system", "content": [{"type": "text", "text": "s"}]}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"score": {"true_token_id": 1 << 40}}, "true_token_id is 1099511627776, which should be a token from 0 to"),
        ({"score": {"true_token_id": True}}, "true_token_id is True, which should be a token"),
        ({"score": {"true_token_id": 1, "false_token_id": -1}}, "false_token_id is -1, which should be a token"),
        ({"score": {"true_token_id": 1, "module_input_name": "x"}}, "module_input_name 'x' is not known"),
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask' does not fit its head"),
        ({"modality_config": {"message": {"format": "odd"}}}, r"modality_config.message \{'format': 'odd'\} is not"),
        ({"processing_kwargs": {"text": {}}}, r"processing_kwargs\.text is not known; known is chat_template"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load(str(reranker(tmp_path, **settings)))


def test_folders_that_are_refused(tmp_path: Path, tiny_ranker: Path) -> None:
    folder = reranker(tmp_path / "a")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    checkpoints.write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UnsupportedError, match="its pairs are read by a chat template, and there is none"):
        load(str(folder))
    other = reranker(tmp_path / "b")
    (other / "config.json").write_bytes((tiny_ranker / "config.json").read_bytes())
    with pytest.raises(UnsupportedError, match="LogitScore needs the logits of a causal language model"):
        load(str(other))


def test_a_cross_encoder_with_modules_is_no_embedder(tiny_ranker: Path, tmp_path: Path) -> None:
    """Newer versions of sentence-transformers write modules.json for cross-encoders, too."""
    folder = tmp_path / "ranker"
    shutil.copytree(tiny_ranker, folder)
    checkpoints.write_json(folder / "modules.json", [{"type": "a.Transformer", "path": ""}])
    described = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    checkpoints.write_json(folder / "config_sentence_transformers.json", described)
    loaded = load(str(folder))
    assert (loaded.task, loaded.head.score_activation) == ("rank", "none")
    checkpoints.write_json(folder / "modules.json", [{"type": "a.Transformer"}, {"type": "a.Dense", "path": "1"}])
    with pytest.raises(UnsupportedError, match="modules Transformer, Dense of a cross-encoder are not known"):
        load(str(folder))
