"""The page around the forms: tabs, the keyboard, themes, copied code; and screenshots for docs/."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.playground import (
    TIMEOUT_MS,
    Visit,
    ask,
    assert_accessible,
    choose,
    converse,
    press,
    run,
    tab,
    wait_for_answer,
)
from tests.support.processes import Process

BUTTONS = {
    "sentiment": "Classify",
    "pair": "Classify",
    "tags": "Find",
    "span": "Answer",
    "fill": "Fill in",
    "minilm": "Compare",
    "ranker": "Rank",
    "translator": "Generate",
    "writer": "Continue",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_tab_has_a_serious_accessibility_violation(visit: Visit, served: Process, scheme: str) -> None:
    page = visit(served, scheme=scheme)
    for model, button in BUTTONS.items():
        choose(page, model)
        if model == "writer":
            page.get_by_label("Max tokens").fill("4")  # the network of a smoke run has few positions
        run(page, button)
        assert_accessible(page, model)
    choose(page, "smollm2")
    converse(page, "Hello!", tokens=6)
    wait_for_answer(page)
    page.locator(".token").first.hover()
    assert_accessible(page, "chat")
    for name in ("Attention", "Server"):
        tab(page, name)
        expect(page.locator(f"#panel-{name.lower()}")).not_to_be_empty()
        expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=TIMEOUT_MS)
        assert_accessible(page, name)


def test_tabs_are_one_tab_stop_with_arrow_keys_between_them(visit: Visit, served: Process) -> None:
    page = visit(served)
    page.get_by_role("tab", name="Try").focus()
    moves = ("ArrowRight", "Decide"), ("ArrowRight", "Attention"), ("ArrowLeft", "Decide"), ("End", "Server")
    for key, name in (*moves, ("ArrowRight", "Try")):
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(page.locator("#tabs > div [aria-selected=true]")).to_have_text(name)
        expect(page.locator("#tabs > [role=tabpanel]:visible")).to_have_attribute("id", f"panel-{name.lower()}")
    assert page.locator("#tabs > div [tabindex='0']").count() == 1


def test_the_page_can_be_used_with_the_keyboard_alone(visit: Visit, served: Process) -> None:
    page = visit(served)
    expect(page.locator("#tabs")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the model")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    page.keyboard.type("sentiment")
    expect(page.get_by_label("Model", exact=True)).to_have_value("sentiment")
    tab_to(page, page.get_by_label("Text", exact=True))
    page.keyboard.press("Control+A")
    page.keyboard.type("A wonderful day.")
    tab_to(page, page.get_by_role("button", name="Classify"))
    page.keyboard.press("Enter")
    expect(page.locator(".headline")).to_have_text("POSITIVE")


def tab_to(page: Page, control: object) -> None:
    """Presses Tab until the control has the focus. Asserts that each focused element shows an outline."""
    for _ in range(20):
        page.keyboard.press("Tab")
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in ("none", "")
        if control.evaluate("(control) => control === document.activeElement"):  # type: ignore[attr-defined]
            return
    pytest.fail("the control is never reached with Tab")


def test_a_page_that_is_loaded_again_is_the_same(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "minilm")
    tab(page, "Server")
    press(page, "Theme: system")
    press(page, "Theme: light")
    page.reload()
    expect(page.locator("#tabs > div [aria-selected=true]")).to_have_text("Server")
    expect(page.get_by_label("Model", exact=True)).to_have_value("minilm")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"


@pytest.mark.parametrize("model", ["sentiment", "minilm", "smollm2", "writer"])
def test_copied_code_runs(visit: Visit, served: Process, model: str) -> None:
    page = visit(served)
    choose(page, model)
    prompt = "It's 5 o'clock; \"why\"? `date` $HOME \\ 😀"
    if model == "smollm2":
        page.get_by_label("Message", exact=True).fill(prompt)
    if model == "sentiment":
        page.get_by_label("Text", exact=True).fill("null")
    if model in ("smollm2", "writer"):
        page.get_by_label("Max tokens").fill("6")
        page.get_by_label("Temperature").fill("0")
    code = page.locator("#copy-code")
    expect(code).to_contain_text(model)
    by_curl = subprocess.run(
        ["bash", "-c", code.text_content() or ""], capture_output=True, text=True, check=True
    ).stdout
    press(page, "Python")
    expect(code).to_contain_text("import httpx")
    program = [sys.executable, "-c", code.text_content() or ""]
    by_python = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    if model in ("smollm2", "writer"):
        events = [json.loads(line[6:]) for line in by_curl.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        streamed = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
        assert by_python == streamed + "\n" != "\n"
    else:
        assert by_python.strip() == repr(json.loads(by_curl))
    press(page, "Copy")
    expect(page.locator("#copy [role=status]")).to_have_text("Copied.")
    assert page.evaluate("() => navigator.clipboard.readText()") == code.text_content()


def test_the_page_asks_for_a_key_where_the_server_needs_one(visit: Visit, locked: Process) -> None:
    page = visit(locked, expected="status of 40[13]")
    key = page.get_by_label("Key", exact=True)
    expect(key).to_be_focused()
    expect(page.locator("#tabs")).to_be_hidden()
    assert_accessible(page, "the key")
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#key-error")).to_have_text("the key in the header Authorization is not this server's")
    key.fill("open-sesame")
    key.press("Enter")
    run(page, "Classify")
    code = page.locator("#copy-code")
    for kind in ("curl", "Python"):
        press(page, kind)
        written = code.text_content() or ""
        assert "POLYHEAD_API_KEY" in written
        assert "open-sesame" not in written
        command = {"curl": ["bash", "-c"], "Python": [sys.executable, "-c"]}[kind]
        environment = os.environ | {"POLYHEAD_API_KEY": "open-sesame"}
        done = subprocess.run([*command, written], capture_output=True, text=True, check=True, env=environment)
        assert "label" in done.stdout
    page.reload()
    expect(page.locator("#tabs")).to_be_visible()
    press(page, "Key")
    expect(key).to_be_visible()
    assert page.evaluate("() => [localStorage.length, Object.values(sessionStorage).includes('open-sesame')]") == [
        0,
        False,
    ]


def test_an_administrator_loads_and_unloads_models(visit: Visit, locked: Process, tiny_embedder: object) -> None:
    page = visit(locked, expected="status of 40[13]")
    page.get_by_label("Key", exact=True).fill("open-sesame")
    page.keyboard.press("Enter")
    tab(page, "Server")
    key = page.get_by_label("Administrator's key")
    key.fill("open-sesame")
    key.press("Enter")
    expect(page.locator(".admin .error")).to_contain_text("may not administer")
    key.fill("master")
    key.press("Enter")
    page.get_by_label("Name").fill("vectors")
    page.get_by_label("Source").fill(str(tiny_embedder))
    press(page, "Load")
    expect(page.get_by_role("button", name="Unload vectors")).to_be_visible()
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(["judge", "vectors"])
    assert_accessible(page, "administration")
    press(page, "Unload vectors")
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(["judge"])
    expect(page.get_by_role("button", name="Unload vectors")).to_have_count(0)


def test_screenshots(visit: Visit, served: Process, picture: Callable[..., None]) -> None:
    page = visit(served)
    choose(page, "smollm2")
    converse(page, "Explain the water cycle in one sentence.", tokens=96, temperature=0.2)
    wait_for_answer(page)
    page.locator(".token").nth(7).hover()
    picture(page, "chat")
    choose(page, "sentiment")
    tab(page, "Decide")
    page.get_by_label("Explain the answer by the text").first.check()
    press(page, "Decide")
    expect(page.locator(".decision")).to_have_count(2)
    page.get_by_label("State").scroll_into_view_if_needed()
    picture(page, "decisions")
    page = visit(served, scheme="dark")
    for model, name, recipe in (
        ("tags", "tags", "bert-tags"),
        ("minilm", "similarity", ""),
        ("translator", "translation", "transformer"),
    ):
        choose(page, model)
        run(page, BUTTONS[model])
        picture(page, name, recipe)
    tab(page, "Server")
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
    for _ in range(4):
        with page.expect_response("**/metrics"):
            ask(served, "/v1/chat/completions", body)
            ask(served, "/models/sentiment", {"inputs": ["Good.", "Bad.", "Neither of both."]})
    expect(page.locator(".tile .number").nth(6)).not_to_have_text("–")
    picture(page, "server")
