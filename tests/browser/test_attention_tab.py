"""The weights that the tab Attention draws equal those of POST /v1/explain, cell by cell."""

import base64
from collections.abc import Callable

import numpy as np
import pytest
from playwright.sync_api import Page, ViewportSize, expect

from tests.browser.attention import (
    PATH,
    TEXT,
    TOLERANCE,
    as_matrix,
    check_pieces,
    explained,
    open_tab,
    pick,
    read_weights,
    view,
    wait_until_drawn,
)
from tests.browser.playground import Sent, Visit, ask, assert_accessible, choose, run, tab
from tests.support.processes import Process

WHOLE_VIEW: ViewportSize = {"width": 1100, "height": 860}  # of a picture


def test_a_heatmap_has_a_cell_for_every_weight(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Heatmap")
    pick(page, "Layer", "3")
    pick(page, "Head", "5")
    answer = explained(served, "sentiment", layers=[3], heads=[5])
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    cells = page.locator("[role=grid] [data-weight]")
    np.testing.assert_allclose(as_matrix(read_weights(cells), weights.shape), weights, atol=TOLERANCE)
    assert len(page.locator(".attn-table th[scope=row]").all()) == len(answer["tokens"])
    cells.nth(3).hover()
    expect(page.locator(".attn-readout b")).to_have_text([answer["tokens"][0]["token"], answer["tokens"][3]["token"]])
    picture(page, "attention-heatmap")


def test_the_keyboard_walks_from_cell_to_cell(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    page.get_by_role("button", name="Heads", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    wait_until_drawn(page)
    expect(page.get_by_role("button", name="Heatmap")).to_be_focused()
    for _ in range(3):  # past the fields for the layer and the head
        page.keyboard.press("Tab")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    at = page.locator(":focus")
    assert (at.get_attribute("data-row"), at.get_attribute("data-column")) == ("2", "1")
    expect(page.locator(".attn-readout")).to_have_attribute("data-weight", str(at.get_attribute("data-weight")))


def test_a_long_text_has_a_pixel_for_every_weight(visit: Visit, served: Process) -> None:
    text = "It was dull and far too long, but I loved the boats in the old harbour. " * 7
    page = open_tab(visit, served, "sentiment", text)
    view(page, "Heatmap")
    answer = ask(served, PATH, {"model": "sentiment", "input": text, "layers": [0], "heads": [0]})
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    assert len(weights) > 100
    size = page.locator(".attn-pixels canvas").evaluate("(canvas) => [canvas.height, canvas.width]")
    assert tuple(size) == weights.shape
    page.locator(".attn-pixels").focus()
    for key in ("ArrowDown", "ArrowDown", "End"):
        page.keyboard.press(key)
    [(row, column, weight)] = read_weights(page.locator(".attn-readout"))
    assert (row, column) == (2, len(weights) - 1)
    assert weight == pytest.approx(weights[2, -1], abs=TOLERANCE)
    strongest = page.locator(".attn-pixels canvas").evaluate(DARKEST)
    assert strongest == int(weights.argmax())


# The index of the darkest pixel. In the light theme it has the largest weight.
DARKEST = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const light = Array.from({ length: data.length / 4 }, (_, at) => data[4 * at] + data[4 * at + 1] + data[4 * at + 2]);
  return light.indexOf(Math.min(...light));
}"""


def test_lines_are_those_of_the_chosen_heads(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Heads")
    pick(page, "Layer", "2")
    page.get_by_role("button", name="Head 4").click()
    wait_until_drawn(page)
    answer = explained(served, "sentiment", layers=[2], heads=[0, 4])
    both = np.array(answer["attention"][0]["values"])[0]
    for head, weights in zip((0, 4), both, strict=True):
        lines = page.locator(f".attn-of-head[data-head='{head}'] line")
        np.testing.assert_allclose(as_matrix(read_weights(lines), weights.shape), weights, atol=TOLERANCE)
        opacity = [
            float(each)
            for each in lines.evaluate_all("(all) => all.map((line) => line.getAttribute('stroke-opacity'))")
        ]
        np.testing.assert_allclose(opacity, weights.ravel(), atol=1e-4)
    page.set_viewport_size(WHOLE_VIEW)
    page.locator("[data-side=from]").nth(8).hover()
    picture(page, "attention-heads")


def visible_lines(page: Page) -> list[tuple[int, int, float]]:
    """Row, column and weight of each visible line."""
    script = """(all) => all.forEach((line) => {
      line.classList.toggle("seen", getComputedStyle(line.parentNode).display !== "none");
    })"""
    page.locator(".attn-lines line").evaluate_all(script)
    return read_weights(page.locator(".attn-lines line.seen"))


def test_hovering_a_token_shows_only_its_lines(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Heads")
    weights = np.array(explained(served, "sentiment", layers=[0], heads=[0])["attention"][0]["values"])[0, 0]
    page.locator("[data-side=from][data-index='2']").hover()
    assert [(row, column) for row, column, _ in visible_lines(page)] == [(2, column) for column in range(len(weights))]
    page.locator("[data-side=to][data-index='1']").focus()
    np.testing.assert_allclose([weight for _, _, weight in visible_lines(page)], weights[:, 1], atol=TOLERANCE)
    page.keyboard.press("Enter")  # keeps them
    page.get_by_role("button", name="Heatmap").focus()
    page.mouse.move(1, 1)
    assert len(visible_lines(page)) == len(weights)


def test_all_heads_have_a_small_map_and_each_opens_large(
    visit: Visit, served: Process, picture: Callable[[Page, str], None]
) -> None:
    page = open_tab(visit, served, "minilm")
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
    np.testing.assert_allclose(shown, values.max(axis=1), atol=0.01)  # float16 weights, drawn in 256 shades
    assert {(body["encoding"], body["dtype"]) for body in sent.bodies} == {("base64", "float16")}
    assert sorted(layer for body in sent.bodies for layer in body.get("layers", range(layers))) == list(range(layers))
    page.set_viewport_size(WHOLE_VIEW)
    picture(page, "attention-all-heads")
    page.get_by_role("button", name="Layer 2, head 7").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_until_drawn(page)
    expect(page.locator("[role=gridcell]").first).to_be_focused()
    cells = as_matrix(read_weights(page.locator("[role=gridcell]")), (rows, columns))
    np.testing.assert_allclose(cells, np.array(entry["values"])[3, 7], atol=TOLERANCE)


def test_float16_values_are_decoded_exactly(visit: Visit, served: Process) -> None:
    page = visit(served)
    numbers = np.concatenate([np.arange(0, 1 << 16, 97), [0x7C00, 0x0001, 0x03FF, 0x0400]]).astype("<u2").view("<f2")
    data = base64.b64encode(numbers.tobytes()).decode()
    script = """async (data) => {
      const { decodeNumbers } = await import("/web/explanation.js");
      return Array.from(decodeNumbers(data, "float16"), String);
    }"""
    read = np.array([float(text.replace("Infinity", "inf")) for text in page.evaluate(script, data)])
    np.testing.assert_array_equal(read, numbers.astype(float))


def test_only_the_heads_that_are_drawn_are_requested(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "sentiment")
    sent = Sent(page, PATH)
    tab(page, "Attention")
    wait_until_drawn(page)
    view(page, "Heads")
    _, layout, first = sent.bodies
    assert (layout["input"], layout["top_k"]) == ("a", 1)
    assert (first["layers"], first["heads"]) == ([0], [0])
    page.get_by_role("button", name="Head 1", exact=True).click()
    wait_until_drawn(page)
    page.get_by_role("button", name="Head 1", exact=True).click()
    wait_until_drawn(page)
    assert [body["heads"] for body in sent.bodies[3:]] == [[0, 1]], (
        "weights that were fetched before are not requested again"
    )


# Paths through all layers


def test_rollout_shows_the_row_of_the_answer_and_every_other_row(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    view(page, "Rollout & flow")
    answer = explained(served, "sentiment", method="attention_rollout")
    weights = np.array(answer["attention"][0]["values"])[0, 0]
    cells = page.locator("[role=gridcell]")
    np.testing.assert_allclose(as_matrix(read_weights(cells), weights.shape), weights, atol=TOLERANCE)
    check_pieces(page, answer["attributions"][0], [TEXT])
    page.get_by_role("radio", name="flow").check()
    wait_until_drawn(page)
    flow = explained(served, "sentiment", method="attention_flow")
    np.testing.assert_allclose(
        as_matrix(read_weights(cells), weights.shape), np.array(flow["attention"][0]["values"])[0, 0], atol=TOLERANCE
    )


def test_the_error_for_a_text_that_is_too_long_is_shown(visit: Visit, served: Process) -> None:
    page = visit(served, expected="413")
    choose(page, "sentiment")
    page.get_by_role("textbox").first.fill("far too long " * 100)
    tab(page, "Attention")
    page.get_by_role("button", name="Rollout & flow").click()
    page.get_by_role("radio", name="flow").check()
    expect(page.get_by_role("alert").filter(has_text="attention_rollout")).to_be_visible()
    page.get_by_role("radio", name="rollout").check()
    wait_until_drawn(page)


# Alignments


@pytest.mark.parametrize("model", ["translator", "recurrent"])
def test_an_alignment_has_a_cell_for_every_pair_of_tokens(
    visit: Visit, served: Process, model: str, picture: Callable[..., None]
) -> None:
    page = visit(served)
    choose(page, model)
    sent = Sent(page, PATH)
    run(page, "Generate")
    [body] = sent.bodies
    answer = ask(served, PATH, body)
    [cross] = [entry for entry in answer["attention"] if entry["kind"] == "cross"]
    mean = np.array(cross["values"]).mean(axis=(0, 1))
    written, read = mean.shape
    cells = page.locator(".attn-alignment [role=gridcell]")
    expect(cells).to_have_count(written * read)
    np.testing.assert_allclose(as_matrix(read_weights(cells), mean.shape), mean, atol=TOLERANCE)
    labels = page.locator(".attn-alignment th[scope=row]").all_text_contents()
    assert len(labels) == written
    assert labels[-1] == "end", "the last row is the token after the written text"
    if model == "translator":
        picture(page, "attention-alignment", "transformer")
        tab(page, "Attention")
        wait_until_drawn(page)
        expect(page.get_by_role("group", name="Attention").get_by_label("cross")).to_be_checked()


# Accessibility and narrow screens


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_serious_accessibility_violation(visit: Visit, served: Process, scheme: str) -> None:
    page = open_tab(visit, served, "sentiment", scheme=scheme)
    for name in ("Heads", "Heatmap", "All heads", "Rollout & flow", "Attributions"):
        view(page, name)
        assert_accessible(page, name)
    view(page, "Heads")
    page.locator("[data-side=from]").nth(2).hover()
    assert_accessible(page, "a hovered token")


def aborted(server: Process) -> float:
    return server.rest().total("requests_total", task="explain", outcome="aborted")


def test_a_computation_shows_how_much_is_done_and_its_cancellation_ends_it(visit: Visit, served: Process) -> None:
    page, before = open_tab(visit, served, "sentiment"), aborted(served)
    page.get_by_label("Steps").fill("500")
    page.get_by_label("Steps").press("Enter")
    bar = page.get_by_role("progressbar", name="Share of the work done")
    expect(bar).to_be_visible()
    assert 0 < float(bar.get_attribute("value") or 0) < 1
    expect(page.locator(".attn-share")).to_contain_text("%")
    assert_accessible(page, "a computation")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".attn-place")).to_contain_text("Cancelled after")
    expect(bar).to_be_hidden()
    served.until(lambda: aborted(served) == before + 1)
    assert served.rest().total("requests_running") == 0
    page.get_by_label("Steps").fill("20")
    page.get_by_label("Steps").press("Enter")
    wait_until_drawn(page)
    expect(page.locator(".attn-waiting")).to_be_hidden()


def test_a_computation_shows_its_time_and_can_be_cancelled(visit: Visit, served: Process) -> None:
    page = open_tab(visit, served, "sentiment")
    expect(page.locator(".attn-views [aria-pressed=true]")).to_have_text("Attributions")
    page.route("**" + PATH, lambda _: None)  # never answered
    page.get_by_label("Explained text").fill("A dull film.")
    with page.expect_event("requestfailed") as aborted:
        page.get_by_role("button", name="Explain", exact=True).click()
        expect(page.locator(".attn-waiting")).to_contain_text("s")
        page.get_by_role("button", name="Cancel").click()
    assert "A dull film." in str(aborted.value.post_data)
    expect(page.locator(".attn-place")).to_contain_text("Cancelled after")
    assert_accessible(page, "cancelled")
    page.unroute("**" + PATH)
    page.get_by_role("button", name="Compute again").click()
    expect(page.locator(".attn-text")).to_have_text("A dull film.")
