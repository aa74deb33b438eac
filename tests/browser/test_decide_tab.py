"""The tab Decide: questions that a form writes, their answers, and code that asks the same."""

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.attention import EMOJI_TEXT, TEXT, check_pieces
from tests.browser.playground import TIMEOUT_MS, Sent, Visit, ask, assert_accessible, choose, press, tab
from tests.support.calibrations import HIGH_BINS, one_map
from tests.support.processes import Process

PATH = "/v1/systemone"
RELIABILITY_PATH = "/models/judge/v1/decisions/calibration"
STATE = 'It\'s late; "why"? `date` $HOME \\ 😀'


def decide(page: Page) -> list[str]:
    """Submits the form; the names of the answered questions."""
    press(page, "Decide")
    expect(page.locator("#panel-decide form")).to_have_attribute("aria-busy", "false", timeout=TIMEOUT_MS)
    expect(page.locator("#panel-decide form > .error")).to_be_hidden()
    return [each.get_attribute("aria-label") or "" for each in page.locator(".decision").all()]


def question(page: Page, number: int) -> Locator:
    return page.get_by_role("group", name=f"Question {number}", exact=True)


def test_questions_are_answered_with_a_bar_for_every_option(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    assert decide(page) == ["topic", "complaint", "urgency"]
    expect(page.locator(".decision").first).to_be_in_viewport()  # though the button is far below
    for name, options in (("topic", 3), ("complaint", 2), ("urgency", 3)):
        answer = page.get_by_role("region", name=name, exact=True)
        shares = [float(each.rstrip(" %")) for each in answer.locator(".figure").all_text_contents()]
        assert len(shares) == options
        assert sum(shares) == pytest.approx(100, abs=0.2)
        top = answer.locator("li.top")
        expect(top).to_have_count(1)
        assert float((top.locator(".figure").text_content() or "").rstrip(" %")) == max(shares)
        expect(answer.locator(".headline")).to_contain_text(top.locator(".name").text_content() or "missing")
        expect(answer.locator(".hint").first).to_have_text(re.compile(r"^Confidence [\d.]+ % · label mass [\d.]+ %$"))


def test_the_request_has_what_the_form_says(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    press(page, "Remove question 3")
    expect(page.get_by_role("button", name="Add a question")).to_be_focused()
    press(page, "Remove question 1")
    expect(question(page, 1).get_by_label("Name")).to_have_value("complaint")
    press(page, "Add a question")
    added = question(page, 2)
    expect(added.get_by_label("Instructions")).to_be_focused()
    page.keyboard.type("How good is it?")
    expect(added.get_by_label("Orders")).to_be_hidden()
    added.get_by_label("Kind").select_option("Choice")
    added.get_by_label("Options, one per line").fill("a: first: of two\n\n b \n__proto__")
    added.get_by_label("Orders").fill("3")
    added.get_by_label("Name").fill("better")
    press(page, "Add a question")
    question(page, 3).get_by_label("Kind").select_option("Score")
    question(page, 3).get_by_label("Levels, one per line").fill("bad\ngood")
    page.get_by_label("State").fill(STATE)
    sent = Sent(page, "/v1/systemone")
    assert decide(page) == ["complaint", "better", "question_3"]
    criteria = json.loads('{"a": "first: of two", "b": null, "__proto__": null}')
    assert sent.bodies == [
        {
            "model": "smollm2",
            "state": STATE,
            "questions": {
                "complaint": {"type": "noul", "instructions": "Is the text a complaint?"},
                "better": {
                    "type": "choice",
                    "instructions": "How good is it?",
                    "criteria": criteria,
                    "permutations": 3,
                },
                "question_3": {"type": "score", "instructions": "", "criteria": ["bad", "good"]},
            },
        }
    ]


def test_equal_names_are_refused_before_they_are_sent(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    sent, error = Sent(page, "/v1/systemone"), page.locator("#panel-decide form > .error")
    question(page, 1).get_by_label("Options, one per line").fill("a\nb: one\nb: two")
    press(page, "Decide")
    expect(error).to_have_text("Question 1: the option b occurs twice.")
    question(page, 1).get_by_label("Name").fill("urgency")
    press(page, "Decide")
    expect(error).to_have_text("Two questions have the name urgency.")
    assert not sent.bodies


def test_only_models_that_decide_are_listed_and_labels_are_their_own(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "minilm")
    models = page.get_by_label("Model", exact=True).locator("option")
    everything = set(models.all_text_contents())
    tab(page, "Decide")
    described = served.get("/v1/models").json()["data"]
    able = {one["id"] for one in described if "decisions" in one["tasks"]}
    assert set(models.all_text_contents()) == able < everything
    choose(page, "sentiment")
    expect(page.locator("#panel-decide")).to_contain_text("They are: NEGATIVE, POSITIVE.")
    page.get_by_label("State").fill("A warm, funny, beautifully acted film.")
    assert decide(page) == ["label", "is_it"]
    expect(page.locator(".decision .headline")).to_have_text(["POSITIVE", "yes"])
    expect(page.locator(".decision .low")).to_have_count(0)
    tab(page, "Try")
    assert set(models.all_text_contents()) == everything


LOW_MASS = """async (diagnostics) => {
  const { drawAnswer } = await import("/web/decision.js");
  const answer = { type: "noul", noul: 0.9, confidence: 0.9, probabilities: { yes: 0.9, no: 0.1 } };
  return diagnostics.map(([label_mass, argmax_is_label]) => {
    const asked = { question: { instructions: "" }, state: "" };
    const drawn = drawAnswer("a", asked, answer, { label_mass, argmax_is_label });
    return drawn.querySelector(".low")?.textContent ?? "";
  });
}"""


def test_a_low_mass_of_the_options_is_said(visit: Visit, served: Process) -> None:
    page = visit(served)
    said = page.evaluate(LOW_MASS, [[1, True], [0.5, True], [0.25, True], [0.6, False]])
    assert said == [
        "",
        "",
        "Low label mass: answers that are none of the options have 75.0 % of the probability.",
        "The likeliest answer of the model is none of the options.",
    ]


def test_the_copied_code_of_questions_runs(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    question(page, 1).get_by_label("Orders").fill("2")
    page.get_by_label("State").fill(STATE)
    code = page.locator("#copy-code")
    expect(code).to_contain_text("permutations")
    by_curl = json.loads(output("bash", code.text_content() or ""))
    press(page, "Python")
    expect(code).to_contain_text("import httpx")
    assert f"{by_curl['answers']}" in output(sys.executable, code.text_content() or "")
    press(page, "openai")
    expect(code).to_contain_text("client.decisions.create(")
    program = (code.text_content() or "").replace("print(each.to_dict())", "print(each.to_json(indent=None))")
    answers = [json.loads(line) for line in output(sys.executable, program).splitlines()]
    topic, complaint, urgency = by_curl["answers"].values()
    assert {each["value"]: each["probability"] for each in answers[0]["probabilities"]} == topic["probabilities"]
    assert (answers[1]["probability"], answers[2]["score"]) == (complaint["noul"], urgency["score"])
    tab(page, "Try")
    expect(page.get_by_role("button", name="openai", exact=True)).to_be_hidden()
    expect(code).to_contain_text("import httpx")


def test_what_counts_as_yes_is_in_the_request_and_in_its_code(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    press(page, "Remove question 1")
    press(page, "Remove question 2")
    asked, code = question(page, 1), page.locator("#copy-code")
    press(page, "openai")
    expect(code).to_contain_text("client.decisions.create(")
    asked.get_by_label("Yes means").fill(" the writer isn't content ")
    expect(page.get_by_role("button", name="openai", exact=True)).to_be_hidden()  # its questions have no criteria
    expect(code).to_contain_text('"criteria": {"true": "the writer isn\'t content"}')
    page.keyboard.press("Tab")
    expect(asked.get_by_label("No means")).to_be_focused()
    page.keyboard.type("praise")
    sent = Sent(page, PATH)
    assert decide(page) == ["complaint"]
    criteria = {"true": "the writer isn't content", "false": "praise"}
    [body] = sent.bodies
    assert body["questions"]["complaint"]["criteria"] == criteria
    shares = ask(served, PATH, body)["answers"]["complaint"]["probabilities"]
    del body["questions"]["complaint"]["criteria"]
    assert ask(served, PATH, body)["answers"]["complaint"]["probabilities"] != shares
    for kind, program in (("curl", "bash"), ("Python", sys.executable)):
        press(page, kind)
        expect(code).to_contain_text("praise")
        assert f"{shares['yes']}" in output(program, code.text_content() or "")
    asked.get_by_label("Kind").select_option("Score")
    expect(asked.get_by_label("Yes means")).to_be_hidden()


@pytest.mark.parametrize(("model", "text"), [("smollm2", TEXT), ("sentiment", EMOJI_TEXT), ("texts", TEXT)])
def test_an_answer_is_explained_by_the_characters_of_the_text(
    visit: Visit, served: Process, model: str, text: str
) -> None:
    page = visit(served)
    choose(page, model)
    tab(page, "Decide")
    page.get_by_label("State").fill(text)
    question(page, 2).get_by_label("Explain the answer by the text").check()
    expect(page.locator("#copy-code")).to_contain_text('"explain": {}')
    sent = Sent(page, PATH)
    names = decide(page)
    [body] = sent.bodies
    assert [name for name, each in body["questions"].items() if "explain" in each] == [names[1]]
    answer = ask(served, PATH, body)["answers"][names[1]]
    [attribution] = answer["explanation"]["attributions"]
    check_pieces(page, attribution, [text])
    region = page.get_by_role("region", name=names[1], exact=True)
    expect(region.locator(".attn-goal b")).to_have_text(attribution["target"]["option"])
    expect(page.locator(".explained")).to_have_count(1)
    question(page, 2).get_by_label("Explain the answer by the text").uncheck()
    decide(page)
    expect(page.locator(".explained")).to_have_count(0)


def test_fields_that_a_model_does_not_read_are_neither_shown_nor_sent(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    tab(page, "Decide")
    question(page, 1).get_by_label("Explain the answer by the text").check()
    question(page, 2).get_by_label("Yes means").fill("unhappy")
    choose(page, "sentiment")
    expect(question(page, 1).get_by_label("Explain the answer by the text")).to_be_visible()
    expect(question(page, 2).get_by_label("Yes means")).to_be_hidden()
    choose(page, "texts")
    expect(question(page, 2).get_by_label("Yes means")).to_be_hidden()
    question(page, 1).get_by_label("Explain the answer by the text").uncheck()
    sent = Sent(page, PATH)
    assert decide(page) == ["topic", "complaint", "urgency"]
    topic, complaint, _ = sent.bodies[0]["questions"].values()
    assert "explain" not in topic
    assert "criteria" not in complaint
    choose(page, "smollm2")
    expect(question(page, 2).get_by_label("Yes means")).to_have_value("unhappy")


PLACES = """(drawn) => {
  const [ideal, ...points] = [...drawn.querySelectorAll("figure > svg :is(.ideal, .before rect, .after circle)")];
  const [x1, y1, x2, y2] = ["x1", "y1", "x2", "y2"].map((name) => ideal[name].baseVal.value);
  return points.map((point) => {
    const box = point.getBBox();
    const place = [(box.x + box.width / 2 - x1) / (x2 - x1), (box.y + box.height / 2 - y1) / (y2 - y1)];
    return [point.tagName, ...place.map((share) => Number(share.toFixed(3)))];
  });
}"""


def test_the_reliability_of_a_calibration_is_drawn(visit: Visit, calibrated: Process) -> None:
    page = visit(calibrated)
    tab(page, "Decide")
    press(page, "Add a question")
    question(page, 3).get_by_label("Kind").select_option("Score")
    question(page, 3).get_by_label("Levels, one per line").fill("negative\npositive")
    sent = Sent(page, RELIABILITY_PATH)
    answered, plain = decide(page), page.get_by_role("region", name="question_3", exact=True)
    assert sent.bodies == [None]  # once for all answers
    assert answered[-1] == "question_3"
    expect(plain.locator(".reliability")).to_have_count(0)
    drawn = page.get_by_role("region", name="label", exact=True).locator(".reliability")
    expect(drawn.locator("> summary")).to_have_text("Reliability: calibration error 0.1 before, 0.1 after")
    expect(drawn.get_by_role("img")).to_be_hidden()
    drawn.locator("> summary").click()
    expect(drawn.get_by_role("img", name="Reliability diagram")).to_be_visible()
    after = one_map()["after"]["bins"]
    pairs = [("rect", each) for each in HIGH_BINS] + [("circle", each) for each in after]
    assert drawn.evaluate(PLACES) == [[tag, each["confidence"], each["accuracy"]] for tag, each in pairs]
    drawn.get_by_text("As a table").click()
    cells = drawn.locator("tbody tr").all_inner_texts()
    row = "{confidence:.1%}\t{accuracy:.1%}\t{answers}"
    expected = ["Before", *(row.format(**each) for each in HIGH_BINS), "After calibration"]
    assert [cell.replace(" %", "%").strip() for cell in cells] == expected + [row.format(**each) for each in after]
    expect(drawn.locator(".hint")).to_contain_text("Measured on 50 labelled answers")
    without = page.get_by_role("region", name="is_it", exact=True).locator(".reliability")
    without.locator("> summary").click()
    expect(without).to_contain_text("has no bins to draw; polyhead calibrate writes them")


FOUND = """async (names) => {
  const { Calibrations } = await import("/web/reliability.js");
  const paths = [];
  const request = async (path) => {
    paths.push(path);
    if (paths.length === 1) throw new Error("not now");
    return { maps: [{ name: `fit ${paths.length}`, kind: "choice" }, { name: "fit 2", kind: "score" }] };
  };
  const calibrations = new Calibrations(request);
  const found = [];
  for (const calibration of names) {
    const finding = calibrations.find("judge", { type: "choice", calibration });
    const map = await finding.catch(({ message }) => ({ name: message }));
    found.push(`${map?.name} ${map?.kind}, ${paths.length}`);
  }
  return found;
}"""


def test_the_calibration_of_a_model_that_was_loaded_again_is_read_again(visit: Visit, calibrated: Process) -> None:
    """The names of maps in answers, and for each the map that is found and the number of requests up to then."""
    found = visit(calibrated).evaluate(FOUND, ["fit 2", "fit 2", "fit 2", "fit 3", "fit 2"])
    assert found == [
        "not now undefined, 1",
        "fit 2 choice, 2",
        "fit 2 choice, 2",
        "fit 3 choice, 3",
        "undefined undefined, 4",
    ]


def test_an_answer_is_complete_without_its_reliability(visit: Visit, calibrated: Process) -> None:
    page = visit(calibrated, expected="status of 403")
    refusal = {"status": 403, "json": {"error": {"message": "the key may not list models"}}}
    page.route(f"**{RELIABILITY_PATH}", lambda route: route.fulfill(**refusal))
    tab(page, "Decide")
    assert decide(page) == ["label", "is_it"]
    expect(page.locator(".decision").first).to_contain_text("is not known: the key may not list models")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_explanations_and_diagrams_need_no_mouse_and_no_wide_screen(
    visit: Visit, calibrated: Process, scheme: str
) -> None:
    page = visit(calibrated, scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 720})
    tab(page, "Decide")
    question(page, 1).get_by_label("Options, one per line").focus()
    page.keyboard.press("Tab")
    expect(question(page, 1).get_by_label("Explain the answer by the text")).to_be_focused()
    page.keyboard.press("Space")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".reliability")).to_have_count(2)
    page.locator(".explained [tabindex='0']").focus()
    page.keyboard.press("End")
    expect(page.locator(".attn-readout")).to_contain_text("counts")
    for summary in ("Reliability:", "As a table"):
        page.keyboard.press("Tab")
        focused = page.locator("summary:focus")
        expect(focused).to_contain_text(summary)
        page.keyboard.press("Enter")
    expect(page.get_by_role("cell", name="62.0 %")).to_be_visible()
    assert_accessible(page, "reliability")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390


def output(program: str, code: str) -> str:
    return subprocess.run([program, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits_a_narrow_screen(visit: Visit, served: Process, scheme: str) -> None:
    page = visit(served, scheme=scheme)
    choose(page, "smollm2")
    tab(page, "Decide")
    decide(page)
    assert_accessible(page, "decisions")
    page.set_viewport_size({"width": 360, "height": 720})
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    page.reload()
    expect(page.locator("#tabs > div [aria-selected=true]")).to_have_text("Decide")
    page.keyboard.press("Alt+i")
    expect(page.get_by_label("State")).to_be_focused()
    page.keyboard.press("Control+Enter")
    expect(page.locator(".decision")).to_have_count(3)


def test_models_without_a_form_of_their_own_are_shown(visit: Visit, served: Process) -> None:
    page = visit(served)
    for model, said, explained in (
        ("texts", "the tab Decide has a form", "explained in the tab Decide"),
        ("spans", "The page API lists the routes", "explains no answers"),
    ):
        choose(page, model)
        expect(page.locator("#panel-try")).to_contain_text(said)
        expect(page.locator("#copy")).to_be_hidden()
        tab(page, "Attention")
        expect(page.locator("#panel-attention")).to_contain_text(explained)
        tab(page, "Try")
    choose(page, "texts")
    tab(page, "Decide")
    assert decide(page) == ["topic", "complaint", "urgency"]
    expect(page.locator(".decision .hint").first).to_contain_text("label mass 100 %")
