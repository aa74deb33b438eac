"""What people do on the page, in the words of a test."""

import json
from collections.abc import Callable
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.support.processes import PATIENCE, Process

Visit = Callable[..., Page]
MANY = 60_000  # milliseconds
GRAVE = ("serious", "critical")


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def run(page: Page, name: str) -> Locator:
    """Submits the form, and its answer once that is there."""
    press(page, name)
    expect(page.locator("form.ask").first).to_have_attribute("aria-busy", "false", timeout=MANY)
    expect(page.locator("form.ask .error").first).to_be_hidden()
    return page.locator(".answer")


def converse(page: Page, words: str, *, tokens: int = 24, temperature: float = 0.0) -> Locator:
    """Says so, and the answer's tokens, which come."""
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill(f"{temperature:g}")
    page.get_by_label("Message", exact=True).fill(words)
    page.get_by_label("Message", exact=True).press("Enter")
    return page.locator(".turn.assistant .tokens").last


def over(page: Page) -> None:
    """The answer of a chat is."""
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=MANY)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def faults(page: Page) -> list[str]:
    """Serious ones, and where they are."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found if one["impact"] in GRAVE for node in one["nodes"]]


def audited(page: Page, where: str) -> None:
    assert not faults(page), where


def ask(server: Process, path: str, body: Any, **headers: str) -> Any:
    """The API, as anybody has it."""
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE).raise_for_status().json()


class Sent:
    """The bodies of the requests to `path` that a page sends from now on."""

    def __init__(self, page: Page, path: str) -> None:
        self.bodies: list[Any] = []
        self.path = path
        page.on("request", self.hear)

    def hear(self, request: Any) -> None:
        if request.url.endswith(self.path):
            self.bodies.append(json.loads(request.post_data or "null"))
