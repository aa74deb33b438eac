"""Talking with a generator, and texts that one goes on with."""

import itertools
from math import exp

from playground import MANY, Sent, Visit, ask, choose, converse, over, press, run
from playwright.sync_api import Page, expect

from tests.support.processes import Process

PATH = "/v1/chat/completions"
# What stands in the answer at every frame, and whether it can be stopped still.
FRAMES = """() => {
  window.frames_seen = [];
  const look = () => {
    const said = document.querySelector(".turn.assistant .tokens");
    const stop = [...document.querySelectorAll(".chat button")].find((each) => each.textContent === "Stop");
    if (said) window.frames_seen.push([said.textContent, !stop.hidden]);
    requestAnimationFrame(look);
  };
  look();
}"""


def talking(visit: Visit, served: Process) -> Page:
    page = visit(served)
    choose(page, "smollm2")
    return page


def test_an_answer_grows_while_it_is_written(visit: Visit, served: Process) -> None:
    page = talking(visit, served)
    page.evaluate(FRAMES)
    said = converse(page, "Name three rivers in Europe.")
    over(page)
    frames = page.evaluate("() => window.frames_seen")
    growing = [text for text, running in frames if running]
    assert len(set(growing)) > 5, "it came in one piece"
    assert all(after.startswith(before) for before, after in itertools.pairwise(growing))
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Name three rivers in Europe."}]}
    whole = ask(served, PATH, body | {"max_tokens": 24, "temperature": 0})
    assert said.text_content() == whole["choices"][0]["message"]["content"]
    expect(page.locator(".turn.assistant .hint")).to_contain_text("24 tokens")


def test_what_is_stopped_stays_and_the_server_hears_of_it(visit: Visit, served: Process) -> None:
    page = talking(visit, served)
    before = served.rest().total("requests_total", model="smollm2", outcome="aborted")
    said = converse(page, "Tell me a long story.", tokens=2000, temperature=1)
    expect(page.locator(".token").nth(3)).to_be_visible(timeout=MANY)
    press(page, "Stop")
    over(page)
    expect(page.locator(".turn.assistant .hint")).to_contain_text("stopped")
    stayed = said.text_content()
    after = served.rest().total("requests_total", model="smollm2", outcome="aborted")
    assert after == before + 1
    assert said.text_content() == stayed != ""


def test_an_answer_is_written_again_to_the_same_conversation(visit: Visit, served: Process) -> None:
    page = talking(visit, served)
    page.get_by_label("System prompt").fill("You are a pirate.")
    sent = Sent(page, PATH)
    converse(page, "Hello!", tokens=8)
    over(page)
    press(page, "Regenerate")
    expect(page.get_by_role("button", name="Regenerate")).to_be_hidden()
    over(page)
    assert len(sent.bodies) == 2
    assert sent.bodies[0] == sent.bodies[1]
    assert [turn["role"] for turn in sent.bodies[0]["messages"]] == ["system", "user"]
    expect(page.locator(".turn.assistant")).to_have_count(1)
    converse(page, "And now?", tokens=8)
    over(page)
    assert [turn["role"] for turn in sent.bodies[2]["messages"]] == ["system", "user", "assistant", "user"]


def test_how_likely_each_token_was_by_pointer_and_by_keyboard(visit: Visit, served: Process) -> None:
    page = talking(visit, served)
    sent = Sent(page, PATH)
    converse(page, "Why is the sky blue?", tokens=12)
    over(page)
    body = {name: value for name, value in sent.bodies[0].items() if not name.startswith("stream")}
    drawn = ask(served, PATH, body)["choices"][0]["logprobs"]["content"]
    tokens, tip = page.locator(".token"), page.get_by_role("tooltip")
    assert tokens.all_text_contents() == [each["token"] for each in drawn]
    expect(tip).to_be_hidden()
    tokens.nth(4).hover()
    expect(tip).to_be_visible()
    shown = {
        "".join(row.locator("code").all_text_contents()): row.locator(".figure").text_content()
        for row in tip.locator("li").all()
    }
    for each in drawn[4]["top_logprobs"]:
        share, name = exp(each["logprob"]), each["token"].replace(" ", "␣").replace("\n", "⏎")
        assert shown[name] == (f"{share * 100:.1f} %" if 0.001 <= share < 0.9995 else shown[name])
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip).to_contain_text(drawn[1]["token"].replace(" ", "␣"))
    assert tokens.nth(1).get_attribute("aria-describedby") == tip.get_attribute("id")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_generator_without_a_template_goes_on_with_a_text(visit: Visit, served: Process) -> None:
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


def test_what_the_server_refuses_stands_beside_the_form_in_its_words(visit: Visit, served: Process) -> None:
    page = visit(served, expected="status of 400")
    choose(page, "smollm2")
    converse(page, "Hello!", tokens=99_999)
    expect(page.locator(".chat [role=alert]")).to_contain_text("max_tokens")
    expect(page.locator(".turn.assistant")).to_have_count(0)
