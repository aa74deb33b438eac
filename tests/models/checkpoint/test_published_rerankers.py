"""Generators that rank in the prompts of their model cards: recognised by name or by what the source says, with the
scores of the published code."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models.checkpoint import Checkpoint, describe_source, load
from polyhead.models.checkpoint.published_rerankers import RERANKERS, PublishedReranker
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.core.files import MAX_VOCABULARY_BYTES
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints
from tests.support.rerankers import reranker

QUERY, DOCUMENT = "what is a fox", "A fox is an animal.\n\nIt is <b>not</b> a cat.\n"


def published(folder: Path, key: str) -> Path:
    """A tiny network in a folder of this name, whose vocabulary has the answers of a prompt."""
    kind = tf.GemmaConfig if key == "bge" else tf.Qwen2Config if key == "mxbai" else tf.Qwen3Config
    tokenizer = checkpoints.byte_level_bpe()
    tokenizer.add_tokens([answer for answer in RERANKERS[key].answers if len(answer) > 1])
    tokenizer.pad_token = "<|im_end|>" if key == "bge" else "<|endoftext|>"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind(vocab_size=len(tokenizer), head_dim=8, intermediate_size=48, initializer_range=0.3, **shape)
    torch.manual_seed(0)
    checkpoints.save(tf.AutoModelForCausalLM.from_config(config), tokenizer, folder)
    return folder


def rename(folder: Path, name: str) -> None:
    """Write a name into the configuration, as older versions of transformers did."""
    config = json.loads((folder / "config.json").read_text())
    checkpoints.write_json(folder / "config.json", {**config, "_name_or_path": name})


def reference_tokens(tokenizer: Any, key: str) -> list[int]:
    """The tokens of a pair, as the published code joins them."""

    def read(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    known: PublishedReranker = RERANKERS[key]
    if key == "qwen3":
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
        pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {DOCUMENT}"
        return read(known.before[0]) + read(pair) + read(known.after[0])
    if key == "bge":
        tokens = [tokenizer.bos_token_id, *read(f"A: {QUERY}"), *read("\n"), *read(f"B: {DOCUMENT}")]
        return tokens + read("\n") + read(known.after[1])
    prompt, suffix = known.after[1:]
    tokens = read(known.before[0]) + read(f"query: {QUERY}") + read("\n") + read(f"document: {DOCUMENT}")
    return tokens + read("\n") + read(prompt) + read(suffix)


@torch.inference_mode()
def score(loaded: Checkpoint, tokens: list[int]) -> float:
    states = loaded.network(RaggedBatch.of([tokens]))
    return float(loaded.head(states[-1:], [0, 1]))


@pytest.mark.parametrize(
    ("key", "name"),
    [("qwen3", "Qwen3-Reranker-0.6B"), ("bge", "bge-reranker-v2-gemma"), ("mxbai", "mxbai-rerank-base-v2")],
)
@torch.inference_mode()
def test_scores_and_tokens_equal_those_of_the_published_code(tmp_path: Path, key: str, name: str) -> None:
    folder = published(tmp_path / name, key)
    loaded = load(str(folder))
    tokenizer = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = reference_tokens(tokenizer, key)
    template = loaded.pair_prompt
    assert template is not None
    assert loaded.task == "rank"
    texts = template.build_texts(QUERY, DOCUMENT)
    between = [id for text in texts for id in loaded.tokenizer.encode(text, special=False, untrusted=True).ids]
    assert [*template.before, *between, *template.after] == tokens
    logits = tf.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, -1]
    answers = [tokenizer(answer, add_special_tokens=False)["input_ids"][0] for answer in RERANKERS[key].answers]
    expected = logits[answers[0]] - (logits[answers[1]] if len(answers) > 1 else 0)
    assert score(loaded, tokens) == pytest.approx(float(expected), abs=1e-5)
    assert load(f"{folder}#generate").task == "generate"


def test_what_the_source_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = published(tmp_path / "mine", "qwen3")
    assert describe_source(str(folder)).head.task == "generate"
    assert describe_source(f"{folder}#rank=qwen3").head.task == "rank"
    choices = "#rank=qwen3 or #rank=bge or #rank=mxbai"
    with pytest.raises(UnsupportedError, match=f"no known reranker, so its prompt must be named .*: {choices}"):
        describe_source(f"{folder}#rank")
    with pytest.raises(CheckpointError, match="#order after a source is not known; known are #generate, #rank, #rank="):
        describe_source(f"{folder}#order")
    with pytest.raises(UnsupportedError, match="asks for the answer 'Yes', which is 3 tokens, not one; the prompt bge"):
        describe_source(f"{folder}#rank=bge")
    (folder / "README.md").write_text("---\nlicense: mit\npipeline_tag: text-ranking\n---\nA text-ranking model.")
    with caplog.at_level(logging.WARNING):
        assert describe_source(str(folder)).head.task == "generate"
    assert "its card says that it ranks texts" in caplog.text
    rename(folder, "someone/Qwen3-Reranker-4B")
    assert describe_source(f"{folder}#rank").head.task == "rank"
    rename(folder, "Qwen3-Reranker-bge-reranker-v2-gemma")
    with pytest.raises(UnsupportedError, match="its name is that of qwen3 and of bge, so its prompt must be named"):
        describe_source(f"{folder}#rank")
    named = folder.rename(tmp_path / "odd#name")
    assert describe_source(str(named)).head.task == "generate"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_of_a_long_card_the_beginning_is_read(
    tmp_path: Path, tiny_generator: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    folder = Path(shutil.copytree(tiny_generator, tmp_path / "model"))
    lines = ("---", "pipeline_tag: text-ranking", "---", "A model.", "")
    (folder / "README.md").write_bytes(ending.join(lines).encode())
    os.truncate(folder / "README.md", MAX_VOCABULARY_BYTES + 1)
    assert describe_source(str(folder)).head.task == "generate"
    assert "its card says that it ranks texts" in caplog.text


def test_a_card_that_cannot_be_read_is_not_needed(
    tmp_path: Path, tiny_generator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_generator, tmp_path / "model"))
    (tmp_path / "outside.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    card = folder / "README.md"
    for make in (card.mkdir, lambda: os.mkfifo(card), lambda: card.symlink_to(tmp_path / "outside.md")):
        make()
        assert describe_source(str(folder)).head.task == "generate"
        card.rmdir() if card.is_dir() else card.unlink()
    assert "its card says" not in caplog.text


def test_folders_in_the_cache_of_the_hub_are_recognised(tmp_path: Path) -> None:
    folder = published(tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "c0ffee", "qwen3")
    assert describe_source(str(folder)).head.task == "rank"


def test_other_networks_have_no_task_to_choose(tmp_path: Path, tiny_ranker: Path) -> None:
    with pytest.raises(UnsupportedError, match="#rank after a source is for generators, and this is none"):
        describe_source(f"{tiny_ranker}#rank")
    folder = reranker(tmp_path)
    assert describe_source(f"{folder}#rank").head.task == "rank"
    assert describe_source(f"{folder}#generate").head.task == "generate"
