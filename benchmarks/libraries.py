"""Compare own code with the libraries that could replace it: cost of each, and invalid input that the library accepts.

    pip install httptools limits ruamel.yaml strictyaml sentencepiece protobuf
    python -m benchmarks.libraries [--rounds 5] [--only http sentencepiece templates yaml limits metrics]

The libraries are needed by this measurement alone. Rows of a table: what is measured, then a value for each candidate.
Candidates take turns in each round; a value is the median of the rounds. docs/decisions.md has the conclusions.
"""

import argparse
import io
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from queue import Empty

import h11
import httptools
import limits
import limits.storage
import limits.strategies
import prometheus_client
import ruamel.yaml
import ruamel.yaml.error
import strictyaml
import yaml
from google.protobuf.message import DecodeError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as open_exposition
from sentencepiece import sentencepiece_model_pb2

from benchmarks.serving import machine
from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.template_sandbox import FAILURES
from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer import sentencepiece
from polyhead.service.api.access.rate_limit import RateBucket
from polyhead.service.api.http.request_body import ChunkedBody
from polyhead.service.api.http.request_head import HEAD_END, find_head_end, read_head
from polyhead.service.config import yaml_file
from polyhead.service.metrics.exposition import openmetrics_text, prometheus_text
from tests.models.chat import test_template_sandbox as templates
from tests.service.api.http import test_framing as framing

Call = Callable[[], object]
READ_BYTES = 1 << 16  # of a socket at once
CHUNKS = 1_000_000
CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD = CHUNKED_HEAD.replace(b"POST /", b"POST /v1/chat/completions").replace(
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nContent-Type: application"
    b"/json\r\nUser-Agent: OpenAI/Python 2.12.0\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n"
    b"X-Stainless-Arch: x64\r\nAuthorization: Bearer sk-0123456789abcdef\r\nContent-Length: 120\r\n\r\n",
)


def time_calls(candidates: Mapping[str, Call], calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, for each candidate."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            found[name].append((time.perf_counter() - started) / calls * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def show(measure: str, values: Mapping[str, float | str]) -> None:
    cells = (
        f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
    print(f"| {measure} | {' | '.join(cells)} |", flush=True)


def install_size(*names: str) -> float:
    """MiB of the files of distributions."""
    files = (file.locate() for name in names for file in metadata.files(name) or ())
    return sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).is_file()) / 2**20


# HTTP


class LlhttpBody:
    """A chunked body as httptools reads it, within the interface of `ChunkedBody`.

    httptools has neither llhttp's pause nor the offset at which a message ends. So it is fed in slices, each of which
    ends behind CR LF CR LF, where alone a chunked body can end.
    """

    SLICE_BYTES = 6000

    def __init__(self) -> None:
        self.complete = self.is_paused = False
        self.tail, self.into = b"", bytearray()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(CHUNKED_HEAD)

    def on_body(self, piece: bytes) -> None:
        self.into += piece

    def on_message_complete(self) -> None:
        self.complete = True

    def consume(self, buffer: bytearray, into: bytearray) -> None:
        self.into, at, stop = into, 0, min(len(buffer), self.SLICE_BYTES)
        while at < stop and not self.complete:
            window = self.tail + buffer[at:stop]
            found = window.find(HEAD_END)
            end = stop if found < 0 else at + found + len(HEAD_END) - len(self.tail)
            piece = bytes(buffer[at:end])
            self.parser.feed_data(piece)
            self.tail = (self.tail + piece)[-3:] if found < 0 else b""
            at = end
        del buffer[:at]
        self.is_paused = bool(buffer) and not self.complete


class LlhttpHead:
    """The result of httptools for a head, without our checks."""

    def __init__(self) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.target, self.is_complete = b"", False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def read_llhttp(content: bytes) -> tuple[LlhttpHead, bool]:
    """The head, and whether anything in `content` was refused."""
    head = LlhttpHead()
    try:
        httptools.HttpRequestParser(head).feed_data(content)
    except httptools.HttpParserUpgrade:
        return head, False
    except httptools.HttpParserError:
        return head, True
    return head, False


def read_h11(content: bytes) -> object:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(content)
    return connection.next_event()


@dataclass
class Drained:
    us_per_chunk: float
    longest_turn_ms: float


