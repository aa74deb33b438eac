"""The page /docs: it needs only files of the package, equals /openapi.json, and asks for a key where one is needed."""

import subprocess
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from playwright.sync_api import Page, expect

from tests.browser.playground import Visit, assert_accessible
from tests.support.processes import Process

EXAMPLES = """async (schemas) => {
  const { example } = await import("/docs/schema.js");
  return schemas.map((schema) => example(schema));
}"""


@pytest.fixture
def openapi_paths(served: Process) -> Any:
    return served.get("/openapi.json").json()["paths"]


def unfold(page: Page) -> None:
    """Opens every collapsed section, until none is left."""
    page.evaluate("""async () => {
      for (let left = 1; left; left = document.querySelectorAll("#routes details:not([open])").length) {
        for (const each of document.querySelectorAll("#routes details:not([open])")) each.open = true;
        await new Promise((done) => setTimeout(done));
      }
    }""")


def test_every_route_is_listed_with_its_answers_and_fields(visit: Visit, served: Process, openapi_paths: Any) -> None:
    page = visit(served, "/docs")
    operations = [
        (path, method, operation) for path, every in openapi_paths.items() for method, operation in every.items()
    ]
    expect(page.locator("#count")).to_have_text(f"{len(operations)} routes")
    unfold(page)
    written = page.locator("#routes").inner_text()
    for path, method, operation in operations:
        row = page.locator(f"[id='{method}-{path}']")
        expect(row.locator("summary").first).to_contain_text(operation["summary"])
        known = row.locator("h3:text-is('Answers') + table > tbody > tr > td:first-child").all_text_contents()
        assert known == list(operation["responses"])
    for field in ("messages", "temperature", "max_tokens", "return_documents", "aggregation_strategy", "X-Nothing"):
        assert (field in written) is (field != "X-Nothing")
    policy = page.request.get(f"{served.url}/docs").headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy


def test_examples_are_what_the_schemas_allow(visit: Visit, served: Process, openapi_paths: Any) -> None:
    page = visit(served, "/docs")
    bodies = [
        content["application/json"]["schema"]
        for every in openapi_paths.values()
        for operation in every.values()
        if "application/json" in (content := operation.get("requestBody", {}).get("content", {}))
    ]
    for schema, value in zip(bodies, page.evaluate(EXAMPLES, bodies), strict=True):
        Draft202012Validator(schema).validate(value)


def test_routes_are_found_by_search_words(visit: Visit, served: Process) -> None:
    page = visit(served, "/docs")
    page.get_by_label("Filter").fill("post /v1/chat/completions")
    expect(page.locator("#count")).to_have_text("1 route")
    expect(page.locator(".operation:visible")).to_have_count(1)
    page.get_by_label("Filter").fill("")
    page = visit(served, "/docs#post-/v1/completions")
    expect(page.locator("[id='post-/v1/completions']")).to_have_attribute("open", "")


def test_the_curl_command_runs(visit: Visit, served: Process) -> None:
    page = visit(served, "/docs#get-/v1/models")
    line = page.locator("[id='get-/v1/models'] pre").text_content() or ""
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert '"object":"list"' in done.stdout
    page = visit(served, "/docs#post-/v1/messages/count_tokens")
    line = (page.locator("[id='post-/v1/messages/count_tokens'] pre").text_content() or "").replace("MODEL", "smollm2")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert '"input_tokens":' in done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_has_no_serious_accessibility_violation(visit: Visit, served: Process, scheme: str) -> None:
    page = visit(served, "/docs", scheme=scheme)
    expect(page.locator("#count")).to_contain_text("routes")
    assert_accessible(page, "closed")
    for name in ("post-/v1/chat/completions", "get-/readyz", "post-/pipeline/{task}"):
        page.locator(f"[id='{name}'] > summary").click()
    page.locator("summary:visible", has_text="Its fields").first.click()
    assert_accessible(page, "opened")


def test_it_asks_for_a_key_where_the_server_needs_one(visit: Visit, locked: Process) -> None:
    page = visit(locked, "/docs", expected="status of 40[13]")
    key = page.get_by_label("Key", exact=True)
    expect(key).to_be_focused()
    expect(page.locator("#routes")).to_be_empty()
    assert_accessible(page, "the key")
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#key-error")).to_have_text("the key in the header Authorization is not this server's")
    key.fill("open-sesame")
    key.press("Enter")
    expect(page.locator("#count")).to_contain_text("routes")
    page.locator("[id='get-/v1/models'] > summary").click()
    expect(page.locator("[id='get-/v1/models'] pre")).to_contain_text("$POLYHEAD_API_KEY")
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#tabs")).to_be_visible()  # the same tab keeps its key
    page.get_by_role("link", name="API").click()
    expect(page.locator("#count")).to_contain_text("routes")
    page.get_by_role("button", name="Key").click()
    expect(key).to_be_visible()
    expect(page.locator("#routes")).to_be_empty()
