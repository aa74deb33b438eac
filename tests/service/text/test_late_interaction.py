"""Queries and documents of a late-interaction model, and their scores."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyhead.models.core.late_interaction import LateInteraction, TextRole
from polyhead.service.core.errors import AnswerTooLarge, BadRequest, EmptyInput, TooLong
from polyhead.service.core.model import Model
from polyhead.service.text import encoder_inputs
from polyhead.service.text.answer_delta import Usage
from polyhead.service.text.encoder_outputs import TokenVectors
from polyhead.service.text.similarity import late_similarities
from tests.support import scripted
from tests.support.text_calls import inputs

FILLER, PREFIX = 4, 7


@pytest.fixture(scope="module")
def colbert(tiny_embedder: Path) -> Model:
    plain = scripted.model(tiny_embedder, "colbert", "embed")
    dot = plain.tokenizer.token_id("a")
    assert dot is not None
    query = TextRole(prompt="the ", prefix=PREFIX, max_tokens=10, expanded=10, skipped=frozenset())
    document = TextRole(prompt="", prefix=-1, max_tokens=8, expanded=0, skipped=frozenset({dot}))
    return replace(plain, late=LateInteraction(query, document, FILLER, hides_expansion=True, averages=False))


def test_a_query_is_filled_up_and_a_document_loses_words(colbert: Model) -> None:
    query, document = inputs(colbert, "good film", "a good film", form="tokens", queries=1)
    whole = colbert.tokenizer.encode("the good film").ids
    missing = 10 - len(whole) - 1
    assert query.tokens == (whole[0], PREFIX, *whole[1:], *[FILLER] * missing)
    assert (query.rows, query.hidden) == ((), missing)
    ids = colbert.tokenizer.encode("a good film").ids
    skipped = [row for row, id in enumerate(ids) if id == colbert.tokenizer.token_id("a")]
    assert (list(document.tokens), document.hidden) == (ids, 0)
    assert list(document.rows) == [row for row in range(len(ids)) if row not in skipped]
    assert colbert.late is not None
    seen = replace(colbert, late=replace(colbert.late, hides_expansion=False))
    assert inputs(seen, "good film", form="tokens", queries=1)[0].hidden == 0


def test_limits_are_those_of_the_role(colbert: Model) -> None:
    text = "good film good film good film good film"
    with pytest.raises(TooLong, match=r"the input has 10 tokens\. This model's maximum context length is 8"):
        inputs(colbert, text, form="tokens")
    [cut] = inputs(colbert, text, form="tokens", queries=1, truncate="right")
    whole = colbert.tokenizer.encode("the " + text).ids
    assert list(cut.tokens) == [whole[0], PREFIX, *whole[1:8], whole[-1]]
    assert (cut.hidden, cut.rows) == (0, ())


def test_inputs_that_are_refused(colbert: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="inputs: colbert has a vector for each token and none for a text; /embed_all"):
        inputs(colbert, "a film")
    assert colbert.late is not None
    every = frozenset(range(colbert.vocab_size))
    silent = replace(colbert, late=replace(colbert.late, document=replace(colbert.late.document, skipped=every)))
    with pytest.raises(EmptyInput, match="inputs: has only words that the model skips"):
        inputs(silent, "a film", form="tokens")
    monkeypatch.setattr(encoder_inputs, "MAX_VECTOR_NUMBERS", 10 * colbert.width)
    inputs(colbert, "film", form="tokens", queries=1)
    with pytest.raises(AnswerTooLarge, match="vectors of 4 numbers for 20 tokens"):
        inputs(colbert, "film", "good", form="tokens", queries=2)


def test_scores_are_sums_of_the_largest_products(colbert: Model) -> None:
    assert colbert.late is not None
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(rows, 3)).astype(np.float32) for rows in (4, 2, 5)]
    answers = [TokenVectors(memoryview(table), Usage(1)) for table in tables]
    products = [tables[0] @ table.T for table in tables[1:]]
    wanted = [float(product.max(axis=1).sum()) for product in products]
    query, *documents = answers
    assert late_similarities(colbert.late, query, documents) == pytest.approx(wanted, rel=1e-6)
    averaged = replace(colbert.late, averages=True)
    assert late_similarities(averaged, query, documents) == pytest.approx([score / 4 for score in wanted], rel=1e-6)
    assert late_similarities(colbert.late, query, []) == []
