"""A real server, real traffic and a real Prometheus: what is deployed to watch the first finds what it asks for.

What an ingress alone says stands on a page beside (ingress_page.py).
"""

import json
import math
import re
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ingress_page import ingress_page
from tests.support.processes import PATIENCE, Process
from tests.support.prometheus import ROOT, Prometheus, promtool, rules, tool

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/polyhead.json").read_text("utf-8"))
PROMPT = "The quick brown fox jumps over the lazy dog. " * 2
KEY = {"Authorization": "Bearer a-long-secret"}
NAME = re.compile(r"[a-z_]+:[\w:]+|polyhead_\w+")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Watched:
    server: Process
    prometheus: Prometheus

    def traffic(self) -> None:
        """A little of everything that is counted: answers, refusals, what comes too late, what is too much."""
        self.server.rest()
        with httpx.Client(base_url=self.server.url, headers=KEY, verify=False, timeout=PATIENCE) as client:
            long = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "min_tokens": 40, "temperature": 0}
            assert client.post("/v1/completions", json=long).status_code == 200
            assert client.post("/models/judge/predict", json={"inputs": "A good film."}).status_code == 200
            late = client.post("/v1/completions", json=long | {"max_tokens": 180, "min_tokens": 180, "timeout": 0.02})
            assert late.status_code in (200, 504)
            assert client.post("/v1/completions", json={"model": "chat", "prompt": 7.5}).status_code == 400
            with self.taken():
                assert client.post("/v1/completions", json=long).status_code == 429

    def taken(self) -> socket.socket:
        """A connection whose request holds the only place there is, since nothing of its long answer is read."""
        url = httpx.URL(self.server.url)
        held = socket.create_connection((url.host, url.port or 80))
        body = json.dumps({"model": "chat", "prompt": "a", "max_tokens": 16_000, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: {KEY['Authorization']}\r\n"
        before = self.server.page.total("requests_received_total")
        held.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        self.server.until(lambda: self.server.page.total("requests_received_total") > before)
        return held

    def answered(self, queries: Iterable[str]) -> None:
        """Traffic comes until each query has found a number."""
        unanswered = list(queries)

        def all_answered() -> bool:
            unanswered[:] = [query for query in unanswered if not any(map(number, self.prometheus.query(query)))]
            if unanswered:
                self.traffic()
            return not unanswered

        try:
            self.prometheus.until(all_answered)
        except TimeoutError:
            pytest.fail("no data for\n" + "\n".join(unanswered))


def number(series: dict[str, Any]) -> bool:
    return math.isfinite(float(series["value"][1]))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, long_generator: Path, tiny_classifier: Path) -> Iterator[Watched]:
    models = f"chat={long_generator}", f"judge={tiny_classifier}"
    bounds = "--api-keys", "team=a-long-secret", "--max-requests", "1", "--drain-seconds", "8"
    tool("prometheus")  # without one nothing is started
    server = Process(*models, *bounds)
    with ingress_page() as page:
        try:
            address = server.url.removeprefix("http://")
            prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), address, ingress=page)
            try:
                server.ready()
                prometheus.ready()
                yield Watched(server, prometheus)
            finally:
                prometheus.stop()
        finally:
            server.child.kill()
            server.child.wait()


def targets() -> list[tuple[str, str]]:
    """Title and expression of every query of the dashboard."""
    return [
        (f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    ]


def as_grafana_asks(expression: str, models: str = ".*") -> str:
    """Variables become what Grafana puts in their place; with 15 s between scrapes its rates look back a minute."""
    values = {"$__rate_interval": "1m", "$job": ".+", "$model": models, "$task": ".*", "$instance": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_server_is_up_and_its_rules_are_loaded(watched: Watched) -> None:
    [up] = watched.prometheus.until(lambda: watched.prometheus.query('up{job="polyhead"} == 1'))
    assert up["metric"]["instance"] == watched.server.url.removeprefix("http://")

    def evaluated() -> list[dict[str, Any]]:
        found = [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in found) else found

    found = watched.prometheus.until(evaluated)
    assert [rule for rule in found if rule["health"] != "ok" or rule.get("lastError")] == []
    assert sorted(rule["name"] for rule in found) == sorted(
        [rule["alert"] for rule in rules("alert")] + [rule["record"] for rule in rules("record")]
    )


def test_every_query_of_the_dashboard_finds_something(watched: Watched) -> None:
    queries = [as_grafana_asks(expression) for _, expression in targets()]
    assert len(queries) > 50
    watched.answered(queries)


def test_every_query_is_about_the_models_that_are_chosen(watched: Watched) -> None:
    about = [expression for _, expression in targets() if "$model" in expression]
    watched.answered(as_grafana_asks(expression, "(chat|judge)") for expression in about)
    for expression in about:
        assert not watched.prometheus.query(as_grafana_asks(expression, "another")), expression


def test_legends_name_labels_that_there_are(watched: Watched) -> None:
    for title, expression in targets():
        query = as_grafana_asks(expression)
        watched.answered([query])
        labels = {label for series in watched.prometheus.query(query) for label in series["metric"]}
        assert set(LEGEND.findall(title)) <= labels, title


def test_every_variable_has_values(watched: Watched) -> None:
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            [(series, label)] = re.findall(r"^label_values\((.+), (\w+)\)$", variable["definition"])
            values = watched.prometheus.ask(f"label/{label}/values", **{"match[]": as_grafana_asks(series)})
            found[variable["name"]] = set(values)
    assert found["job"] == {"polyhead"}
    assert found["model"] >= {"chat", "judge"}
    assert found["task"] >= {"generate", "classify"}
    assert found["instance"] == {watched.server.url.removeprefix("http://")}


def test_every_recording_rule_records(watched: Watched) -> None:
    watched.answered(rule["record"] for rule in rules("record"))


def test_whatever_an_alert_looks_at_is_there(watched: Watched) -> None:
    """An alert whose condition names what nobody counts would be silent for ever."""
    watched.answered({name for rule in rules("alert") for name in NAME.findall(rule["expr"])})


def test_the_page_is_as_prometheus_wants_it(watched: Watched) -> None:
    watched.traffic()
    assert promtool("check", "metrics", given=watched.server.get("/metrics").text) == ""


def test_a_server_that_leaves_slowly_and_one_that_is_gone_raise_their_alerts(watched: Watched) -> None:
    """The last of this file: it ends the server."""
    leaves, gone = 'ALERTS{alertname="PolyheadDrainTooLong"}', 'ALERTS{alertname="PolyheadDown"}'
    assert not watched.prometheus.query(f"{leaves} or {gone}")
    with watched.taken():
        watched.server.child.send_signal(signal.SIGTERM)
        [alert] = watched.prometheus.until(lambda: watched.prometheus.query(leaves))
    assert alert["metric"]["alertstate"] == "firing"
    assert watched.server.child.wait(PATIENCE) == 0
    [alert] = watched.prometheus.until(lambda: watched.prometheus.query(gone))
    assert alert["metric"]["alertstate"] == "pending"  # for a minute, then it fires
    assert watched.prometheus.query(leaves)  # still shown
