"""Chat with a generator, and continuation of a text."""

import itertools
import json
import shutil
from math import exp
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import (
    TIMEOUT_MS,
    Sent,
    Visit,
    ask,
    assert_accessible,
    choose,
    converse,
    press,
    run,
    wait_for_answer,
)
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
    expect(page.locator(".turn.assistant .note")).to_contain_text("24 tokens")


def test_a_stopped_answer_stays_and_the_server_aborts_it(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    before = served.rest().total("requests_total", model="smollm2", outcome="aborted")
    answer = converse(page, "Tell me a long story.", tokens=2000, temperature=1)
    expect(page.locator(".token").nth(3)).to_be_attached(timeout=TIMEOUT_MS)  # a line break has no size
    press(page, "Stop")
    wait_for_answer(page)
    expect(page.locator(".turn.assistant .note")).to_contain_text("stopped")
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


@pytest.mark.parametrize("model", ["smollm2", "writer"])
def test_the_sampling_begins_as_the_checkpoint_suggests(visit: Visit, served: Process, model: str) -> None:
    listed = {each["id"]: each["sampling"] for each in served.get("/v1/models").json()["data"]}
    start = listed[model] or {"temperature": 0.7, "top_p": 0.95}
    page = visit(served)
    choose(page, model)
    for label, name in (("Temperature", "temperature"), ("Top p", "top_p")):
        expect(page.get_by_label(label)).to_have_value(f"{start[name]:g}" if name in start else "")


def test_a_suggestion_between_two_steps_is_valid(visit: Visit, tiny_generator: Path, tmp_path: Path) -> None:
    folder = tmp_path / "suggesting"
    shutil.copytree(tiny_generator, folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").write_text('{"temperature": 0.33}')
    process = Process(f"writer={folder}")
    try:
        process.ready()
        page = visit(process)
        expect(page.get_by_label("Temperature")).to_have_value("0.33")
        expect(page.get_by_label("Top p")).to_have_value("")  # the server's default
        page.get_by_label("Max tokens").fill("6")
        sent = Sent(page, "/v1/completions")
        run(page, "Continue")
        assert sent.bodies[0]["temperature"] == 0.33
        assert "top_p" not in sent.bodies[0]
    finally:
        process.stop()


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


# Conversations and markdown

MARKDOWN = """# Sorting

Use **sorted**, or `sort`:

```python
print(sorted(words))
```

<img src=x onerror=alert(1)> ![chart](https://other.example/chart.png)
[bad](javascript:alert(1)) [good](https://other.example)
"""
KEPT = """(text) => {
  const turns = [{ role: "user", content: "How do I sort?" }, { role: "assistant", content: text }];
  const kept = [{ id: "a", title: "Sorting", system: "", changed: 1, turns }];
  localStorage.setItem("polyhead-conversations", JSON.stringify(kept));
}"""


def test_the_page_opens_with_a_chat_model_and_remembers_the_last_one(visit: Visit, served: Process) -> None:
    page = visit(served)
    expect(page.get_by_label("Model", exact=True)).to_have_value("smollm2")
    choose(page, "minilm")
    page.goto(served.url)
    expect(page.get_by_label("Model", exact=True)).to_have_value("minilm")


def test_markdown_is_drawn_and_markup_is_text(visit: Visit, served: Process) -> None:
    page = visit(served)
    page.evaluate(KEPT, MARKDOWN)
    page.reload()
    press(page, "Sorting")
    drawn = page.locator(".turn.assistant .markdown")
    expect(drawn.locator("strong")).to_have_text("sorted")
    expect(drawn.locator("pre code")).to_have_text("print(sorted(words))")
    expect(drawn.locator("img, script")).to_have_count(0)
    expect(drawn).to_contain_text("<img src=x onerror=alert(1)>")
    assert drawn.locator("a").evaluate_all("(all) => all.map((link) => link.href)") == [
        "https://other.example/chart.png",
        "https://other.example/",
    ]
    drawn.get_by_role("button", name="Copy").click()
    assert page.evaluate("() => navigator.clipboard.readText()") == "print(sorted(words))"
    assert_accessible(page, "markdown")


HOSTILE = (">" * 8000, "* " * 8000 + "a", f"a{' ' * 20_000}b", "a." * 10_000 + "@")  # nested, or slow to be split
DRAWN = """async (text) => {
  const { MarkdownText } = await import("/web/markdown.js");
  const place = document.createElement("div");
  const drawn = new MarkdownText(place);
  drawn.show("**a**");
  drawn.show(text);
  return [place.textContent, place.childElementCount];
}"""


def test_text_that_would_keep_the_page_busy_is_shown_as_it_is(visit: Visit, locked: Process) -> None:
    page = visit(locked, expected="401")
    for text in HOSTILE:
        assert page.evaluate(DRAWN, text) == [text, 1]
    assert page.evaluate(DRAWN, "**a** " * 2000)[0].split() == ["a"] * 2000


def test_conversations_are_kept_renamed_exported_and_deleted(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    converse(page, "Say hello to the harbour.", tokens=6)
    wait_for_answer(page)
    answer = page.locator(".turn.assistant .tokens").text_content()
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    press(page, "Rename: Say hello to the harbour.")
    page.get_by_label("Title").fill("Harbour")
    page.keyboard.press("Enter")
    converse(page, "And to the sea.", tokens=6)
    wait_for_answer(page)
    with page.expect_download() as download:
        press(page, "Export: Harbour")
    exported = json.loads(download.value.path().read_text("utf-8"))
    assert exported["title"] == "Harbour", "it keeps its new name when it goes on"
    assert [turn["content"] for turn in exported["messages"]][:3] == [
        "Say hello to the harbour.",
        answer,
        "And to the sea.",
    ]
    press(page, "New conversation")
    expect(page.locator(".turn")).to_have_count(0)
    press(page, "Harbour")
    expect(page.locator(".turn")).to_have_count(4)
    press(page, "Delete: Harbour")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("button", name="Harbour", exact=True)).to_have_count(0)
    press(page, "Undo")
    expect(page.locator(".turn")).to_have_count(4)


def test_a_message_is_edited_and_sent_again(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    sent = Sent(page, PATH)
    for words in ("One", "Two"):
        converse(page, words, tokens=4)
        wait_for_answer(page)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("Three")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".turn")).to_have_count(2)
    wait_for_answer(page)
    assert [turn["content"] for turn in sent.bodies[-1]["messages"]] == ["Three"]


def test_the_view_follows_the_answer_until_the_user_scrolls_up(visit: Visit, served: Process) -> None:
    page = visit(served)
    page.evaluate(KEPT, "A line.\n\n" * 80)
    page.reload()
    press(page, "Sorting")
    scroller, latest = page.locator(".scroller"), page.get_by_role("button", name="↓ Latest")
    left = "(node) => Math.round(node.scrollHeight - node.scrollTop - node.clientHeight)"
    assert scroller.evaluate(left) < 2
    expect(latest).to_be_hidden()
    scroller.hover()
    page.mouse.wheel(0, -600)
    expect(latest).to_be_visible()
    latest.click()
    expect(latest).to_be_hidden()
    assert scroller.evaluate(left) < 2
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()


def test_images_are_refused_in_words(visit: Visit, served: Process) -> None:
    page = open_chat(visit, served)
    page.locator(".chat").evaluate("""(chat) => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["x"], "cat.png", { type: "image/png" }));
      chat.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }""")
    expect(page.locator(".chat [role=alert]")).to_have_text("cat.png is not sent: smollm2 reads text, no images.")


def test_a_long_title_does_not_widen_the_list_of_conversations(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "smollm2")
    converse(page, "Explain the cycle of water between the seas and the mountains in one sentence.", tokens=4)
    wait_for_answer(page)
    expect(page.locator(".conversations .title")).to_contain_text("Explain the cycle")
    assert page.locator(".chat .side").evaluate("(side) => side.scrollWidth <= side.clientWidth")
