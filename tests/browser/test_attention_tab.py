"""What the tab Attention draws, beside what POST /v1/explain says of the same: cell by cell, character by character."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from playground import MANY, Sent, Visit, ask, audited, choose, converse, over, run, tab
from playwright.sync_api import Locator, Page, expect
from processes import Process

PATH = "/v1/explain"
TEXT = "It starts slowly, but I loved every minute of it."
# Outside the first plane of Unicode: a browser's strings count such characters twice.
SMILING = "The harbour 🚢 was dull, but I loved the 😀 boats."
BUSY = ".attn-panel[aria-busy]"
EXACT = 1e-6


def opened(visit: Visit, server: Process, model: str, text: str = TEXT, scheme: str = "light") -> Page:
    """The tab, about a text."""
    page = visit(server, scheme=scheme)
    choose(page, model)
    page.get_by_role("textbox").first.fill(text)
    tab(page, "Attention")
    drawn(page)
    return page


def drawn(page: Page) -> None:
    """What was asked has been answered."""
    expect(page.locator(".attn-place > *").first).to_be_attached(timeout=MANY)
    expect(page.locator(BUSY)).to_have_count(0, timeout=MANY)
    expect(page.locator(".attn-error")).to_have_count(0)


def view(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()
    drawn(page)


def pick(page: Page, label: str, value: str) -> None:
    page.locator(".attn").get_by_label(label, exact=True).select_option(value)
    drawn(page)


def explained(server: Process, model: str, **question: Any) -> Any:
    return ask(server, PATH, {"model": model, "input": TEXT, **question})


def told(cells: Locator) -> list[tuple[int, int, float]]:
    """Row, column and weight of each."""
    found = cells.evaluate_all("(all) => all.map(({ dataset: d }) => [d.row, d.column, d.weight].map(Number))")
    return [(int(row), int(column), weight) for row, column, weight in found]


def laid(cells: list[tuple[int, int, float]], shape: tuple[int, int]) -> np.ndarray:
    """As a matrix, in which each cell stands once."""
    assert len(cells) == len({cell[:2] for cell in cells}) == shape[0] * shape[1]
    matrix = np.full(shape, np.nan)
    for row, column, weight in cells:
        matrix[row, column] = weight
    return matrix


# Weights


def test_a_heatmap_has_a_cell_for_every_weight(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = opened(visit, served, "sentiment")
    view(page, "Heatmap")
    pick(page, "Layer", "3")
    pick(page, "Head", "5")
    answer = explained(served, "sentiment", layers=[3], heads=[5])
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    cells = page.locator("[role=grid] [data-weight]")
    np.testing.assert_allclose(laid(told(cells), weights.shape), weights, atol=EXACT)
    assert len(page.locator(".attn-table th[scope=row]").all()) == len(answer["tokens"])
    cells.nth(3).hover()
    expect(page.locator(".attn-readout b")).to_have_text([answer["tokens"][0]["token"], answer["tokens"][3]["token"]])
    picture(page, "attention-heatmap")


def test_the_keyboard_walks_from_cell_to_cell(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "sentiment")
    page.get_by_role("button", name="Heads", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    drawn(page)
    expect(page.get_by_role("button", name="Heatmap")).to_be_focused()
    for _ in range(3):  # by the fields for the layer and the head
        page.keyboard.press("Tab")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    at = page.locator(":focus")
    assert (at.get_attribute("data-row"), at.get_attribute("data-column")) == ("2", "1")
    expect(page.locator(".attn-readout")).to_have_attribute("data-weight", str(at.get_attribute("data-weight")))


def test_a_long_text_has_a_pixel_for_every_weight(visit: Visit, served: Process) -> None:
    text = "It was dull and far too long, but I loved the boats in the old harbour. " * 7
    page = opened(visit, served, "sentiment", text)
    view(page, "Heatmap")
    answer = ask(served, PATH, {"model": "sentiment", "input": text, "layers": [0], "heads": [0]})
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    assert len(weights) > 100
    size = page.locator(".attn-pixels canvas").evaluate("(canvas) => [canvas.height, canvas.width]")
    assert tuple(size) == weights.shape
    page.locator(".attn-pixels").focus()
    for key in ("ArrowDown", "ArrowDown", "End"):
        page.keyboard.press(key)
    [(row, column, weight)] = told(page.locator(".attn-readout"))
    assert (row, column) == (2, len(weights) - 1)
    assert weight == pytest.approx(weights[2, -1], abs=EXACT)
    strongest = page.locator(".attn-pixels canvas").evaluate(DARKEST)
    assert strongest == int(weights.argmax())


# The index of the darkest pixel: on a light page that of the largest weight.
DARKEST = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const light = Array.from({ length: data.length / 4 }, (_, at) => data[4 * at] + data[4 * at + 1] + data[4 * at + 2]);
  return light.indexOf(Math.min(...light));
}"""


