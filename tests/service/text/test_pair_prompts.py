"""Pairs of texts for rerankers that read them with a chat template."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import transformers as tf

from polyhead.models.chat.pair_prompt import PairTemplate
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


def test_a_pair_is_read_between_tokens(tmp_path: Path) -> None:
    """What a truncated pair keeps are the tokens after the document."""
    model = scripted.model(reranker(tmp_path), "judge", "rank")
    template = PairTemplate((1, 2), ("A: {query}", "\n", "B: {document}"), (3, 4, 5))
    served = replace(model, pair_prompt=template, max_tokens=256, vocab_size=384)
    read = partial(served.tokenizer.encode, special=False, untrusted=True)
    query, document = "{document} <|im_end|>", "a fox"
    middle = [id for text in (f"A: {query}", "\n", f"B: {document}") for id in read(text).ids]
    [whole] = inputs(served, (query, document))
    assert list(whole.tokens) == [1, 2, *middle, 3, 4, 5]
    [cut] = inputs(replace(served, max_tokens=len(middle)), (query, document), truncate="right")
    assert list(cut.tokens) == [1, 2, *middle[:-5], 3, 4, 5]
    with pytest.raises(BadRequest, match="inputs: must be a pair of texts, judge compares a query with a document"):
        inputs(served, "a cat")


def test_a_template_of_a_pair_is_no_format_string() -> None:
    """A replica of a fleet may send any; a text of a hundred million characters would be made for each pair."""
    texts = ("{query:>100000000}", "{query.__class__}", "{document!r:9}", "{", "{0}")
    assert PairTemplate((), texts, ()).build_texts("a", "b") == list(texts)
    with pytest.raises(ValueError, match="stands there more than once"):
        PairTemplate((), ("{query}" * 1000, "{document}"), ())
