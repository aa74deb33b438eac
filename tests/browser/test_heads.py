"""The results of each head on the page equal those of the API."""

import numpy as np
import pytest
from playwright.sync_api import Locator, expect

from tests.browser.playground import Visit, ask, choose, run
from tests.support.processes import Process

# Characters beyond U+FFFF: JavaScript's strings count each as two.
EMOJI_TEXT = "😀 The old harbour 🚢 of Hamburg is large."


def before(mark: Locator) -> int:
    """The number of characters before a mark in its paragraph, without the labels of other marks."""
    return int(
        mark.evaluate("""(mark) => {
          let count = 0;
          for (let node = mark.previousSibling; node; node = node.previousSibling) {
            const words = node.querySelector ? node.querySelector(".words") ?? node : node;
            count += Array.from(words.textContent).length;
          }
          return count;
        }""")
    )


def test_the_bars_of_labels_are_as_long_as_their_scores(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "sentiment")
    page.get_by_label("Text", exact=True).fill("It was dull and far too long.")
    answer = run(page, "Classify")
    [labels] = ask(served, "/models/sentiment", {"inputs": "It was dull and far too long."})
    expect(answer.locator(".headline")).to_have_text(labels[0]["label"])
    assert answer.locator(".bars .name").all_text_contents() == [each["label"] for each in labels]
    for row, label in zip(answer.locator(".bars li").all(), labels, strict=True):
        full, filled = row.locator(".meter").evaluate(
            "(meter) => [meter.clientWidth, parseFloat(getComputedStyle(meter, '::before').width)]"
        )
        assert filled / full == pytest.approx(label["score"], abs=0.01)


def test_pairs_of_texts_and_zero_shot_labels_are_classified(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "pair")
    page.get_by_label("Second text").fill("Somebody makes music.")
    text = page.get_by_role("textbox").first.input_value()
    answer = run(page, "Classify")
    [labels] = ask(served, "/models/pair", {"inputs": {"text": text, "text_pair": "Somebody makes music."}})
    assert answer.locator(".bars .name").all_text_contents() == [each["label"] for each in labels]
    page.get_by_label("Zero-shot: candidate labels").check()
    page.get_by_label("Candidate labels, one per line").fill("music\ncooking")
    answer = run(page, "Classify")
    assert sorted(answer.locator(".bars .name").all_text_contents()) == ["cooking", "music"]


def test_entities_are_marked_at_their_characters(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "tags")
    page.get_by_label("Text", exact=True).fill(EMOJI_TEXT)
    answer = run(page, "Find")
    found = ask(served, "/models/tags", {"inputs": EMOJI_TEXT, "parameters": {"aggregation_strategy": "first"}})
    marks = answer.locator("mark").all()
    assert len(marks) == len(found) > 1
    for mark, one in zip(marks, found, strict=True):
        assert mark.locator(".words").text_content() == EMOJI_TEXT[one["start"] : one["end"]]
        assert before(mark) == one["start"]
        assert mark.locator(".label").text_content() == one["entity_group"]
    legend = answer.locator(".legend li").all_text_contents()
    assert sorted(legend) == sorted({one["entity_group"] for one in found})


def test_an_answer_is_marked_in_its_context(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "span")
    page.get_by_label("Question").fill("What is large?")
    page.get_by_label("Context").fill(EMOJI_TEXT)
    answer = run(page, "Answer")
    body = {"inputs": {"question": "What is large?", "context": EMOJI_TEXT}, "parameters": {"top_k": 3}}
    found = ask(served, "/models/span", body)
    mark = answer.locator("mark.found")
    expect(mark).to_have_text(found[0]["answer"])
    assert before(mark) == found[0]["start"]
    answer.locator(".bars button").nth(1).click()
    expect(mark).to_have_text(found[1]["answer"])
    assert before(mark) == found[1]["start"]


def test_a_chosen_word_replaces_the_mask(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "fill")
    text = page.get_by_label("Text", exact=True)
    asked = text.input_value()
    answer = run(page, "Fill in")
    found = ask(served, "/models/fill", {"inputs": asked, "parameters": {"top_k": 8}})
    rows = answer.locator(".bars button")
    assert rows.locator(".name").all_text_contents() == [each["token_str"] for each in found]
    rows.nth(2).click()
    assert "[MASK]" not in text.input_value()
    assert found[2]["token_str"].removeprefix("##") in text.input_value()
    assert text.input_value().startswith(asked.partition(" [MASK]")[0])


def test_every_pair_of_texts_has_its_cell(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "minilm")
    texts = page.get_by_label("Texts, one per line").input_value().splitlines()
    answer = run(page, "Compare")
    data = ask(served, "/v1/embeddings", {"model": "minilm", "input": texts})["data"]
    vectors = np.array([each["embedding"] for each in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cells = answer.locator("tbody td").all_text_contents()
    assert len(cells) == len(texts) ** 2
    shown = np.array(cells, float).reshape(len(texts), -1)
    assert np.abs(shown - vectors @ vectors.T).max() < 0.0051
    assert answer.locator("tbody th").count() == len(texts)


def test_passages_are_ranked(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "ranker")
    query, passages = page.get_by_label("Question"), page.get_by_label("Passages, one per line")
    answer = run(page, "Rank")
    body = {"model": "ranker", "query": query.input_value(), "documents": passages.input_value().splitlines()}
    results = ask(served, "/v1/rerank", body)["results"]
    assert answer.locator(".bars .name").all_text_contents() == [body["documents"][each["index"]] for each in results]


@pytest.mark.parametrize("model", ["translator", "recurrent"])
def test_a_translation_is_shown_with_its_alignment(visit: Visit, served: Process, model: str) -> None:
    page = visit(served)
    choose(page, model)
    text = page.get_by_label("Text", exact=True).input_value()
    answer = run(page, "Generate")
    body = {"inputs": text, "parameters": {"num_beams": 4}}
    [written] = ask(served, f"/models/{model}/pipeline/translation", body)
    expect(answer.locator(".headline")).to_have_text(written["translation_text"])
    expect(answer.locator(".alignment > *").first).to_be_visible()