def drain(make_reader: Callable[[], ChunkedBody | LlhttpBody], content: bytes) -> Drained:
    reader, buffer, body, longest = make_reader(), bytearray(), bytearray(), 0.0
    started = time.perf_counter()
    for start in range(0, len(content), READ_BYTES):
        buffer += content[start : start + READ_BYTES]
        reader.is_paused = True
        while reader.is_paused:
            turn = time.perf_counter()
            reader.consume(buffer, body)
            longest = max(longest, time.perf_counter() - turn)
    assert reader.complete
    return Drained((time.perf_counter() - started) / len(body) * 1e6, longest * 1e3)


def drain_h11(content: bytes) -> Drained:
    connection, size, longest = h11.Connection(h11.SERVER), 0, 0.0
    connection.receive_data(CHUNKED_HEAD)
    connection.next_event()
    started = time.perf_counter()
    for start in range(0, len(content), READ_BYTES):
        turn = time.perf_counter()
        connection.receive_data(content[start : start + READ_BYTES])
        while isinstance(event := connection.next_event(), h11.Data):
            size += len(event.data)
        longest = max(longest, time.perf_counter() - turn)
    return Drained((time.perf_counter() - started) / size * 1e6, longest * 1e3)


def measure_http(rounds: int) -> None:
    heads: dict[str, Call] = {
        "ours": lambda: read_head(HEAD[: find_head_end(bytearray(HEAD), 0)]),
        "httptools without our checks": lambda: read_llhttp(HEAD),
        "h11": lambda: read_h11(HEAD),
    }
    show("us, a head of 11 fields", time_calls(heads, 2000, rounds))
    flood, end = b"1\r\nx\r\n", b"0\r\n\r\n"
    drained: dict[str, list[Drained]] = {"ours": [], "httptools": [], "h11": []}
    for _ in range(rounds):
        drained["ours"].append(drain(ChunkedBody, flood * CHUNKS + end))
        drained["httptools"].append(drain(LlhttpBody, flood * CHUNKS + end))
        drained["h11"].append(drain_h11(flood * (CHUNKS // 20) + end))
    show("us, a chunk of a byte", {n: statistics.median(one.us_per_chunk for one in d) for n, d in drained.items()})
    turns = {n: statistics.median(one.longest_turn_ms for one in d) for n, d in drained.items()}
    show("ms, longest turn of the loop", turns)
    heard = {name: read_llhttp(content) for name, (_, content) in framing.NO_REQUESTS.items()}
    passed = [name for name, (head, refused) in heard.items() if head.is_complete or not refused]
    show(f"of {len(heard)} heads to refuse, not refused", {"ours": "0", "httptools": f"{len(passed)}"})
    print("; ".join(passed))
    chunks = [name for name, sent in framing.CHUNKS.items() if not read_llhttp(CHUNKED_HEAD + sent + end)[1]]
    show(f"of {len(framing.CHUNKS)} bodies to refuse, not refused", {"ours": "0", "httptools": "; ".join(chunks)})
    show("MiB installed", {"httptools": install_size("httptools")})


# SentencePiece

NO_MODELS = {
    "text": b"no such thing",
    "cut field": b"\x0a\xff\x01",
    "endless number": b"\xff" * 12,
    "a number for a piece": b"\x08\x01",
    "a cut score": b"\x0a\x05\x15\x00\x00\x80\x3f\x00",
    "an empty file": b"",
}


def read_protobuf(raw: bytes) -> dict[str, float]:
    model = sentencepiece_model_pb2.ModelProto.FromString(raw)
    return {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}


def is_refused(read: Callable[[], object]) -> bool:
    try:
        read()
    except (CheckpointError, DecodeError, ValueError, strictyaml.YAMLError):
        return True
    return False


def measure_sentencepiece(rounds: int) -> None:
    model = sentencepiece_model_pb2.ModelProto()
    for number in range(32_000):
        model.pieces.add(piece=f"\u2581piece{number}", score=-number / 1000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "source.spm")
        path.write_bytes(model.SerializeToString())
        assert sentencepiece.read_unigram(path).scores == read_protobuf(path.read_bytes())
        readers: dict[str, Call] = {
            "ours": lambda: sentencepiece.read_unigram(path),
            "protobuf": lambda: read_protobuf(path.read_bytes()),
        }
        show("us, a model of 32,000 pieces", time_calls(readers, 1, rounds))
        passed: dict[str, list[str]] = {name: [] for name in readers}
        for name, raw in NO_MODELS.items():
            path.write_bytes(raw)
            for reader, read in readers.items():
                passed[reader] += [] if is_refused(read) else [name]
    show("of 6 files that hold no model, read", {name: "; ".join(each) or "none" for name, each in passed.items()})
    sizes = {name: install_size(name) for name in ("sentencepiece", "protobuf")}
    show("MiB installed", sizes)


# Templates


def plain_sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, indent=indent)
    environment.globals["strftime_now"] = time.strftime
    return environment


def render_plainly(source: str, outcome: "multiprocessing.Queue[tuple[str, float, float]]") -> None:
    """In a process of its own: how it ended, its processor seconds, and the MiB by which the process grew."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (3, 4))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        plain_sandbox().from_string(source).render(messages=[templates.USER])
        ended = "rendered"
    except FAILURES as error:
        ended = type(error).__name__
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    outcome.put((ended, time.thread_time() - started, grown / 1024))


def judge(source: str) -> str:
    """stopped, rendered, slow (over a second) or big (over 100 MiB)."""
    context = multiprocessing.get_context("fork")
    outcome = context.Queue()
    process = context.Process(target=render_plainly, args=(source, outcome), daemon=True)
    process.start()
    try:
        ended, seconds, grown = outcome.get(timeout=10)
    except Empty:
        return "slow"  # its limit of processor time ended it, or it still runs
    finally:
        process.kill()
        process.join()
    if seconds > 1 or grown > 100 or ended == "MemoryError":
        return "slow" if seconds > 1 else "big"
    return "rendered" if ended == "rendered" else "stopped"


def measure_templates(rounds: int) -> None:
    found = [judge(source) for source in templates.BOMBS.values()]
    values = {kind: f"{found.count(kind)}" for kind in ("stopped", "rendered", "slow", "big")}
    show(f"{len(found)} templates that must be stopped, Jinja's sandbox alone", values)
    open_ways = [source for source in templates.ESCAPES if judge(source) == "rendered"]
    show(f"of {len(templates.ESCAPES)} ways out, not refused", {"ours": "0", "Jinja's sandbox": f"{len(open_ways)}"})
    for name in ("chatml", "tools"):
        source = templates.TEMPLATES[name]
        ours, plain = ChatTemplate(source), plain_sandbox().from_string(source)
        for turns in (1, 100):
            messages = (templates.CHATS["both"] * 20)[:turns] if turns > 1 else [templates.USER]
            renderers: dict[str, Call] = {
                "ours": lambda ours=ours, messages=messages: ours.render(messages),
                "Jinja's sandbox": lambda plain=plain, messages=messages: plain.render(messages=messages, tools=None),
            }
            show(f"us, {name}, {turns} messages", time_calls(renderers, 2000 // turns, rounds))


# YAML

AMBIGUOUS = {
    "a name twice": "a: 1\na: 2\n",
    "a reference": "a: &x [1]\nb: *x\n",
    "a tag": "a: !!int '3'\n",
    "no": "a: no\n",
    "1:30": "a: 1:30\n",
    "017": "a: 017\n",
    "1_000": "a: 1_000\n",
    "a date": "a: 2020-01-01\n",
}
PLAIN_VALUES = {"no": "no", "1:30": "1:30", "017": "017", "1_000": "1_000", "a date": "2020-01-01"}


def read_differently(read: Callable[[str], object]) -> list[str]:
    """What is accepted and must be refused, or is another value than the text that stands there."""
    wrong = []
    for name, text in AMBIGUOUS.items():
        try:
            value = read(text)
        except (yaml.YAMLError, ruamel.yaml.error.YAMLError, strictyaml.YAMLError, yaml_file.YamlFileError, ValueError):
            continue
        wrong += [] if value == {"a": PLAIN_VALUES.get(name)} else [name]
    return wrong


def measure_yaml(rounds: int) -> None:
    text = "".join(f"name_{number}: {value}\n" for number, value in enumerate(["8000", "text", "true", "1.5"] * 20))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "polyhead.yaml")

        def ours(content: str) -> object:
            path.write_text(content)
            return yaml_file.read_yaml(str(path)).values

        readers: dict[str, Callable[[str], object]] = {
            "ours": ours,
            "PyYAML": yaml.safe_load,
            "ruamel.yaml": lambda content: ruamel.yaml.YAML(typ="safe", pure=True).load(io.StringIO(content)),
            "strictyaml": lambda content: strictyaml.load(content).data,
        }
        timed = {name: (lambda read=read: read(text)) for name, read in readers.items()}
        show("us, a file of 80 names", time_calls(timed, 3, rounds))
        for name, read in readers.items():
            show(f"of {len(AMBIGUOUS)} texts, read otherwise", {name: "; ".join(read_differently(read)) or "none"})
        for name, read in readers.items():
            show(
                "a list in brackets, a number",
                {name: "refused" if is_refused(lambda r=read: r("a: [1]\n")) else "read"},
            )
    show(
        "MiB installed",
        {
            "PyYAML": install_size("pyyaml"),
            "ruamel.yaml": install_size("ruamel.yaml"),
            "strictyaml": install_size("strictyaml", "python-dateutil"),
        },
    )


# Rate limits


def measure_limits(rounds: int) -> None:
    bucket = RateBucket(10**9, time.monotonic)
    per_minute = limits.RateLimitItemPerMinute(10**9)
    strategies = {
        "fixed window": limits.strategies.FixedWindowRateLimiter,
        "moving window": limits.strategies.MovingWindowRateLimiter,
        "sliding window": limits.strategies.SlidingWindowCounterRateLimiter,
    }

    def spend() -> None:
        bucket.wait_seconds()
        bucket.spend(1)

    candidates: dict[str, Call] = {"ours": spend}
    for name, strategy in strategies.items():
        limiter = strategy(limits.storage.MemoryStorage())
        candidates[name] = lambda limiter=limiter: limiter.hit(per_minute, "key")
    show("us, a request counted", time_calls(candidates, 2000, rounds))
    left: dict[str, str] = {}
    small = RateBucket(100, lambda: 0.0)
    small.spend(90)
    small.spend(50)
    left["ours"] = f"{small.level:g}"
    for name, strategy in strategies.items():
        limiter, item = strategy(limits.storage.MemoryStorage()), limits.RateLimitItemPerMinute(100)
        limiter.hit(item, "key", cost=90)
        limiter.hit(item, "key", cost=50)  # tokens of an answer that was given already
        left[name] = f"{limiter.get_window_stats(item, 'key').remaining}"
    show("left of 100 tokens after answers of 90 and 50", left)
    show("MiB installed", {"limits and what it needs": install_size("limits", "deprecated", "wrapt")})


# Metrics


@dataclass
class Page:
    """Families as a registry of prometheus_client hands them out."""

    families: Iterable[prometheus_client.Metric]

    def collect(self) -> Iterable[prometheus_client.Metric]:
        return self.families


def measure_metrics(rounds: int) -> None:
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus_client.CollectorRegistry()
    for number in range(30):
        histogram = prometheus_client.Histogram(f"h{number}_seconds", "Of it.", ["model"], registry=registry)
        counter = prometheus_client.Counter(f"c{number}", "Of it.", ["model"], registry=registry)
        for model in ("chat", "mail", "search"):
            histogram.labels(model).observe(0.3)
            counter.labels(model).inc()
    page, names = Page(list(registry.collect())), open_exposition.ALLOWUTF8
    assert prometheus_text(page.families) == exposition.generate_latest(page, names)
    assert openmetrics_text(page.families) == open_exposition.generate_latest(page, names)
    samples = sum(len(family.samples) for family in page.families)
    texts: dict[str, Call] = {
        "ours": lambda: prometheus_text(page.families),
        "generate_latest": lambda: exposition.generate_latest(page, names),
        "ours, OpenMetrics": lambda: openmetrics_text(page.families),
        "generate_latest, OpenMetrics": lambda: open_exposition.generate_latest(page, names),
    }
    show(f"us, a page of {samples} samples", time_calls(texts, 10, rounds))


SUBJECTS: dict[str, Callable[[int], None]] = {
    "http": measure_http,
    "sentencepiece": measure_sentencepiece,
    "templates": measure_templates,
    "yaml": measure_yaml,
    "limits": measure_limits,
    "metrics": measure_metrics,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    given = parser.parse_args()
    print(machine())
    for name in given.only:
        print(f"\n{name}")
        SUBJECTS[name](given.rounds)


if __name__ == "__main__":
    main()
