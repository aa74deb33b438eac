"""Inputs of encoders: texts, pairs and token ids, truncation, prefixes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.service.core.errors import BadRequest, EmptyInput, TooLong
from polyhead.service.core.model import Model
from polyhead.service.text.encoder_inputs import exclude_prompt
from tests.support.scripted import model
from tests.support.text_calls import inputs


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Path) -> Model:
    return model(tiny_classifier, "judge", "classify", labels=("bad", "good"))


def test_inputs_of_text_pairs_and_ids_keep_their_order(classifier: Model) -> None:
    one, ids, pair = inputs(classifier, "a good film", (2, 0, 3), ("a", "bad film"))
    assert one.tokens == tuple(classifier.tokenizer.encode("a good film").ids)
    assert one.segments == ()
    assert (ids.tokens, ids.segments) == ((2, 0, 3), ())
    (expected,) = classifier.tokenizer.encode_batch([("a", "bad film")])
    assert (pair.tokens, pair.segments) == (tuple(expected.ids), tuple(expected.segments))
    assert set(pair.segments) == {0, 1}


@pytest.mark.parametrize("given", ["", ("", ""), ()])
def test_empty_inputs(classifier: Model, given: Any) -> None:
    with pytest.raises(EmptyInput, match=r"inputs\[1\]: is empty"):
        inputs(classifier, "a", given)


def test_a_zero_is_an_id_like_any_other(classifier: Model) -> None:
    assert inputs(classifier, (0,))[0].tokens == (0,)


def test_an_input_that_is_too_long_is_truncated_only_on_request(classifier: Model) -> None:
    short = replace(classifier, max_tokens=6)
    text = "a good film a bad film"
    with pytest.raises(TooLong, match=r"inputs: the input has 8 tokens\. This model's maximum context length is 6"):
        inputs(short, text)
    whole = classifier.tokenizer.encode(text).ids
    assert list(inputs(short, text, truncate="right")[0].tokens) == [*whole[:5], whole[-1]]
    assert list(inputs(short, text, truncate="left")[0].tokens) == [whole[0], *whole[-5:]]
    assert inputs(short, tuple(range(8)), truncate="left")[0].tokens == tuple(range(2, 8))


def test_truncation_equals_that_of_the_tokenizers_library(tiny_classifier: Path, classifier: Model) -> None:
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(tiny_classifier / "tokenizer.json"))
    words = ["a", "good", "film", "well", "acted", "and", "beautifully", "shot"]
    for first, second, limit, side in [(7, 3, 9, "right"), (2, 8, 8, "left"), (6, 6, 8, "right"), (8, 7, 6, "right")]:
        pair = " ".join(words[:first]), " ".join(words[:second])
        reference.enable_truncation(limit, direction=side)
        expected = reference.encode(*pair)
        (request,) = inputs(replace(classifier, max_tokens=limit), pair, truncate=side)
        assert (list(request.tokens), list(request.segments)) == (expected.ids, expected.type_ids)


def test_dimensions_beyond_the_width(classifier: Model) -> None:
    assert inputs(classifier, "a", dimensions=4)[0].dimensions == 4
    with pytest.raises(BadRequest, match="dimensions: judge has 4, got 5"):
        inputs(classifier, "a", dimensions=5)


def test_the_tokens_of_a_prompt_that_is_not_pooled(classifier: Model) -> None:
    model = replace(classifier, task="embed", prompts={"": "", "q": "film good "}, excludes_prompt=True)
    prompt = len(classifier.tokenizer.encode("film good ").ids) - 1  # without the token at its end
    [plain] = inputs(model, "a bad film")
    [named] = inputs(model, "a bad film", prompt="q")
    assert plain.rows == ()
    assert named.rows == tuple(range(prompt, len(named.tokens)))
    assert named.tokens[prompt] == plain.tokens[1], "the first token after the prompt"
    short = replace(model, max_tokens=4)
    [cut] = inputs(short, "a bad film", prompt="q", truncate="left")
    assert cut.rows == (1, 2, 3)
    with pytest.raises(TooLong, match="inputs: the prompt alone has as many tokens as the model takes"):
        exclude_prompt(named, [False] * len(named.tokens), "inputs")
    assert inputs(model, (1, 2, 3), prompt="q")[0].rows == (), "token ids have no prompt"


def test_prefixes_of_a_text(classifier: Model) -> None:
    model = replace(classifier, prompts={"": "film: ", "query": "good "})
    [default, named, ids] = inputs(model, "a", (5, 6)) + inputs(model, "a", prompt="query")
    assert [request.tokens for request in (default, ids)] == [
        tuple(classifier.tokenizer.encode(text).ids) for text in ("film: a", "good a")
    ]
    assert named.tokens == (5, 6)
    with pytest.raises(BadRequest, match="prompt_name: judge has no prompt 'other'; its prompts: query"):
        inputs(model, "a", prompt="other")
    with pytest.raises(BadRequest, match="prompt_name: judge has no prompt 'other'; its prompts: it has none"):
        inputs(classifier, "a", prompt="other")
