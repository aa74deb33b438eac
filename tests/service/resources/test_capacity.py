"""Memory of a container: what is read of its limits, and that a server within them refuses before it is killed."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from polyhead.service.cli import main as cli
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import BodyTooLarge, Overloaded
from polyhead.service.resources import capacity
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, MIN_REQUEST_BYTES, Headroom, MemoryClaim
from polyhead.service.server import assembly as serve
from tests.service.fleet.test_fleet import client_of
from tests.support.processes import Process

MIB = 1 << 20
LIMIT = 448  # MiB: the libraries, the reserve and the tiny models
# Joins a control group and becomes the server; the arguments are the file of the group and the flags.
JOINING = (
    "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
    "os.execv(sys.executable, [sys.executable, '-m', 'polyhead', 'serve', *sys.argv[2:]])"
)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /sys/fs/cgroup; the process is in the group /outer/inner of both versions."""
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(capacity, "CGROUP_ROOT", tmp_path / "groups")
    monkeypatch.setattr(capacity, "OWN_CGROUP_FILE", tmp_path / "own")
    write(tmp_path / "own", "4:memory:/outer/inner\n3:cpu,cpuacct:/outer/inner\n0::/outer/inner\n")
    write(tmp_path / "meminfo", f"MemAvailable: {8192 * 1024} kB\n")
    for root in (".", "memory", "cpu"):
        (tmp_path / "groups" / root / "outer" / "inner").mkdir(parents=True)
    return tmp_path / "groups"


def left() -> int:
    return min(capacity.available_memory()) // MIB


