"""Traces: what a collector receives of a real server's requests, the parents of spans, and their cost."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.datastructures import Headers

from polyhead.service.api.access.access_log import RequestRecord
from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.config.settings import Settings, SettingsError, read_settings
from polyhead.service.server.traces import OtelTraces
from tests.support.collector import Collector, collecting, facts
from tests.support.crowd import Moment, leave
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, Process

KEY = "a-key-that-nobody-may-see"
SECRET = "zebra umbrella"
PARENT = "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"
CLIENT = httpx.Client(timeout=PATIENCE, verify=False)
WHOLE = ["admission", "read", "tokenise", "queue", "steps", "detokenise"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(collector: Collector, long_generator: Path, tiny_classifier: Path) -> Iterator[Process]:
    """One request at a time. The environment also enables FastAPI's own telemetry, which must stay off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
        models = f"chat={long_generator}", f"judge={tiny_classifier}"
        flags = "--api-keys", f"search={KEY}", "--max-requests", "1", "--otlp-endpoint", f"{collector.url}/"
        process = Process(*models, *flags)
    process.ready()
    yield process
    process.child.kill()
    process.child.wait()


def parented(trace: int, flags: str = "01") -> dict[str, str]:
    """The headers of a client with an open span."""
    return {
        "Authorization": f"Bearer {KEY}",
        "traceparent": f"00-{trace:032x}-{PARENT}-{flags}",
        "tracestate": "congo=t61rcWkgMzE",
    }


def post(server: Process, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
    server.rest()  # otherwise there may be no free permit yet
    return CLIENT.post(server.url + path, json=body, headers=headers)


def chat(**others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": SECRET}]
    return {"model": "chat", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | others


def check_nesting(server: Span, below: list[Span]) -> None:
    """The stages are children of the server's span, each within its time, each begun after the one before."""
    for span in below:
        assert span.parent_span_id == server.span_id
        assert server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= server.end_time_unix_nano
    begun = [span.start_time_unix_nano for span in below]
    assert begun == sorted(begun)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_is_a_span_with_its_stages_below(server: Process, collector: Collector, stream: bool) -> None:
    trace = 0xA0 + stream
    answer = post(server, CHAT, chat(stream=stream), parented(trace))
    assert answer.status_code == 200
    span, below = collector.trace(f"{trace:032x}")
    assert (span.name, span.parent_span_id.hex(), span.trace_state) == (f"POST {CHAT}", PARENT, "congo=t61rcWkgMzE")
    assert answer.headers["traceresponse"] == f"00-{trace:032x}-{span.span_id.hex()}-01"
    assert [stage.name for stage in below] == WHOLE
    check_nesting(span, below)

    attributes = facts(span)
    assert attributes["http.request.method"] == "POST"
    assert (attributes["http.route"], attributes["url.path"], attributes["http.response.status_code"]) == (
        CHAT,
        CHAT,
        200,
    )
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.model"]) == ("chat", "chat")
    assert (attributes["polyhead.outcome"], attributes["polyhead.key"]) == ("done", "search")
    assert attributes["polyhead.request_id"] == answer.headers["x-request-id"]
    assert attributes["gen_ai.usage.output_tokens"] == 8
    if not stream:
        assert attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    queue, steps, writing = (facts(stage) for stage in below[3:])
    assert steps["gen_ai.usage.output_tokens"] == 8
    assert queue["polyhead.longest_wait"] == pytest.approx(seconds(below[3]), abs=1e-6)
    assert 0 < writing["polyhead.busy"] <= seconds(below[5])
    assert seconds(below[0]) < attributes["polyhead.time_to_first_token"] < seconds(span)
    assert span.status.code == Status.STATUS_CODE_UNSET


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_many_texts_have_one_span(server: Process, collector: Collector) -> None:
    answer = post(server, "/models/judge/predict", {"inputs": [[f"{SECRET} {n}"] for n in range(40)]}, parented(0xB0))
    assert len(answer.json()) == 40
    span, below = collector.trace(f"{0xB0:032x}")
    assert span.name == "POST /models/{name:path}/predict"
    assert [stage.name for stage in below] == WHOLE[:-1]
    check_nesting(span, below)
    attributes = facts(span)
    assert (attributes["polyhead.requests"], attributes["polyhead.task"], attributes["url.path"]) == (
        40,
        "classify",
        "/models/judge/predict",
    )
    assert attributes["gen_ai.usage.input_tokens"] > 40
    assert "gen_ai.operation.name" not in attributes


def test_tokens_alone_are_a_stage(server: Process, collector: Collector) -> None:
    assert post(server, "/tokenize", {"model": "chat", "prompt": SECRET}, parented(0xB1)).status_code == 200
    _, below = collector.trace(f"{0xB1:032x}")
    assert [stage.name for stage in below] == WHOLE[:3]


def test_rejections_are_no_server_errors_and_disconnects_are_aborted(server: Process, collector: Collector) -> None:
    before = server.rest().total("requests_received_total", task="generate")
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as held:
        body = json.dumps(chat(stream=True, max_tokens=16_000))  # nothing of it is read, so it goes on
        lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in parented(0xC0).items()]
        held.sendall("\r\n".join([*lines, "", body]).encode())
        server.until(lambda: server.page.total("requests_received_total", task="generate") > before)
        refused = CLIENT.post(server.url + CHAT, json=chat(), headers=parented(0xC1))
    assert refused.status_code == 429
    span, below = collector.trace(f"{0xC1:032x}")
    assert refused.headers["traceresponse"].split("-")[2] == span.span_id.hex()
    assert [stage.name for stage in below] == ["admission"]
    check_nesting(span, below)
    attributes = facts(span)
    assert (attributes["http.response.status_code"], attributes["polyhead.outcome"]) == (429, "rejected")
    assert attributes["polyhead.reason"] == refused.json()["error"]["code"]
    assert span.status.code == Status.STATUS_CODE_UNSET
    span, below = collector.trace(f"{0xC0:032x}")
    assert facts(span)["polyhead.outcome"] == "aborted"


def test_a_client_that_leaves_ends_its_spans(server: Process, collector: Collector) -> None:
    server.rest()
    asked = chat(stream=True, max_tokens=10_000)
    assert asyncio.run(leave(server.url, CHAT, asked, Moment(events=3), parented(0xD0))) == 3
    span, below = collector.trace(f"{0xD0:032x}")
    assert [stage.name for stage in below] == WHOLE
    check_nesting(span, below)
    attributes = facts(span)
    assert attributes["polyhead.outcome"] == "aborted"
    assert 0 < attributes["gen_ai.usage.output_tokens"] < 10_000
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_a_deadline_that_passes_is_an_error(server: Process, collector: Collector) -> None:
    late = parented(0xD1) | {"X-Request-Timeout": "0.2"}
    assert post(server, CHAT, chat(max_tokens=16_000), late).status_code == 504
    span, below = collector.trace(f"{0xD1:032x}")
    assert (span.status.code, facts(span)["error.type"]) == (Status.STATUS_CODE_ERROR, facts(span)["polyhead.reason"])
    assert facts(span)["polyhead.outcome"] == "expired"
    check_nesting(span, below)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{0xE0:032x}-{'0' * 16}-01",
        f"ff-{0xE0:032x}-{PARENT}-01",
        f"00-{0xE0:032X}-{PARENT}-01".replace("E0", "EX"),
        f"00-{0xE0:032x}-{PARENT}-01-more",
        f"00-{0xE0:032x}-{PARENT}",
        "0" * 5000,
    ],
)
def test_a_malformed_parent_is_no_parent_and_no_error(server: Process, collector: Collector, parent: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "traceparent": parent, "tracestate": "=,,a b=c,a=b=c"}
    answer = CLIENT.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == 200
    trace = answer.headers["traceresponse"].split("-")[1]
    assert trace != f"{0xE0:032x}"
    assert collector.trace(trace)[0].parent_span_id == b""


