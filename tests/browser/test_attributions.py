"""The attributions that the tab Attention shows equal those of POST /v1/explain, character by character."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.attention import (
    BUSY,
    EMOJI_TEXT,
    PATH,
    TEXT,
    check_pieces,
    explained,
    open_tab,
    pick,
    view,
    wait_until_drawn,
)
from tests.browser.playground import Sent, Visit, ask, choose, converse, run, tab, wait_for_answer
from tests.support.processes import Process


@pytest.mark.parametrize("method", ["gradient × input", "integrated gradients", "occlusion"])
def test_every_character_has_its_score(
    visit: Visit, served: Process, method: str, picture: Callable[[Page, str], None]
) -> None:
    name = method.replace(" × ", "_x_").replace(" ", "_")
    text = TEXT if name == "integrated_gradients" else EMOJI_TEXT
    page = open_tab(visit, served, "sentiment", text)
    view(page, "Attributions")
    page.get_by_role("radio", name=method).check()
    wait_until_drawn(page)
    [attribution] = ask(served, PATH, {"model": "sentiment", "input": text, "method": name})["attributions"]
    check_pieces(page, attribution, [text])
    expect(page.locator(".attn-goal b")).to_have_text(attribution["target"]["label"])
    signs = page.locator(".attn-text mark").evaluate_all(
        "(all) => all.map((mark) => [mark.dataset.score < 0, mark.classList.contains('against')])"
    )
    assert signs
    assert all(negative == against for negative, against in signs)
    if name == "integrated_gradients":
        completeness = attribution["completeness"]
        expect(page.locator(".attn-completeness")).to_contain_text(
            "Complete" if completeness["holds"] else "Not complete"
        )
        expect(page.locator(".attn-completeness")).to_contain_text(f"{completeness['sum']:+.4f}".replace("-", "−"))
        picture(page, "attention-attributions")


def test_a_pending_request_is_aborted_when_another_method_is_chosen(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Attributions")
    method = "gradient_x_input"  # never answered here
    page.route("**" + PATH, lambda route: None if method in str(route.request.post_data) else route.continue_())
    page.get_by_role("radio", name="gradient × input").check()
    expect(page.locator(BUSY)).to_be_visible()
    with page.expect_event("requestfailed") as aborted:
        page.get_by_role("radio", name="occlusion").check()
    assert method in str(aborted.value.post_data)
    wait_until_drawn(page)
    check_pieces(page, explained(served, "sentiment", method="occlusion")["attributions"][0], [TEXT])


def test_another_label_can_be_explained(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Attributions")
    predicted = explained(served, "sentiment", method="integrated_gradients")["attributions"][0]["target"]["label"]
    options = page.get_by_label("Label", exact=True).locator("option").all_text_contents()[1:]
    other = next(label for label in options if label != predicted)
    pick(page, "Label", other)
    [attribution] = explained(served, "sentiment", method="integrated_gradients", target={"label": other})[
        "attributions"
    ]
    expect(page.locator(".attn-goal b")).to_have_text(other)
    check_pieces(page, attribution, [TEXT])


def test_the_tag_of_a_token_can_be_explained(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "tags")
    view(page, "Attributions")
    pick(page, "Token", "2")
    [attribution] = explained(served, "tags", method="integrated_gradients", target={"token": 2})["attributions"]
    check_pieces(page, attribution, [TEXT])


def test_an_answer_in_a_context_is_explained_over_both_texts(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "span")
    page.get_by_label("Question").fill("What was dull?")
    page.get_by_label("Context").fill(TEXT)
    run(page, "Answer")
    sent = Sent(page, PATH)
    tab(page, "Attention")
    wait_until_drawn(page)
    [body] = sent.bodies
    assert body["method"] == "integrated_gradients"
    assert body["input"] == ["What was dull?", TEXT]
    [attribution] = ask(served, PATH, body)["attributions"]
    check_pieces(page, attribution, body["input"])


def test_a_generated_answer_is_explained_token_by_token(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    converse(page, "Name a city in France.", tokens=5)
    wait_for_answer(page)
    tab(page, "Attention")
    wait_until_drawn(page)
    sent = Sent(page, PATH)
    view(page, "Attributions")
    [body] = sent.bodies
    answer = ask(served, PATH, body)
    chips = page.locator(".attn-chip")
    written = [each["target"]["token"] for each in answer["attributions"]]
    assert [int(str(chip.get_attribute("data-token"))) for chip in chips.all()] == written
    for place in (0, len(written) - 1):
        chips.nth(place).hover()
        expect(chips.nth(place)).to_have_attribute("aria-pressed", "true")
        check_pieces(page, answer["attributions"][place], ["Name a city in France."])
