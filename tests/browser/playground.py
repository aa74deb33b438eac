"""Actions on the page, for the tests."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.support.processes import PATIENCE, Process

Visit = Callable[..., Page]
TIMEOUT_MS = 60_000  # milliseconds
SERIOUS = ("serious", "critical")


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def run(page: Page, name: str) -> Locator:
    """Submits the form and returns its answer, complete."""
    press(page, name)
    expect(page.locator("form.ask").first).to_have_attribute("aria-busy", "false", timeout=TIMEOUT_MS)
    expect(page.locator("form.ask .error").first).to_be_hidden()
    return page.locator(".answer")


def converse(page: Page, words: str, *, tokens: int = 24, temperature: float = 0.0) -> Locator:
    """Sends a message and returns the locator of the answer's tokens, which arrive later."""
    page.get_by_label("Token probabilities").check()
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill(f"{temperature:g}")
    page.get_by_label("Message", exact=True).fill(words)
    page.get_by_label("Message", exact=True).press("Enter")
    return page.locator(".turn.assistant .tokens").last


def wait_for_answer(page: Page) -> None:
    """Waits until the answer of a chat is complete."""
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=TIMEOUT_MS)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def accessibility_violations(page: Page) -> list[str]:
    """Accessibility violations of a serious or critical impact, and their elements."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found if one["impact"] in SERIOUS for node in one["nodes"]]


def assert_accessible(page: Page, where: str) -> None:
    assert not accessibility_violations(page), where


def ask(server: Process, path: str, body: Any, **headers: str) -> Any:
    """POSTs to the API without the page; returns the JSON of the answer."""
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE).raise_for_status().json()


class Sent:
    """The bodies of the requests to `path` that a page sends from now on."""

    def __init__(self, page: Page, path: str) -> None:
        self.bodies: list[Any] = []
        self.path = path
        page.on("request", self.on_request)

    def on_request(self, request: Any) -> None:
        if request.url.endswith(self.path):
            self.bodies.append(json.loads(request.post_data or "null"))
