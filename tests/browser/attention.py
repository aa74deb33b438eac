"""Actions on the tab Attention and readers of what it shows, for the tests."""

from typing import Any

import numpy as np
from playwright.sync_api import Locator, Page, expect

from tests.browser.playground import TIMEOUT_MS, Visit, ask, choose, tab
from tests.support.processes import Process

PATH = "/v1/explain"
TEXT = "It starts slowly, but I loved every minute of it."
# Characters beyond U+FFFF: JavaScript's strings count each as two.
EMOJI_TEXT = "The harbour 🚢 was dull, but I loved the 😀 boats."
BUSY = ".attn-panel[aria-busy]"
TOLERANCE = 1e-6


def open_tab(visit: Visit, server: Process, model: str, text: str = TEXT, scheme: str = "light") -> Page:
    """The tab Attention, opened for a text."""
    page = visit(server, scheme=scheme)
    choose(page, model)
    page.get_by_role("textbox").first.fill(text)
    tab(page, "Attention")
    wait_until_drawn(page)
    return page


def wait_until_drawn(page: Page) -> None:
    """Waits until the answer is drawn."""
    expect(page.locator(".attn-place > *").first).to_be_attached(timeout=TIMEOUT_MS)
    expect(page.locator(BUSY)).to_have_count(0, timeout=TIMEOUT_MS)
    expect(page.locator(".attn-error")).to_have_count(0)


def view(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    wait_until_drawn(page)


def pick(page: Page, label: str, value: str) -> None:
    page.locator(".attn").get_by_label(label, exact=True).select_option(value)
    wait_until_drawn(page)


def explained(server: Process, model: str, **question: Any) -> Any:
    return ask(server, PATH, {"model": model, "input": TEXT, **question})


def read_weights(cells: Locator) -> list[tuple[int, int, float]]:
    """Row, column and weight of each cell."""
    found = cells.evaluate_all("(all) => all.map(({ dataset: d }) => [d.row, d.column, d.weight].map(Number))")
    return [(int(row), int(column), weight) for row, column, weight in found]


def as_matrix(cells: list[tuple[int, int, float]], shape: tuple[int, int]) -> np.ndarray:
    """The weights as a matrix. Asserts that each cell occurs once."""
    assert len(cells) == len({cell[:2] for cell in cells}) == shape[0] * shape[1]
    matrix = np.full(shape, np.nan)
    for row, column, weight in cells:
        matrix[row, column] = weight
    return matrix


PIECES = """(all) => all.map((mark) => {
  const { start, end, score } = mark.dataset;
  return [mark.textContent, Number(start), Number(end), Number(score)];
})"""


def check_pieces(page: Page, attribution: Any, texts: list[str]) -> None:
    """Asserts that the texts are shown in full and that each piece has the score of its characters."""
    assert page.locator(".attn-text").all_text_contents() == texts
    for index, text in enumerate(texts):
        pieces = page.locator(f".attn-text[data-text='{index}'] mark").evaluate_all(PIECES)
        expected = sorted(
            (each for each in attribution["characters"] if each["text"] == index), key=lambda each: each["start"]
        )
        assert [words for words, *_ in pieces] == [text[each["start"] : each["end"]] for each in expected]
        assert [tuple(places) for _, *places, _ in pieces] == [(each["start"], each["end"]) for each in expected]
        np.testing.assert_allclose([score for *_, score in pieces], [each["score"] for each in expected], atol=1e-5)
