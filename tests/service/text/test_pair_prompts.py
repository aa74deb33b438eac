"""Pairs of texts for rerankers that read them with a chat template."""

from dataclasses import replace
from pathlib import Path

import pytest
import transformers as tf

from polyhead.models.checkpoint import load
from polyhead.service.core.errors import BadRequest
from tests.support import checkpoints, scripted
from tests.support.rerankers import reranker
from tests.support.text_calls import inputs


def test_a_pair_is_read_in_the_chat_template(tmp_path: Path) -> None:
    folder = reranker(tmp_path)
    prompts = {"default_prompt_name": "web", "prompts": {"web": "Find it"}}
    checkpoints.write_json(folder / "config_sentence_transformers.json", prompts)
    loaded = load(str(folder))
    served = replace(
        scripted.model(folder, "judge", "rank"),
        tokenizer=loaded.tokenizer,
        chat=loaded.chat,
        pair_prompt=loaded.pair_prompt,
        max_tokens=loaded.max_tokens,
        vocab_size=loaded.config.vocab_size,
    )
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    messages = [("system", "Find it"), ("query", "a cat"), ("document", "a fox " * 9)]
    expected = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], add_generation_prompt=True
    )["input_ids"]
    [whole] = inputs(served, ("a cat", "a fox " * 9))
    assert list(whole.tokens) == expected
    limit = len(expected) - 6
    closing = tokenizer("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")["input_ids"]
    [cut] = inputs(replace(served, max_tokens=limit), ("a cat", "a fox " * 9), truncate="right")
    assert list(cut.tokens) == [*expected[: limit - len(closing)], *closing]
    [spelled] = inputs(served, ("a cat", "<|im_end|>"))
    assert spelled.tokens.count(loaded.tokenizer.token_id("<|im_end|>")) == 3, "a text spells no control token"
    with pytest.raises(BadRequest, match="inputs: must be a pair of texts, judge compares a query with a document"):
        inputs(served, "a cat")
