"""Chat with a generator, and continuation of a text."""

import itertools
from math import exp

from playwright.sync_api import Page, expect

from tests.browser.playground import TIMEOUT_MS, Sent, Visit, ask, choose, converse, press, run, wait_for_answer
from tests.support.processes import Process

PATH = "/v1/chat/completions"
# The text of the answer at every frame, and whether the button to stop it is visible.
FRAMES = """() => {
  window.frames_seen = [];
  const look = () => {
    const tokens = document.querySelector(".turn.assistant .tokens");
    const stop = [...document.querySelectorAll(".chat button")].find((each) => each.textContent === "Stop");
    if (tokens) window.frames_seen.push([tokens.textContent, !stop.hidden]);
    requestAnimationFrame(look);
  };
  look();
}"""


def open_chat(visit: Visit, served: Process) -> Page:
    page = visit(served)
    choose(page, "smollm2")
    return page


def test_an_answer_grows_while_it_is_written(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    page.evaluate(FRAMES)
    answer = converse(page, "Name three rivers in Europe.")
    wait_for_answer(page)
    frames = page.evaluate("() => window.frames_seen")
    growing = [text for text, running in frames if running]
    assert len(set(growing)) > 5, "the answer appeared all at once"
    assert all(after.startswith(before) for before, after in itertools.pairwise(growing))
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Name three rivers in Europe."}]}
    expected = ask(served, PATH, body | {"max_tokens": 24, "temperature": 0})
    assert answer.text_content() == expected["choices"][0]["message"]["content"]
    expect(page.locator(".turn.assistant .hint")).to_contain_text("24 tokens")


def test_a_stopped_answer_stays_and_the_server_aborts_it(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    before = served.rest().total("requests_total", model="smollm2", outcome="aborted")
    answer = converse(page, "Tell me a long story.", tokens=2000, temperature=1)
    expect(page.locator(".token").nth(3)).to_be_visible(timeout=TIMEOUT_MS)
    press(page, "Stop")
    wait_for_answer(page)
    expect(page.locator(".turn.assistant .hint")).to_contain_text("stopped")
    kept = answer.text_content()
    after = served.rest().total("requests_total", model="smollm2", outcome="aborted")
    assert after == before + 1
    assert answer.text_content() == kept != ""


def test_an_answer_is_regenerated_for_the_same_conversation(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    page.get_by_label("System prompt").fill("You are a pirate.")
    sent = Sent(page, PATH)
    converse(page, "Hello!", tokens=8)
    wait_for_answer(page)
    press(page, "Regenerate")
    expect(page.get_by_role("button", name="Regenerate")).to_be_hidden()
    wait_for_answer(page)
    assert len(sent.bodies) == 2
    assert sent.bodies[0] == sent.bodies[1]
    assert [turn["role"] for turn in sent.bodies[0]["messages"]] == ["system", "user"]
    expect(page.locator(".turn.assistant")).to_have_count(1)
    converse(page, "And now?", tokens=8)
    wait_for_answer(page)
    assert [turn["role"] for turn in sent.bodies[2]["messages"]] == ["system", "user", "assistant", "user"]


def test_token_probabilities_are_shown_by_pointer_and_by_keyboard(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    sent = Sent(page, PATH)
    converse(page, "Why is the sky blue?", tokens=12)
    wait_for_answer(page)
    body = {name: value for name, value in sent.bodies[0].items() if not name.startswith("stream")}
    token_logprobs = ask(served, PATH, body)["choices"][0]["logprobs"]["content"]
    tokens, tip = page.locator(".token"), page.get_by_role("tooltip")
    assert tokens.all_text_contents() == [each["token"] for each in token_logprobs]
    expect(tip).to_be_hidden()
    tokens.nth(4).hover()
    expect(tip).to_be_visible()
    shown = {
        "".join(row.locator("code").all_text_contents()): row.locator(".figure").text_content()
        for row in tip.locator("li").all()
    }
    for each in token_logprobs[4]["top_logprobs"]:
        share, name = exp(each["logprob"]), each["token"].replace(" ", "␣").replace("\n", "⏎")
        assert shown[name] == (f"{share * 100:.1f} %" if 0.001 <= share < 0.9995 else shown[name])
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_contain_text(token_logprobs[1]["token"].replace(" ", "␣"))
    assert tokens.nth(1).get_attribute("aria-describedby") == tip.get_attribute("id")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_generator_without_a_template_continues_a_text(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "writer")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("6")
    prompt = page.get_by_label("Prompt").input_value()
    answer = run(page, "Continue")
    expect(answer.locator(".given")).to_have_text(prompt)
    expect(answer.locator(".hint")).to_contain_text("tokens")
    body = {"model": "writer", "prompt": prompt, "max_tokens": 6, "temperature": 0}
    assert answer.locator(".tokens").text_content() == ask(served, "/v1/completions", body)["choices"][0]["text"]
    assert answer.locator(".token").count() > 1


def test_an_error_of_the_server_is_shown_beside_the_form(visit: Visit, served: Process) -> None:
    page = visit(served, expected="status of 400")
    choose(page, "smollm2")
    converse(page, "Hello!", tokens=99_999)
    expect(page.locator(".chat [role=alert]")).to_contain_text("max_tokens")
    expect(page.locator(".turn.assistant")).to_have_count(0)
