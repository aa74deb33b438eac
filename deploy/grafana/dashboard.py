"""Writes the Grafana dashboard: `python deploy/grafana/dashboard.py deploy/grafana/dashboards/polyhead.json`.

The panels are in panels.py.  The JSON is not edited by hand; a test generates it again and compares.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panel import Panel
from panels import ROWS

SCHEMA_VERSION = 42  # of Grafana's JSON
WIDTH = 24  # columns of its grid
HEIGHTS = {"stat": 4, "timeseries": 8}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The values are those of series that every server has from its start.
VARIABLES = {
    "job": "label_values(polyhead_model_ready, job)",
    "model": 'label_values(polyhead_requests_received_total{job=~"$job"}, model)',
    "task": 'label_values(polyhead_requests_received_total{job=~"$job",model=~"$model"}, task)',
    "instance": 'label_values(polyhead_build_info{job=~"$job"}, instance)',
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "polyhead",
        "title": "Polyhead",
        "description": "Encoders and decoders of one or many Polyhead servers.",
        "tags": ["polyhead"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # a shared crosshair
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [datasource(), *(variable(name, query) for name, query in VARIABLES.items())]},
        "panels": list(placed()),
    }


def datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # on a change of the time range: models may be loaded and unloaded
        "includeAll": True,
        # What ended before a model was known has an empty name, and belongs to all.
        "allValue": "" if name == "job" else ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def placed() -> Iterator[dict[str, Any]]:
    """Rows one below the other; in a row from left to right, wrapped at the grid's width."""
    number, top = 0, 0
    for title, panels in ROWS.items():
        number, left = number + 1, 0
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": grid(top, 0, WIDTH, 1)}
        top, height = top + 1, 0
        for panel in panels:
            if left + panel.width > WIDTH:
                top, left = top + height, 0
            number, height = number + 1, HEIGHTS[panel.kind]
            yield drawn(number, panel, grid(top, left, panel.width, height))
            left += panel.width
        top += height


def grid(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def drawn(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "gridPos": position,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": field(panel), "overrides": []},
        "options": figure(panel) if panel.kind == "stat" else graph(),
        "targets": [target(letter, *query) for letter, query in zip("ABCDEF", panel.queries, strict=False)],
    }


def field(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    lines = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 20 if panel.stacked else 0,
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.red is None else "line"},
        "showPoints": "never",
    }
    custom = {} if panel.kind == "stat" else lines
    return {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}, "custom": custom}


def figure(panel: Panel) -> dict[str, Any]:
    named = any(legend for _, legend in panel.queries)
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value_and_name" if named else "value",
    }


def graph() -> dict[str, Any]:
    return {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def target(letter: str, query: str, legend: str) -> dict[str, Any]:
    """Of quantiles the traces behind them are shown too, where the server keeps any."""
    return {
        "refId": letter,
        "datasource": SOURCE,
        "expr": query,
        "legendFormat": legend or "__auto",
        "editorMode": "code",
        "range": True,
        "exemplar": "_bucket" in query,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
