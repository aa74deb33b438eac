"""Every tab, and the page /docs, on a phone: nothing is wider than the screen, and what counts is on it."""

import pytest
from playwright.sync_api import Locator, Page, ViewportSize, expect

from tests.browser.attention import view, wait_until_drawn
from tests.browser.playground import Visit, assert_accessible, choose, converse, press, run, tab, wait_for_answer
from tests.browser.test_page import BUTTONS
from tests.browser.test_reference import unfold
from tests.support.processes import Process

PHONE: ViewportSize = {"width": 390, "height": 844}
LONG_WORD = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"
WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".skip, .hidden"))
  .map((each) => `${each.tagName}.${each.className}`)"""


def open_on_phone(visit: Visit, server: Process, path: str = "/") -> Page:
    page = visit(server, path)
    page.set_viewport_size(PHONE)
    page.reload()
    return page


def assert_fits(page: Page, where: str) -> None:
    """Asserts that the page does not scroll sideways. Wide content scrolls in a box of its own."""
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width == PHONE["width"], f"{where} is {width} pixels wide: {page.evaluate(WIDE)[:5]}"


def assert_shown(label: Locator) -> None:
    """Asserts that a text is on the screen, in its full length."""
    label.scroll_into_view_if_needed()
    expect(label).to_be_in_viewport(ratio=0.99)
    assert label.evaluate("(node) => node.scrollWidth <= node.clientWidth || !node.clientWidth"), "it is cut off"


@pytest.mark.parametrize("model", BUTTONS)
def test_the_form_of_every_task_fits(visit: Visit, served: Process, model: str) -> None:
    page = open_on_phone(visit, served)
    choose(page, model)
    assert_fits(page, model)
    if model == "writer":
        page.get_by_label("Max tokens").fill("4")  # the network of a smoke run has few positions
    run(page, BUTTONS[model])
    assert_fits(page, f"the answer of {model}")


def test_the_chat_fits(visit: Visit, served: Process) -> None:
    page = open_on_phone(visit, served)
    choose(page, "smollm2")
    page.locator("summary", has_text="Settings").click()
    assert_fits(page, "the settings")
    converse(page, f"Say {LONG_WORD}", tokens=16)
    wait_for_answer(page)
    expect(page.locator(".turn.user")).to_contain_text(LONG_WORD)
    assert_fits(page, "the conversation")
    assert_shown(page.get_by_label("Message", exact=True))
    assert_shown(page.get_by_role("button", name="Send"))
    page.locator("summary", has_text="Conversations").click()
    assert_fits(page, "the conversations")


@pytest.mark.parametrize("model", ["sentiment", "minilm"])
def test_every_view_of_attention_fits_and_shows_the_special_tokens(visit: Visit, served: Process, model: str) -> None:
    page = open_on_phone(visit, served)
    choose(page, model)
    page.get_by_role("textbox").first.fill("It starts slowly, but I loved every minute of it.")
    tab(page, "Attention")
    wait_until_drawn(page)
    for name, labels in (
        ("Heads", "[data-side=from], [data-side=to]"),
        ("Heatmap", ".attn-table th"),
        ("All heads", ""),
        ("Rollout & flow", ".attn-table th"),
        ("Attributions", ""),
    ):
        view(page, name)
        assert_fits(page, name)
        for token in ("[CLS]", "[SEP]") if labels else ():
            shown = page.locator(labels).filter(has_text=token)
            expect(shown).to_have_count(2)  # as a row and as a column
            for each in shown.all():
                assert_shown(each)


def test_the_progress_of_an_explanation_covers_none_of_its_fields(visit: Visit, served: Process) -> None:
    page = open_on_phone(visit, served)
    choose(page, "sentiment")
    tab(page, "Attention")
    wait_until_drawn(page)
    page.get_by_label("Steps").fill("500")
    page.get_by_label("Steps").press("Enter")
    expect(page.get_by_role("progressbar", name="Share of the work done")).to_be_visible()
    assert_fits(page, "a computation")
    assert_shown(page.locator(".attn-waiting"))
    page.get_by_label("gradient × input").check()  # fails if something else receives the click
    wait_until_drawn(page)


def test_the_cards_of_the_server_fill_half_a_screen(visit: Visit, served: Process) -> None:
    page = open_on_phone(visit, served)
    tab(page, "Server")
    expect(page.locator(".tile .number").first).not_to_have_text("–")
    assert_fits(page, "the server")
    boxes = [box for each in page.locator(".tile").all() if (box := each.bounding_box())]
    assert len({box["x"] for box in boxes}) >= 2, "several beside each other"
    assert max(box["y"] + box["height"] for box in boxes) - boxes[0]["y"] <= PHONE["height"] / 2
    for each in page.locator(".tile dt, .tile .number").all():
        assert each.evaluate("(node) => node.scrollWidth <= node.clientWidth"), each.text_content()


def test_questions_and_their_answers_fit(visit: Visit, served: Process) -> None:
    page = open_on_phone(visit, served)
    choose(page, "texts")
    tab(page, "Decide")
    press(page, "Add a question")
    assert_fits(page, "the questions")
    page.get_by_label("State").fill(f"My card was charged twice, says {LONG_WORD}.")
    page.reload()
    page.get_by_label("Explain the answer by the text").first.check()
    press(page, "Decide")
    expect(page.locator(".decision")).to_have_count(3)
    expect(page.locator(".explained").first).to_be_visible()
    assert_fits(page, "the answers")
    assert_accessible(page, "the answers")


def test_the_reference_fits_with_everything_open(visit: Visit, served: Process) -> None:
    page = open_on_phone(visit, served, "/docs")
    expect(page.locator("#count")).to_contain_text("routes")
    assert_fits(page, "the routes")
    page.get_by_label("Filter").fill("post /v1/chat/completions")
    page.locator(".operation:visible").click()
    unfold(page)
    assert_fits(page, "the fields")
    name = page.locator("[id='post-/v1/chat/completions'] td code", has_text="messages").first
    assert_shown(name)
