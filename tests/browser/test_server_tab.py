"""The tab Server: figures from /metrics, fetched only while the tab is visible."""

import re

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from tests.browser.playground import Visit, ask, choose
from tests.support.processes import Process


def tile(page: Page, name: str) -> str:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".number").text_content() or ""


def test_metrics_are_fetched_only_while_the_tab_is_visible(visit: Visit, served: Process) -> None:
    page = visit(served)
    scrapes: list[Request] = []
    page.on("request", lambda request: scrapes.append(request) if request.url.endswith("/metrics") else None)
    expect(page.locator("#tabs")).to_be_visible()
    page.clock.install()
    page.clock.run_for(10_000)
    assert not scrapes
    page.get_by_role("tab", name="Server").click()
    for count in (1, 2, 3):
        expect(page.locator(".tile .number").first).not_to_have_text("–")
        with page.expect_response("**/metrics"):
            page.clock.run_for(2_000)
        assert len(scrapes) >= count
    page.get_by_role("tab", name="Try").click()
    scrape_count = len(scrapes)
    page.clock.run_for(20_000)
    assert len(scrapes) == scrape_count


def test_its_figures_are_those_of_the_metrics(visit: Visit, served: Process) -> None:
    page = visit(served)
    choose(page, "sentiment")
    page.get_by_role("tab", name="Server").click()
    expect(page.locator(".tile .number").first).not_to_have_text("–")
    for number in range(8):
        ask(served, "/models/sentiment", {"inputs": f"It is number {number}."})
    figure = page.locator(".tile", has=page.get_by_text("Latency, 95 %", exact=True)).locator(".number")
    expect(figure).to_have_text(re.compile(r"\d (ms|s)$"))
    done = int(served.rest().total("requests_total", model="sentiment", outcome="done"))
    row = page.get_by_role("row", name="sentiment")
    expect(row.get_by_role("cell").nth(4)).to_have_text(str(done))
    expect(row.get_by_role("cell").first).to_have_text("ready")
    assert tile(page, "Memory").endswith("GiB")
    assert float(tile(page, "Memory").split()[0]) > 0.1
    assert (page.locator(".tile polyline").first.get_attribute("points") or "").count(",") >= 2


def test_the_server_remembers_the_lines_and_the_last_errors(visit: Visit, served: Process) -> None:
    served.until(lambda: len(served.get("/metrics/history").json()["samples"]) > 2)
    httpx.post(served.url + "/v1/completions", json={"model": "smollm2", "prompt": "a secret", "top_p": 9})
    page = visit(served)
    page.get_by_role("tab", name="Server").click()
    expect(page.locator(".tile .number").first).not_to_have_text("–")
    assert len((page.locator(".tile polyline").first.get_attribute("points") or "").split()) > 2
    row = page.get_by_role("region", name="Recent errors").get_by_role("row").nth(1)
    expect(row).to_contain_text("/v1/completions")
    expect(row).not_to_contain_text("secret")


# Two scrapes of a histogram. In between, two requests took at most 0.1 s, four at most 0.2 s and two longer.
SCRAPES = [
    f"""# TYPE polyhead_request_seconds histogram
polyhead_request_seconds_bucket{{le="0.1",model="a"}} {first}
polyhead_request_seconds_bucket{{le="0.2",model="a"}} {second}
polyhead_request_seconds_bucket{{le="+Inf",model="a"}} {all_of_them}
polyhead_request_seconds_bucket{{le="0.1",model="other \\"}} {{\\\\"}} 5
polyhead_requests_total{{model="a"}} {all_of_them}
"""
    for first, second, all_of_them in ((10, 20, 30), (12, 26, 38))
]
FIGURES = """async (looks) => {
  const { Scrape, quantile, rate } = await import("/web/prometheus.js");
  const [before, after] = looks.map((text, index) => new Scrape(text, index * 4000));
  const of = (share) => quantile(before, after, "polyhead_request_seconds", share, { model: "a" });
  return [of(0.125), of(0.5), of(0.99), rate(before, after, "polyhead_requests_total"),
    Number.isNaN(quantile(after, after, "polyhead_request_seconds", 0.5)), after.samples[3].labels.model];
}"""


def test_percentiles_are_of_the_interval_between_two_scrapes(visit: Visit, locked: Process) -> None:
    page = visit(locked, expected="status of 401")
    figures = page.evaluate(FIGURES, SCRAPES)
    assert figures == [pytest.approx(0.05), pytest.approx(0.15), 0.2, 2.0, True, 'other "} {\\']