def test_lines_are_those_of_the_chosen_heads(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = opened(visit, served, "sentiment")
    pick(page, "Layer", "2")
    page.get_by_role("button", name="Head 4").click()
    drawn(page)
    answer = explained(served, "sentiment", layers=[2], heads=[0, 4])
    both = np.array(answer["attention"][0]["values"])[0]
    for head, weights in zip((0, 4), both, strict=True):
        lines = page.locator(f".attn-of-head[data-head='{head}'] line")
        np.testing.assert_allclose(laid(told(lines), weights.shape), weights, atol=EXACT)
        opacity = [
            float(each)
            for each in lines.evaluate_all("(all) => all.map((line) => line.getAttribute('stroke-opacity'))")
        ]
        np.testing.assert_allclose(opacity, weights.ravel(), atol=1e-4)
    page.locator("[data-side=from]").nth(8).hover()
    picture(page, "attention-heads")


def seen(page: Page) -> list[tuple[int, int, float]]:
    """Lines that can be."""
    script = """(all) => all.forEach((line) => {
      line.classList.toggle("seen", getComputedStyle(line.parentNode).display !== "none");
    })"""
    page.locator(".attn-lines line").evaluate_all(script)
    return told(page.locator(".attn-lines line.seen"))


def test_a_token_that_is_pointed_at_shows_its_lines_alone(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "sentiment")
    weights = np.array(explained(served, "sentiment", layers=[0], heads=[0])["attention"][0]["values"])[0, 0]
    page.locator("[data-side=from][data-index='2']").hover()
    assert [(row, column) for row, column, _ in seen(page)] == [(2, column) for column in range(len(weights))]
    page.locator("[data-side=to][data-index='1']").focus()
    np.testing.assert_allclose([weight for _, _, weight in seen(page)], weights[:, 1], atol=EXACT)
    page.keyboard.press("Enter")  # keeps them
    page.get_by_role("button", name="Heatmap").focus()
    page.mouse.move(1, 1)
    assert len(seen(page)) == len(weights)


def test_all_heads_have_a_small_map_and_each_opens_large(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = opened(visit, served, "minilm")
    sent = Sent(page, PATH)
    view(page, "All heads")
    answer = explained(served, "minilm")
    [entry] = answer["attention"]
    layers, heads, rows, columns = entry["shape"]
    maps = page.locator(".attn-map canvas")
    expect(maps).to_have_count(layers * heads)
    sizes = maps.evaluate_all("(all) => all.map((canvas) => [canvas.height, canvas.width])")
    assert sizes == [[rows, columns]] * (layers * heads)
    values = np.array(entry["values"]).reshape(layers * heads, -1)
    darkest = maps.evaluate_all(f"(all) => all.map({DARKEST})")
    shown = [values[place, pixel] for place, pixel in enumerate(darkest)]
    np.testing.assert_allclose(shown, values.max(axis=1), atol=0.01)  # of half the precision, in 256 shades
    assert {(body["encoding"], body["dtype"]) for body in sent.bodies} == {("base64", "float16")}
    assert sorted(layer for body in sent.bodies for layer in body.get("layers", range(layers))) == list(range(layers))
    picture(page, "attention-all-heads")
    page.get_by_role("button", name="Layer 2, head 7").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    drawn(page)
    expect(page.locator("[role=gridcell]").first).to_be_focused()
    cells = laid(told(page.locator("[role=gridcell]")), (rows, columns))
    np.testing.assert_allclose(cells, np.array(entry["values"])[3, 7], atol=EXACT)


def test_numbers_of_sixteen_bits_are_read_as_they_are(visit: Visit, served: Process) -> None:
    page = visit(served)
    numbers = np.concatenate([np.arange(0, 1 << 16, 97), [0x7C00, 0x0001, 0x03FF, 0x0400]]).astype("<u2").view("<f2")
    data = base64.b64encode(numbers.tobytes()).decode()
    script = """async (data) => {
      const { decoded } = await import("/web/explanation.js");
      return Array.from(decoded(data, "float16"), String);
    }"""
    read = np.array([float(text.replace("Infinity", "inf")) for text in page.evaluate(script, data)])
    np.testing.assert_array_equal(read, numbers.astype(float))


def test_no_more_is_asked_for_than_is_drawn(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "sentiment")
    sent = Sent(page, PATH)
    tab(page, "Attention")
    drawn(page)
    layout, first = sent.bodies
    assert (layout["input"], layout["top_k"]) == ("a", 1)
    assert (first["layers"], first["heads"]) == ([0], [0])
    page.get_by_role("button", name="Head 1", exact=True).click()
    drawn(page)
    page.get_by_role("button", name="Head 1", exact=True).click()
    drawn(page)
    assert [body["heads"] for body in sent.bodies[2:]] == [[0, 1]], "what was answered before is not asked again"


# Paths through all layers


def test_rollout_shows_the_row_that_answers_and_every_other(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "sentiment")
    view(page, "Rollout & flow")
    answer = explained(served, "sentiment", method="attention_rollout")
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    cells = page.locator("[role=gridcell]")
    np.testing.assert_allclose(laid(told(cells), weights.shape), weights, atol=EXACT)
    check_pieces(page, answer["attributions"][0], [TEXT])
    page.get_by_role("radio", name="flow").check()
    drawn(page)
    flow = explained(served, "sentiment", method="attention_flow")
    np.testing.assert_allclose(
        laid(told(cells), weights.shape), np.array(flow["attention"][0]["values"])[0, 0], atol=EXACT
    )


def test_what_the_server_says_of_too_much_is_shown(visit: Visit, served: Process) -> None:
    page = visit(served, expected="413")
    choose(page, "sentiment")
    page.get_by_role("textbox").first.fill("far too long " * 100)
    tab(page, "Attention")
    page.get_by_role("button", name="Rollout & flow").click()
    page.get_by_role("radio", name="flow").check()
    expect(page.get_by_role("alert").filter(has_text="attention_rollout")).to_be_visible()
    page.get_by_role("radio", name="rollout").check()
    drawn(page)


# Attributions


PIECES = """(all) => all.map((mark) => {
  const { start, end, score } = mark.dataset;
  return [mark.textContent, Number(start), Number(end), Number(score)];
})"""


def check_pieces(page: Page, attribution: Any, texts: list[str]) -> None:
    """The texts stand there whole, and each piece has the score of its characters."""
    assert page.locator(".attn-text").all_text_contents() == texts
    for index, text in enumerate(texts):
        pieces = page.locator(f".attn-text[data-text='{index}'] mark").evaluate_all(PIECES)
        own = sorted(
            (each for each in attribution["characters"] if each["text"] == index), key=lambda each: each["start"]
        )
        assert [words for words, *_ in pieces] == [text[each["start"] : each["end"]] for each in own]
        assert [tuple(places) for _, *places, _ in pieces] == [(each["start"], each["end"]) for each in own]
        np.testing.assert_allclose([score for *_, score in pieces], [each["score"] for each in own], atol=1e-5)


@pytest.mark.parametrize("method", ["gradient × input", "integrated gradients", "occlusion"])
def test_every_character_has_its_score(
    visit: Visit, served: Process, method: str, picture: Callable[[Page, str], None]
) -> None:
    name = method.replace(" × ", "_x_").replace(" ", "_")
    text = TEXT if name == "integrated_gradients" else SMILING
    page = opened(visit, served, "sentiment", text)
    view(page, "Attributions")
    page.get_by_role("radio", name=method).check()
    drawn(page)
    [attribution] = ask(served, PATH, {"model": "sentiment", "input": text, "method": name})["attributions"]
    check_pieces(page, attribution, [text])
    expect(page.locator(".attn-goal b")).to_have_text(attribution["target"]["label"])
    signs = page.locator(".attn-text mark").evaluate_all(
        "(all) => all.map((mark) => [mark.dataset.score < 0, mark.classList.contains('against')])"
    )
    assert signs
    assert all(negative == against for negative, against in signs)
    if name == "integrated_gradients":
        sums = attribution["completeness"]
        expect(page.locator(".attn-completeness")).to_contain_text("Complete" if sums["holds"] else "Not complete")
        expect(page.locator(".attn-completeness")).to_contain_text(f"{sums['sum']:+.4f}".replace("-", "−"))
        picture(page, "attention-attributions")


def test_an_answer_that_nobody_waits_for_any_more_is_given_up(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "sentiment")
    view(page, "Attributions")
    slow = "integrated_gradients"  # never answered here
    page.route("**" + PATH, lambda route: None if slow in str(route.request.post_data) else route.continue_())
    page.get_by_role("radio", name="integrated gradients").check()
    expect(page.locator(BUSY)).to_be_visible()
    with page.expect_event("requestfailed") as given_up:
        page.get_by_role("radio", name="occlusion").check()
    assert slow in str(given_up.value.post_data)
    drawn(page)
    check_pieces(page, explained(served, "sentiment", method="occlusion")["attributions"][0], [TEXT])


def test_another_label_can_be_asked_about(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "sentiment")
    view(page, "Attributions")
    likeliest = explained(served, "sentiment", method="gradient_x_input")["attributions"][0]["target"]["label"]
    options = page.get_by_label("Label", exact=True).locator("option").all_text_contents()[1:]
    other = next(label for label in options if label != likeliest)
    pick(page, "Label", other)
    [attribution] = explained(served, "sentiment", method="gradient_x_input", target={"label": other})["attributions"]
    expect(page.locator(".attn-goal b")).to_have_text(other)
    check_pieces(page, attribution, [TEXT])


def test_the_tag_of_a_token_can_be_asked_about(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "tags")
    view(page, "Attributions")
    pick(page, "Token", "2")
    [attribution] = explained(served, "tags", method="gradient_x_input", target={"token": 2})["attributions"]
    check_pieces(page, attribution, [TEXT])


def test_an_answer_in_a_context_is_explained_over_both_texts(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "span")
    page.get_by_label("Question").fill("What was dull?")
    page.get_by_label("Context").fill(TEXT)
    run(page, "Answer")
    tab(page, "Attention")
    drawn(page)
    sent = Sent(page, PATH)
    view(page, "Attributions")
    [body] = sent.bodies
    assert body["input"] == ["What was dull?", TEXT]
    [attribution] = ask(served, PATH, body)["attributions"]
    check_pieces(page, attribution, body["input"])


def test_what_was_written_is_explained_token_by_token(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    converse(page, "Name a city in France.", tokens=5)
    over(page)
    tab(page, "Attention")
    drawn(page)
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


# Alignment


@pytest.mark.parametrize("model", ["translator", "recurrent"])
def test_an_alignment_has_a_cell_for_every_pair_of_tokens(
    visit: Visit, served: Process, model: str, picture: Callable[[Page, str], None]
) -> None:
    page = visit(served)
    choose(page, model)
    sent = Sent(page, PATH)
    run(page, "Write")
    [body] = sent.bodies
    answer = ask(served, PATH, body)
    [cross] = [entry for entry in answer["attention"] if entry["kind"] == "cross"]
    mean = np.array(cross["values"]).mean(axis=(0, 1))
    written, read = mean.shape
    cells = page.locator(".attn-alignment [role=gridcell]")
    expect(cells).to_have_count(written * read)
    np.testing.assert_allclose(laid(told(cells), mean.shape), mean, atol=EXACT)
    labels = page.locator(".attn-alignment th[scope=row]").all_text_contents()
    assert len(labels) == written
    assert labels[-1] == "end", "the last row writes what comes after all that was written"
    if model == "translator":
        picture(page, "attention-alignment")
        tab(page, "Attention")
        drawn(page)
        expect(page.get_by_role("group", name="Attention").get_by_label("cross")).to_be_checked()


# For everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_serious_fault_for_whoever_cannot_see_it(visit: Visit, served: Process, scheme: str) -> None:
    page = opened(visit, served, "sentiment", scheme=scheme)
    for name in ("Heads", "Heatmap", "All heads", "Rollout & flow", "Attributions"):
        view(page, name)
        audited(page, name)
    view(page, "Heads")
    page.locator("[data-side=from]").nth(2).hover()
    audited(page, "a token that is pointed at")


def test_narrow_screens_scroll_what_is_wide_and_nothing_else(visit: Visit, served: Process) -> None:
    page = opened(visit, served, "minilm")
    page.set_viewport_size({"width": 400, "height": 760})
    for name in ("Heads", "Heatmap", "All heads", "Rollout & flow"):
        view(page, name)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
