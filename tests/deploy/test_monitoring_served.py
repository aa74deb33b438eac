"""A real server, real traffic and a real Prometheus: every query of the rules and of the dashboard finds data.

Series that only an ingress exposes come from a second page (ingress_page.py).
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

from tests.support.calibrations import write_calibration
from tests.support.ingress_page import ingress_page
from tests.support.processes import PATIENCE, Process
from tests.support.prometheus import ROOT, Prometheus, promtool, rules, tool

DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/polyhead.json").read_text("utf-8"))
PROMPT = "The quick brown fox jumps over the lazy dog. " * 2
KEY = {"Authorization": "Bearer a-long-secret"}
NAME = re.compile(r"[a-z_]+:[\w:]+|polyhead_\w+")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class MonitoredServer:
    server: Process
    prometheus: Prometheus

    def traffic(self) -> None:
        """A few requests of each outcome: answered, invalid, expired, rejected for the limit of requests."""
        self.server.rest()
        with httpx.Client(base_url=self.server.url, headers=KEY, verify=False, timeout=PATIENCE) as client:
            long = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "min_tokens": 40, "temperature": 0}
            assert client.post("/v1/completions", json=long).status_code == 200
            assert client.post("/models/judge/predict", json={"inputs": "A good film."}).status_code == 200
            for certain in (0, 1):  # an answered question, and a refused one
                question = {"type": "predicate", "instructions": "positive"}
                body = {"model": "judge", "input": "A good film.", "questions": [question], "min_confidence": certain}
                assert client.post("/v1/decisions", json=body).status_code == 200
            expired = client.post(
                "/v1/completions", json=long | {"max_tokens": 180, "min_tokens": 180, "timeout": 0.02}
            )
            assert expired.status_code in (200, 504)
            assert client.post("/v1/completions", json={"model": "chat", "prompt": 7.5}).status_code == 400
            with self.occupied_slot():
                assert client.post("/v1/completions", json=long).status_code == 429

    def occupied_slot(self) -> socket.socket:
        """A connection whose request occupies the only slot, since its long answer is not read."""
        url = httpx.URL(self.server.url)
        held = socket.create_connection((url.host, url.port or 80))
        body = json.dumps({"model": "chat", "prompt": "a", "max_tokens": 16_000, "ignore_eos": True, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: {KEY['Authorization']}\r\n"
        before = self.server.page.total("requests_received_total")
        held.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        self.server.until(lambda: self.server.page.total("requests_received_total") > before)
        return held

    def wait_for_data(self, queries: Iterable[str]) -> None:
        """Sends traffic until each query finds a finite number."""
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
def monitored(
    tmp_path_factory: pytest.TempPathFactory, long_generator: Path, tiny_classifier: Path
) -> Iterator[MonitoredServer]:
    models = f"chat={long_generator}", f"judge={tiny_classifier}"
    calibration = write_calibration(tmp_path_factory.mktemp("calibration") / "judge.json", tiny_classifier)
    bounds = (
        "--api-keys",
        "team=a-long-secret",
        "--max-requests",
        "1",
        "--drain-seconds",
        "8",
        "--calibrations",
        f"judge={calibration}",
    )
    tool("prometheus")  # skips before the server is started if there is none
    server = Process(*models, *bounds)
    with ingress_page() as page:
        try:
            address = server.url.removeprefix("http://")
            prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), address, ingress=page)
            try:
                server.ready()
                prometheus.ready()
                yield MonitoredServer(server, prometheus)
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


def as_grafana_query(expression: str, models: str = ".*") -> str:
    """The query with Grafana's values for its variables. With 15 s between scrapes, $__rate_interval is one minute."""
    values = {"$__rate_interval": "1m", "$job": ".+", "$model": models, "$task": ".*", "$instance": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_server_is_up_and_its_rules_are_loaded(monitored: MonitoredServer) -> None:
    [up] = monitored.prometheus.until(lambda: monitored.prometheus.query('up{job="polyhead"} == 1'))
    assert up["metric"]["instance"] == monitored.server.url.removeprefix("http://")

    def evaluated() -> list[dict[str, Any]]:
        found = [rule for group in monitored.prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return [] if any(rule["health"] == "unknown" for rule in found) else found

    found = monitored.prometheus.until(evaluated)
    assert [rule for rule in found if rule["health"] != "ok" or rule.get("lastError")] == []
    assert sorted(rule["name"] for rule in found) == sorted(
        [rule["alert"] for rule in rules("alert")] + [rule["record"] for rule in rules("record")]
    )


def test_every_query_of_the_dashboard_finds_data(monitored: MonitoredServer) -> None:
    queries = [as_grafana_query(expression) for _, expression in targets()]
    assert len(queries) > 50
    monitored.wait_for_data(queries)


def test_queries_are_filtered_by_the_chosen_models(monitored: MonitoredServer) -> None:
    model_queries = [expression for _, expression in targets() if "$model" in expression]
    monitored.wait_for_data(as_grafana_query(expression, "(chat|judge)") for expression in model_queries)
    for expression in model_queries:
        assert not monitored.prometheus.query(as_grafana_query(expression, "another")), expression


def test_legends_name_existing_labels(monitored: MonitoredServer) -> None:
    for title, expression in targets():
        query = as_grafana_query(expression)
        monitored.wait_for_data([query])
        labels = {label for series in monitored.prometheus.query(query) for label in series["metric"]}
        assert set(LEGEND.findall(title)) - {"key"} <= labels, title  # a public page does not name keys


def test_every_variable_has_values(monitored: MonitoredServer) -> None:
    found = {}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            [(series, label)] = re.findall(r"^label_values\((.+), (\w+)\)$", variable["definition"])
            values = monitored.prometheus.ask(f"label/{label}/values", **{"match[]": as_grafana_query(series)})
            found[variable["name"]] = set(values)
    assert found["job"] == {"polyhead"}
    assert found["model"] >= {"chat", "judge"}
    assert found["task"] >= {"generate", "classify"}
    assert found["instance"] == {monitored.server.url.removeprefix("http://")}


def test_every_recording_rule_records(monitored: MonitoredServer) -> None:
    monitored.wait_for_data(rule["record"] for rule in rules("record"))


def test_every_series_of_an_alert_exists(monitored: MonitoredServer) -> None:
    """An alert on a series that does not exist would never fire."""
    monitored.wait_for_data({name for rule in rules("alert") for name in NAME.findall(rule["expr"])})


def test_promtool_accepts_the_metrics_page(monitored: MonitoredServer) -> None:
    monitored.traffic()
    assert promtool("check", "metrics", given=monitored.server.get("/metrics").text) == ""


def test_a_slow_drain_and_a_stopped_server_raise_their_alerts(monitored: MonitoredServer) -> None:
    """The last test of this file: it stops the server."""
    drain_alert, down_alert = 'ALERTS{alertname="PolyheadDrainTooLong"}', 'ALERTS{alertname="PolyheadDown"}'
    assert not monitored.prometheus.query(f"{drain_alert} or {down_alert}")
    with monitored.occupied_slot():
        monitored.server.child.send_signal(signal.SIGTERM)
        [alert] = monitored.prometheus.until(lambda: monitored.prometheus.query(drain_alert))
    assert alert["metric"]["alertstate"] == "firing"
    assert monitored.server.child.wait(PATIENCE) == 0
    [alert] = monitored.prometheus.until(lambda: monitored.prometheus.query(down_alert))
    assert alert["metric"]["alertstate"] == "pending"  # for one minute, then it is firing
    assert monitored.prometheus.query(drain_alert)  # still firing
