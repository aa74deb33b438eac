"""The tab Decide: questions that a form writes, their answers, and code that asks the same."""

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.playground import Sent, Visit, assert_accessible, choose, press, tab
from tests.support.processes import Process

STATE = 'It\'s late; "why"? `date` $HOME \\ 😀'


def decide(page: Page) -> list[str]:
    """Submits the form; the names of the answered questions."""
    press(page, "Decide")
    expect(page.locator("#panel-decide form")).to_have_attribute("aria-busy", "false")
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
    const drawn = drawAnswer("a", { instructions: "" }, answer, { label_mass, argmax_is_label });
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
    for model, said in (("texts", "the tab Decide has a form"), ("spans", "The page API lists the routes")):
        choose(page, model)
        expect(page.locator("#panel-try")).to_contain_text(said)
        expect(page.locator("#copy")).to_be_hidden()
        tab(page, "Attention")
        expect(page.locator("#panel-attention")).to_contain_text("explains no answers")
        tab(page, "Try")
    choose(page, "texts")
    tab(page, "Decide")
    assert decide(page) == ["topic", "complaint", "urgency"]
    expect(page.locator(".decision .hint").first).to_contain_text("label mass 100 %")