@pytest.mark.parametrize(
    ("prefix", "limit", "used"),
    [
        ("", "memory.max", "memory.current"),
        ("", "memory.high", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
@pytest.mark.parametrize("group", [".", "outer", "outer/inner"])
def test_the_least_limit_of_all_groups_above_counts(
    groups: Path, prefix: str, limit: str, used: str, group: str
) -> None:
    for one in (".", "outer", "outer/inner"):
        write(groups / prefix / one / limit, f"{1000 * MIB}\n")
        write(groups / prefix / one / used, f"{100 * MIB}\n")
    assert left() == 900
    write(groups / prefix / group / limit, f"{400 * MIB}\n")
    assert left() == 300
    write(groups / prefix / group / "memory.stat", f"total_inactive_file {50 * MIB}\n")
    assert left() == 350


def test_groups_without_a_limit_and_groups_that_are_not_there_do_not_count(groups: Path) -> None:
    write(groups / "outer" / "memory.max", "max\n")
    write(groups / "memory" / "outer" / "memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    write(groups / "memory" / "outer" / "memory.usage_in_bytes", "4096\n")
    assert left() == 8192
    write(groups.parent / "own", "0::/../elsewhere\n4:memory:/docker/0123\n")  # of the host, not visible here
    write(groups / "memory.max", f"{300 * MIB}\n")
    write(groups / "memory.current", "0\n")
    assert left() == 300


def test_cores_of_groups_above_count(groups: Path) -> None:
    write(groups / "outer" / "cpu.max", "250000 100000\n")
    assert min(capacity.core_limits()) == 3
    write(groups / "cpu" / "outer" / "inner" / "cpu.cfs_quota_us", "150000\n")
    write(groups / "cpu" / "outer" / "inner" / "cpu.cfs_period_us", "100000\n")
    assert min(capacity.core_limits()) == 2
    write(groups / "cpu" / "outer" / "inner" / "cpu.cfs_quota_us", "-1\n")
    assert min(capacity.core_limits()) == 3


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["check", "nothing"]])
def test_a_container_that_is_too_small_for_any_server_gets_a_message(command: list[str], groups: Path) -> None:
    write(groups / "outer" / "memory.max", f"{200 * MIB}\n")
    write(groups / "outer" / "memory.current", "0\n")
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 1
    assert "has 200 MiB of memory, and interpreter and libraries alone take about 256" in result.output


def test_memory_for_requests_is_taken_and_given_back() -> None:
    headroom = Headroom(free=ALLOCATOR_BYTES + 100 * MIB, model_bytes=lambda: 20 * MIB)
    claim = MemoryClaim(headroom)
    claim.grow(50 * MIB, "the body")
    with pytest.raises(Overloaded, match="the answer takes about 40 MiB, and 30 are left by others"):
        MemoryClaim(headroom).grow(40 * MIB, "the answer")
    with pytest.raises(BodyTooLarge, match="the body takes about 81 MiB, and the server has 80 for requests"):
        MemoryClaim(headroom).grow(81 * MIB, "the body")
    claim.release()
    claim.release()
    with MemoryClaim(headroom).reserved(80 * MIB, "inputs"), pytest.raises(Overloaded):
        headroom.reserve(1, "inputs")
    headroom.reserve(80 * MIB, "inputs")


def test_small_requests_have_room_whatever_models_hold() -> None:
    assert Headroom(free=0, model_bytes=lambda: 1 << 40).total == MIN_REQUEST_BYTES


def test_a_call_that_memory_is_too_small_for_is_refused(
    groups: Path, tiny_classifier: Path, tiny_embedder: Path
) -> None:
    write(groups / "memory.max", f"{100 * MIB}\n")
    write(groups / "memory.current", "0\n")
    settings = Settings(models={"judge": str(tiny_classifier), "embed": str(tiny_embedder)}, memory_mib=150)

    async def run() -> None:
        ready = asyncio.Event()
        app = serve.assemble(settings, lambda _: ready.set())
        async with app.router.lifespan_context(app), client_of(app) as http:
            await ready.wait()
            room = app.state.server.headroom
            refused = await http.post("/v1/embeddings", json={"model": "embed", "input": ["x" * 60_000] * 4})
            assert refused.status_code == 413
            assert "input of 240000 characters takes about 38 MiB" in refused.json()["error"]["message"]
            with MemoryClaim(room).reserved(MIN_REQUEST_BYTES - MIB, "others"):
                late = await http.post("/v1/embeddings", json={"model": "embed", "input": "x" * 400_000})
            assert (late.status_code, late.headers["retry-after"]) == (429, "1")
            assert "the body takes about 1 MiB, and" in late.json()["error"]["message"]
            answer = await http.post("/v1/embeddings", json={"model": "embed", "input": ["a good film"] * 50})
            assert answer.status_code == 200
            assert not room._reserved

    asyncio.run(run())


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of LIMIT MiB."""
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        made = capacity.CGROUP_ROOT / root / f"polyhead-test-{os.getpid()}"
        with suppress(OSError):
            made.mkdir()
            try:
                (made / limit).write_text(f"{LIMIT * MIB}")
                (made / "memory.swap.max").write_text("0") if not root else None
                yield made
            finally:
                made.rmdir()
            return
    pytest.skip("control groups of memory cannot be made here")


def killed(group: Path) -> int:
    """Processes of the group that the system has ended for its memory."""
    file = next(file for file in (group / "memory.events", group / "memory.oom_control") if file.exists())
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))


def test_a_server_in_a_small_container_is_not_killed(group: Path, tiny_generator: Path, tiny_embedder: Path) -> None:
    """Its cache is as large as the limit allows, and 128 calls have bodies of 8 MiB, at once."""
    entry = ("-c", JOINING, str(group / "cgroup.procs"))
    served = Process(
        f"chat={tiny_generator}", f"embed={tiny_embedder}", f"wide={tiny_generator}", "--executor", "torch", entry=entry
    )
    try:
        url = served.ready() and served.url
        batch = {"model": "embed", "input": ["! " * 200] * 10_000}
        long = {"model": "chat", "prompt": "x " * (4 * MIB - 100), "max_tokens": 1}

        def ask(number: int) -> int:
            body, path = (long, "completions") if number % 2 else (batch, "embeddings")
            try:
                return httpx.post(f"{url}/v1/{path}", json=body, timeout=60, verify=False).status_code
            except httpx.TransportError:  # rejected before it had sent everything
                return 0

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, range(64)))
        assert set(answers) <= {0, 200, 400, 408, 413, 429}
        assert served.get("/livez").status_code == 200
        assert killed(group) == 0
    finally:
        assert served.stop() == 0


def test_a_model_that_a_container_is_too_small_for_is_refused(group: Path, tiny_generator: Path) -> None:
    entry = ("-c", JOINING, str(group / "cgroup.procs"))
    served = Process(f"chat={tiny_generator}", "--cache-tokens", str(1 << 26), entry=entry)
    assert served.child.wait(60) == 1
    assert "chat is broken: chat needs" in served.log
    assert "MiB are free. It would fit with cache_tokens" in served.log
    assert killed(group) == 0
