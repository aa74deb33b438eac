"""The monitoring files beside the server: rules, alerts with their rule tests, the dashboard.

tests/deploy/test_monitoring_served.py checks them against a real server.
"""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyhead.service.core import errors
from polyhead.service.metrics import Metrics
from tests.support.prometheus import DEPLOYED, ROOT, promtool, rules

OURS = re.compile(r'(?:reason|code)=~"([^"]+)"')
MEASURED = re.compile(r"(?<![\w:])polyhead_\w+|(?<![\w:])process_\w+")
RECORDED = re.compile(r"\b[a-z_]+:\w+:\w+")
RULE_TESTS = sorted((DEPLOYED / "tests").glob("*.yml"))
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "polyhead.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = sorted({rule["alert"] for rule in rules("alert")})


@cache
def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    annotations = promtool("check", "config", "prometheus.yml")
    assert f"{len(list((DEPLOYED / 'rules').glob('*.yml')))} rule files found" in annotations
    promtool("check", "rules", *(str(path) for path in (DEPLOYED / "rules").glob("*.yml")))


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_the_rule_tests_of_the_alerts_pass(path: Path) -> None:
    promtool("test", "rules", str(path))


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_rule_test_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    cases = [
        case
        for path in RULE_TESTS
        for story in read(path)["tests"]
        for case in story.get("alert_rule_test", [])
        if case["alertname"] == alert
    ]
    fired = [{**expected["exp_labels"]} for case in cases for expected in case.get("exp_alerts", [])]
    for rule in (rule for rule in rules("alert") if rule["alert"] == alert):
        assert any(rule["labels"].items() <= labels.items() for labels in fired), rule["labels"]
    assert any(not case.get("exp_alerts") for case in cases)


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_each_alert_has_a_summary_a_description_and_a_runbook_section(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Polyhead")
    assert rule["labels"]["severity"] in ("critical", "warning")
    annotations = rule["annotations"]
    assert annotations["summary"]
    assert annotations["description"]
    page, _, anchor = annotations["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert anchor == rule["alert"].lower()


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    assert sorted(re.findall(r"^### (Polyhead\w+)$", text, re.MULTILINE)) == ALERTS


def codes(least: int, beyond: int) -> set[str]:
    """Codes of all errors whose status is in [least, beyond)."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = [kind for kind in kinds if issubclass(kind, errors.PolyheadError)]
    return {kind.code for kind in found if least <= kind.status < beyond}


def test_the_error_budget_counts_all_5xx_codes_and_no_others() -> None:
    named = [OURS.findall(rule["expr"]) for rule in rules("record") if ":polyhead_errors:" in rule["record"]]
    for pattern in {pattern for patterns in named for pattern in patterns}:
        assert set(pattern.split("|")) == codes(500, 600)
        assert not any(re.fullmatch(pattern, code) for code in codes(400, 500))
    assert sum(map(len, named)) == 6  # for begun and for rejected requests: as a rate, in one hour, in six hours


def test_names_of_recording_rules_list_their_labels() -> None:
    for rule in rules("record"):
        level, metric, operation = rule["record"].split(":")
        by = re.search(r"\bby \(([^)]+)\)", rule["expr"])
        if by:
            assert level.split("_") == by[1].split(", "), rule
        assert metric.startswith("polyhead_")
        assert operation


def exposed() -> set[str]:
    """Names of all samples that a server's page can have."""
    page, _ = Metrics(["chat"]).render("")
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", page.decode(), re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in kinds for part in parts.get(kind, ("",))}


def test_every_queried_series_is_exposed_or_recorded() -> None:
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    asked += [rule["expr"] for rule in rules("alert") + rules("record")]
    asked += [str(variable.get("definition")) for variable in DASHBOARD["templating"]["list"]]
    assert {name for expression in asked for name in MEASURED.findall(expression)} <= exposed()
    known = {rule["record"] for rule in rules("record")}
    used = {name for expression in asked for name in RECORDED.findall(expression)}
    assert used <= known


def read_metrics(expression: str) -> set[str]:
    """The metrics that an expression reads, recording rules expanded."""
    recorded = {rule["record"]: rule["expr"] for rule in rules("record")}
    found = {re.sub(r"_bucket$", "", name) for name in MEASURED.findall(expression)}
    return found.union(*(read_metrics(recorded[name]) for name in RECORDED.findall(expression)))


def test_the_table_of_metrics_names_the_alerts() -> None:
    """The last column of docs/metrics.md names the alerts that read a metric."""
    rows = re.findall(
        r"^\| `(polyhead_\w+)`.*\|([^|]*)\|$", (ROOT / "docs/metrics.md").read_text("utf-8"), re.MULTILINE
    )
    documented = {(metric, alert) for metric, cell in rows for alert in re.findall(r"\bPolyhead\w+", cell)}
    used = {(metric, rule["alert"]) for rule in rules("alert") for metric in read_metrics(rule["expr"])}
    assert documented
    assert documented <= used
    assert {alert for _, alert in used} - {alert for _, alert in documented} <= {"PolyheadDown", "PolyheadOverloaded"}


def test_every_recorded_series_is_recorded_once() -> None:
    names = [rule["record"] for rule in rules("record")]
    assert len(names) == len(set(names))


def test_the_dashboard_file_equals_its_panels(tmp_path: Path) -> None:
    """Change deploy/grafana/panels.py, then run dashboard.py."""
    made = tmp_path / "made.json"
    subprocess.run([sys.executable, str(GRAFANA / "dashboard.py"), str(made)], check=True)
    assert json.loads(made.read_text("utf-8")) == DASHBOARD


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_is_described(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEF")[: len(panel["targets"])]
    assert panel["targets"]
    for target in panel["targets"]:
        assert "job=~" in target["expr"]
        assert target["legendFormat"]


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    across = range(place["x"], place["x"] + place["w"])
    return {(x, y) for x in across for y in range(place["y"], place["y"] + place["h"])}


def test_no_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert not taken & cells(panel), panel["title"]
        taken |= cells(panel)
    assert {x for x, _ in taken} == set(range(24))
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]
    assert len(identities) == len(set(identities))
    assert len(titles) == len(set(titles))


def test_every_panel_can_be_filtered_to_one_server() -> None:
    """Except panels of series that are recorded over all servers, and those of an ingress about replicas."""
    wide = {panel["title"] for panel in PANELS if any("$instance" not in target["expr"] for target in panel["targets"])}
    assert wide == {
        *("Failures", "Rejected with 429", "Error budget"),
        *("Replicas", "Queued tokens by replica", "Imbalance", "Routing", "Replicas lost"),
    }


def test_the_dashboard_depends_on_no_particular_data_source() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "model", "task", "instance"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used == {*names, "__rate_interval"}
    assert DASHBOARD["schemaVersion"] >= 41
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *("Overview", "Latency", "Queue and admission", "Engine", "Cache", "Speculation"),
        *("Decisions", "Replicas", "Keys", "Failures", "Process"),
    ]
