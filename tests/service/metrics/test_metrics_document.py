"""docs/metrics.md compared with the metrics page of a server after real traffic, in both formats; and no client can
add a series to the page."""

import asyncio
import gzip
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from polyhead.service.core.model import Model
from polyhead.service.metrics.metric_table import ALL_METRICS, LABEL_VALUES, PROCESS_METRICS, REPLICA_SECTION, SECTIONS
from polyhead.service.metrics.metrics_document import render_document
from tests.models.checkpoint.test_merged_adapter import adapted, generator
from tests.support.calibrations import write_calibration
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, Page, Process
from tests.support.scripted import Registry, application, echo, model

PAGE = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(?P<name>(?:polyhead_|vllm:)\w+)` \| (?P<kind>\w+)(?P<star>\*?) \|(?P<labels>[^|]*)\|", re.M)
OPEN = "application/openmetrics-text; version=1.0.0"
KEY = {"Authorization": "Bearer a-long-secret"}
SAY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
JUNK = 10_000  # values from clients: names, paths, methods, headers, keys
VALUES_EACH = 10  # at least, in the requests of one number
ELSEWHERE = frozenset(
    metric.exposed_name for metric in SECTIONS[REPLICA_SECTION]
)  # metrics of fleets, which a single server lacks
Families = dict[str, tuple[str, frozenset[str]]]  # type and labels, by name


def test_the_document_equals_the_metric_table() -> None:
    assert PAGE.read_text("utf-8") == render_document(), (
        "write it again: python -m polyhead.service.metrics > docs/metrics.md"
    )


def test_labels_are_explained() -> None:
    assert {label for metric in ALL_METRICS for label in metric.labels} == LABEL_VALUES.keys()


# A server after real traffic


@dataclass(frozen=True)
class Call:
    path: str
    body: Any
    status: int
    headers: Mapping[str, str]


GOOD = {"type": "noul", "instructions": "positive"}
TRAFFIC = (
    Call("/v1/completions", SAY | {"model": "chat"}, 200, KEY),
    Call("/v1/completions", SAY | {"model": "chat", "stream": True}, 200, KEY),
    Call("/v1/completions", SAY | {"model": "chat:dressed"}, 200, KEY),
    Call("/models/judge/predict", {"inputs": "a good film"}, 200, KEY),
    Call("/v1/systemone", {"model": "judge", "state": "a good film", "questions": {"q": GOOD}}, 200, KEY),
    Call("/v1/completions", SAY | {"model": "nobody"}, 404, KEY),
    Call("/v1/completions", SAY | {"model": "chat"}, 401, {}),
    Call("/v1/completions", SAY | {"model": "chat"}, 504, KEY | {"X-Request-Timeout": "0.001"}),
    Call("/nowhere", {}, 404, KEY),
)


@pytest.fixture(scope="module")
def server(tiny_generator: Path, tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("dressed")
    adapted(generator(tiny_generator), folder, target_modules=["q_proj"])
    models = f"chat={tiny_generator}", f"chat:dressed={folder}", f"judge={tiny_classifier}"
    calibration = write_calibration(tmp_path_factory.mktemp("calibration") / "judge.json", tiny_classifier)
    process = Process(
        *(*models, "--api-keys", "alice=a-long-secret", "--vllm-metrics", "true"),
        *("--calibrations", f"judge={calibration}"),
    )
    try:
        process.ready()
        for call in TRAFFIC:
            answer = httpx.post(process.url + call.path, json=call.body, headers=call.headers, timeout=PATIENCE)
            assert answer.status_code == call.status, answer.text
        yield process
    finally:
        process.child.kill()
        process.child.wait()


def documented() -> Families:
    return {
        row["name"]: (row["kind"], frozenset(re.findall(r"`(\w+)`", row["labels"])))
        for row in ROW.finditer(PAGE.read_text("utf-8"))
    }


def exposed(families: Iterator[Metric]) -> Families:
    """The metrics that have a sample, without those of the process collector."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in families
        if family.samples and not family.name.startswith(tuple(PROCESS_METRICS))
    }


@pytest.mark.parametrize(("accept", "parse"), [("", plain_text), (OPEN, open_metrics)], ids=["text", "OpenMetrics"])
def test_a_server_exports_exactly_the_documented_metrics(
    server: Process, accept: str, parse: Callable[[str], Iterator[Metric]]
) -> None:
    page = httpx.get(f"{server.url}/metrics", headers={"Accept": accept}).text
    assert len(documented()) > 50
    assert exposed(parse(page)) == {
        name: described for name, described in documented().items() if name not in ELSEWHERE
    }
    assert documented().keys() > ELSEWHERE
    assert all(any(family.name.startswith(begin) for family in parse(page)) for begin in PROCESS_METRICS)


def test_values_are_those_of_the_traffic(server: Process) -> None:
    page = server.page
    assert page.total("requests_total", model="chat", outcome="done") == 2
    assert page.total("requests_total", model="chat:dressed", outcome="done") == 1
    assert page.total("answers_total", finish="length") == 3
    assert page.total("failures_total", reason="expired") == page.total("requests_total", outcome="expired") == 1
    assert page.total("key_requests_total", key="", status="200") == 5
    assert page.total("key_tokens_total", key="", kind="generated") == 12
    assert page.total("key_requests_total") == len([call for call in TRAFFIC if call.headers])
    assert page.total("rejections_total", code="invalid_api_key") == 1
    assert "alice" not in httpx.get(f"{server.url}/metrics").text, "everybody may read the page"
    assert page.total("build_info") == 1


def test_the_page_is_gzipped_if_accepted(server: Process) -> None:
    with httpx.Client(base_url=server.url) as client:
        with client.stream("GET", "/metrics", headers={"Accept-Encoding": "br, GZip;q=0.5"}) as answer:
            packed = b"".join(answer.iter_raw())
        plain = client.get("/metrics", headers={"Accept-Encoding": "br, gzip;q=0.0"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(packed) < len(plain.content) / 4
    assert gzip.decompress(packed).count(b"\n# TYPE ") == plain.content.count(b"\n# TYPE ")
    assert "content-encoding" not in plain.headers


# The duration of a drain


def test_a_drain_is_counted_from_its_first_second(tiny_generator: Path) -> None:
    app = application(Registry([model(tiny_generator, "talker", "generate")], echo), drain_seconds=7)

    def said(name: str) -> float:
        return Page(app.state.server.metrics.render("")[0].decode()).total(name)

    assert (said("draining_seconds"), said("draining_limit_seconds")) == (0, 7)
    now = [100.0]
    app.state.server.admission._clock = lambda: now[0]
    app.state.server.admission.close()
    now[0] = 103.5
    app.state.server.admission.close()  # a second call does not restart the clock
    assert said("draining_seconds") == 3.5


# Values from clients add no series


@pytest.fixture(scope="module")
def app(tiny_generator: Path) -> FastAPI:
    """Of one generator, with keys."""
    talker: Model = model(tiny_generator, "talker", "generate")
    return application(Registry([talker], echo), api_keys={"alice": "a-long-secret"}, max_requests=4)


def scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"junk=" + path.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
    }


async def send(app: FastAPI, method: str, path: str, headers: Mapping[str, str], body: bytes) -> int:
    """The status, without a client library, which would take longer than the tested code for thousands of requests."""
    status, incoming = 0, iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(incoming, None) or await asyncio.get_running_loop().create_future()  # the client stays connected

    async def answered(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope(method, path, headers), receive, answered)  # type: ignore[arg-type]
    return status


def random_requests(number: int) -> Iterator[tuple[str, str, Mapping[str, str], bytes]]:
    """Requests with random values wherever a client can choose: path, method, headers, key, model name."""
    own = {f"x-junk-{number}": f"{number}", "user-agent": f"junk-{number}", "x-request-id": f"junk-{number}"}
    known = {"authorization": "Bearer a-long-secret", "content-type": "application/json"} | own
    body = b'{"model": "junk-%d", "prompt": "a"}' % number
    yield "GET", f"/junk-{number}", known, b""
    yield f"JUNK{number}", "/v1/completions", known, b""
    yield "GET", "/v1/models", {"authorization": f"Bearer junk-{number}"} | own, b""
    yield "POST", "/v1/completions", known, body
    yield "POST", f"/models/junk-{number}/predict", known, b'{"inputs": "a"}'


def series(app: FastAPI) -> list[str]:
    """The name and labels of each sample."""
    page, _ = app.state.server.metrics.render("")
    return sorted(line.rpartition(" ")[0] for line in page.decode().splitlines() if line.startswith("polyhead_"))


def test_random_requests_add_no_series(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "polyhead.http")  # otherwise thousands of lines are stored

    async def all_of(numbers: range) -> set[int]:
        return {await send(app, *asked) for number in numbers for asked in random_requests(number)}

    first = asyncio.run(all_of(range(2)))
    before = series(app)
    assert any('route="/v1/completions"' in line for line in before)
    assert first == {401, 404, 405}
    assert asyncio.run(all_of(range(2, 2 + JUNK // VALUES_EACH))) == first
    assert series(app) == before
    assert not [line for line in before if "junk" in line.lower()]


def test_unknown_names_in_events_add_no_series(app: FastAPI) -> None:
    metrics = app.state.server.metrics
    reasons = islice(cycle(("not_found", "invalid_request")), JUNK)
    metrics.record_early_end("rejected", "not_found")
    metrics.record_early_end("rejected", "invalid_request")
    metrics.record_response("GET", "", 404, "")
    before = series(app)
    for number, code in enumerate(reasons):
        metrics.record_early_end("rejected", code, f"junk-{number}")
        metrics.record_response("GET", "", 404, f"junk-{number}")
    assert series(app) == before
