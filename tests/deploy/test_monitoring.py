"""What is deployed beside the server to watch it, as files: rules, alerts and their stories, the dashboard.

tests/deploy/test_monitoring_served.py asks the same of a real server.
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
STORIES = sorted((DEPLOYED / "tests").glob("*.yml"))
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "polyhead.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = sorted({rule["alert"] for rule in rules("alert")})


@cache
def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    said = promtool("check", "config", "prometheus.yml")
    assert f"{len(list((DEPLOYED / 'rules').glob('*.yml')))} rule files found" in said
    promtool("check", "rules", *(str(path) for path in (DEPLOYED / "rules").glob("*.yml")))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_stories_of_the_alerts_come_true(path: Path) -> None:
    promtool("test", "rules", str(path))


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_has_a_story_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    cases = [
        case
        for path in STORIES
        for story in read(path)["tests"]
        for case in story.get("alert_rule_test", [])
        if case["alertname"] == alert
    ]
    fired = [{**expected["exp_labels"]} for case in cases for expected in case.get("exp_alerts", [])]
    for rule in (rule for rule in rules("alert") if rule["alert"] == alert):
        assert any(rule["labels"].items() <= labels.items() for labels in fired), rule["labels"]
    assert any(not case.get("exp_alerts") for case in cases)


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_each_alert_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("Polyhead")
    assert rule["labels"]["severity"] in ("critical", "warning")
    said = rule["annotations"]
    assert said["summary"]
    assert said["description"]
    page, _, anchor = said["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert anchor == rule["alert"].lower()


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    assert sorted(re.findall(r"^### (Polyhead\w+)$", text, re.MULTILINE)) == ALERTS


def codes(least: int, beyond: int) -> set[str]:
    """Of all errors whose status is in [least, beyond)."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = [kind for kind in kinds if issubclass(kind, errors.PolyheadError)]
    return {kind.code for kind in found if least <= kind.status < beyond}


def test_the_error_budget_is_spent_by_all_that_is_a_5xx_and_by_nothing_else() -> None:
    named = [OURS.findall(rule["expr"]) for rule in rules("record") if ":polyhead_errors:" in rule["record"]]
    for pattern in {pattern for patterns in named for pattern in patterns}:
        assert set(pattern.split("|")) == codes(500, 600)
        assert not any(re.fullmatch(pattern, code) for code in codes(400, 500))
    assert sum(map(len, named)) == 6  # begun and turned away: as a rate, in an hour, in six


def test_recorded_names_say_which_labels_are_left() -> None:
    for rule in rules("record"):
        level, metric, operation = rule["record"].split(":")
        by = re.search(r"\bby \(([^)]+)\)", rule["expr"])
        if by:
            assert level.split("_") == by[1].split(", "), rule
        assert metric.startswith("polyhead_")
        assert operation


def exposed() -> set[str]:
    """Names of all samples that there can be on a server's page."""
    page, _ = Metrics(["chat"]).render("")
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", page.decode(), re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in kinds for part in parts.get(kind, ("",))}


def test_whatever_is_asked_for_is_counted_or_recorded() -> None:
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    asked += [rule["expr"] for rule in rules("alert") + rules("record")]
    asked += [str(variable.get("definition")) for variable in DASHBOARD["templating"]["list"]]
    assert {name for expression in asked for name in MEASURED.findall(expression)} <= exposed()
    known = {rule["record"] for rule in rules("record")}
    used = {name for expression in asked for name in RECORDED.findall(expression)}
    assert used <= known


def looked_at(expression: str) -> set[str]:
    """The metrics that an expression comes to, through whatever is recorded of them."""
    recorded = {rule["record"]: rule["expr"] for rule in rules("record")}
    found = {re.sub(r"_bucket$", "", name) for name in MEASURED.findall(expression)}
    return found.union(*(looked_at(recorded[name]) for name in RECORDED.findall(expression)))


def test_the_table_of_metrics_is_right_about_alerts() -> None:
    """Its last column says which alert looks at a metric."""
    rows = re.findall(
        r"^\| `(polyhead_\w+)`.*\|([^|]*)\|$", (ROOT / "docs/metrics.md").read_text("utf-8"), re.MULTILINE
    )
    told = {(metric, alert) for metric, cell in rows for alert in re.findall(r"\bPolyhead\w+", cell)}
    looks = {(metric, rule["alert"]) for rule in rules("alert") for metric in looked_at(rule["expr"])}
    assert told
    assert told <= looks
    assert {alert for _, alert in looks} - {alert for _, alert in told} <= {"PolyheadDown", "PolyheadOverloaded"}


def test_every_recorded_series_is_recorded_once() -> None:
    names = [rule["record"] for rule in rules("record")]
    assert len(names) == len(set(names))


def test_the_dashboard_is_what_its_panels_say(tmp_path: Path) -> None:
    """Change deploy/grafana/panels.py, then run dashboard.py."""
    made = tmp_path / "made.json"
    subprocess.run([sys.executable, str(GRAFANA / "dashboard.py"), str(made)], check=True)
    assert json.loads(made.read_text("utf-8")) == DASHBOARD


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
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


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert not taken & cells(panel), panel["title"]
        taken |= cells(panel)
    assert {x for x, _ in taken} == set(range(24))
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]
    assert len(identities) == len(set(identities))
    assert len(titles) == len(set(titles))


def test_every_panel_can_be_narrowed_to_one_server() -> None:
    """But for what is recorded of all of them together, and what an ingress says of replicas."""
    wide = {panel["title"] for panel in PANELS if any("$instance" not in target["expr"] for target in panel["targets"])}
    assert wide == {
        *("Failures", "Rejected with 429", "Error budget"),
        *("Replicas", "Queued tokens by replica", "Imbalance", "Routing", "Replicas lost"),
    }


def test_the_dashboard_is_for_whoever_has_a_prometheus() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "model", "task", "instance"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used == {*names, "__rate_interval"}
    assert DASHBOARD["schemaVersion"] >= 41
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *("Overview", "Latency", "Queue and admission", "Engine", "Cache", "Speculation"),
        *("Replicas", "Keys", "Failures", "Process"),
    ]