def test_no_text_of_a_trace_header_is_logged(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    traces = OtelTraces(settings(collector))
    parent = f"00-{0xE3:032x}-{PARENT}-01"
    for given in (
        {"traceparent": parent, "tracestate": f"a={SECRET}=c,{SECRET},a={SECRET}"},
        {"traceparent": parent, "tracestate": SECRET * 1000},
        {"traceparent": SECRET * 1000},
    ):
        traces.begin(perf_counter(), Headers(given))
    asyncio.run(traces.close())
    assert not caplog.records


def test_two_parents_are_ignored(server: Process, collector: Collector) -> None:
    headers = [*parented(0xE1).items(), ("traceparent", f"00-{0xE2:032x}-{PARENT}-01")]
    answer = CLIENT.get(f"{server.url}/v1/models", headers=headers)
    assert int(answer.headers["traceresponse"].split("-")[1], 16) not in (0xE1, 0xE2)


def test_unsampled_parents_are_not_sampled(server: Process, collector: Collector) -> None:
    answer = post(server, CHAT, chat(), parented(0xF0, flags="00"))
    assert answer.headers["traceresponse"].startswith(f"00-{0xF0:032x}-")
    assert answer.headers["traceresponse"].endswith("-00")
    kept = post(server, CHAT, chat(), parented(0xF1))
    collector.trace(f"{0xF1:032x}")
    assert not [span for span in collector.spans if span.trace_id.hex() == f"{0xF0:032x}"]
    lines = {line["request_id"]: line for line in server.lines if "request_id" in line}
    assert lines[kept.headers["x-request-id"]]["trace_id"] == f"{0xF1:032x}"
    assert "trace_id" not in lines[answer.headers["x-request-id"]]


def test_probes_are_not_traced(server: Process) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert "traceresponse" not in CLIENT.get(server.url + path, headers=parented(0xF2)).headers


def test_spans_contain_no_prompt_no_answer_and_no_key(server: Process, collector: Collector) -> None:
    answer = post(server, CHAT, chat(), parented(0xF3)).json()["choices"][0]["message"]["content"]
    collector.trace(f"{0xF3:032x}")
    assert set(collector.asked) == {"/v1/traces"}
    assert collector.scopes == {"polyhead"}
    sent = b"".join(collector.bodies)
    for word in (*SECRET.split(), KEY, *answer.split()):
        assert len(word) < 4 or word.encode() not in sent
    assert b"test" in sent
    assert {
        (attributes["service.name"], attributes["deployment.environment.name"]) for attributes in collector.resources
    } == {("polyhead", "test")}


def test_a_collector_that_does_not_answer_delays_neither_requests_nor_the_exit(
    server: Process, collector: Collector
) -> None:
    """The last test of this server, which it stops."""
    collector.silent.set()
    for _ in range(5):
        assert post(server, "/predict", {"inputs": "a"}, parented(0xF4)).status_code == 200
    assert server.stop() == 0
    assert "the last traces are lost" in server.log
    assert "something hangs" not in server.log
    collector.silent.clear()


# Without a server


def settings(collector: Collector, **others: Any) -> Settings:
    return Settings(otlp_endpoint=collector.url, **others)


def kept(traces: OtelTraces, flags: str = "") -> bool:
    """Whether a request without a parent, or with such flags, is sampled."""
    headers = {"traceparent": f"00-{7:032x}-{PARENT}-{flags}"} if flags else {}
    return bool(traces.begin(perf_counter(), Headers(headers)).id)


def test_the_ratio_decides_without_a_parent(collector: Collector) -> None:
    none, every = OtelTraces(settings(collector, trace_ratio=0)), OtelTraces(settings(collector, trace_ratio=1))
    assert [kept(none), kept(none, "01"), kept(none, "00")] == [False, True, False]
    assert [kept(every), kept(every, "01"), kept(every, "00")] == [True, True, False]
    for traces in (none, every):
        asyncio.run(traces.close())


def test_spans_beyond_the_queue_are_dropped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds; short, so that it does not run on after the test
    with collecting() as silent:
        silent.silent.set()
        traces = OtelTraces(settings(silent))
        for _ in range(3000):  # more than the queue takes
            visit = RequestContext("id")
            trace = traces.begin(visit.arrived, Headers({}))
            trace.end(RequestRecord.from_scope(visit, {"method": "GET", "path": "/"}, 200))
        asyncio.run(traces.close())
    assert "Queue full, dropping Span" in caplog.text
    assert not silent.spans


def test_opentelemetry_is_loaded_only_if_enabled() -> None:
    code = (
        "import sys\nfrom polyhead.service.cli import main as cli\nfrom polyhead.service.config import settings\n"
        "import polyhead.service.api.app\n"
        "cli.choose_tracing(settings.read_settings({}))\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    sources = {path.name: path.read_text("utf-8") for path in (ROOT / "service").rglob("*.py")}
    assert [name for name, text in sources.items() if "from opentelemetry" in text] == ["traces.py"]
    assert [name for name, text in sources.items() if "server.traces import" in text] == ["main.py"]


def test_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys\nsys.modules.update({'opentelemetry.sdk': None, 'opentelemetry.exporter': None})\n"
        "from polyhead.service.cli import main as cli\nfrom polyhead.service.config import settings\n"
        "try:\n    cli.choose_tracing(settings.read_settings({'otlp_endpoint': 'http://127.0.0.1:1'}))\n"
        "except settings.SettingsError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ("otlp_endpoint: to send traces an extra is needed: pip install 'polyhead[otel]'\n"), (
        found.stderr
    )


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("collector:4318", "must be an address"),
        ("grpc://collector:4317", "must be an address"),
        ("http://", "must be an address"),
        ("http://user:word@collector:4318", "must have no user"),
        ("http://collector:4318/?a=b", "must have no user"),
        ("http://collector:4318/v1/traces/", "must be the collector's address without /v1/traces"),
    ],
)
def test_an_invalid_endpoint_is_rejected(given: str, wrong: str) -> None:
    with pytest.raises(SettingsError, match=f"^otlp_endpoint: {wrong}") as refused:
        read_settings({"otlp_endpoint": given})
    assert "word" not in str(refused.value)
