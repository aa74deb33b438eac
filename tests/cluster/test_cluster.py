"""A fleet on a real cluster of two nodes with a replica on each: replicas and nodes are killed, removed and replaced.

Only the requests that were running on a lost replica fail.
"""

import asyncio
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import ENVIRONMENT, RAY, Cluster, ServedCluster, process_tree, replicas, until
from tests.support.crowd import COMPLETIONS, Answer, ask, completion
from tests.support.load import Asked, load
from tests.support.manifests import pods_of, rendered

pytestmark = pytest.mark.timeout(900)
LONG = 3000  # tokens; a tiny network takes seconds for them


@pytest.fixture(scope="module")
def arguments(long_generator: Path, tiny_classifier: Path) -> list[str]:
    models = [f"chat={long_generator}", f"judge={tiny_classifier}"]
    replicas = ["--replicas", "2", "--replicas-per-node", "1", "--replica-cpus", "0.45"]
    return [*models, *replicas, "--cache-tokens", "65536", "--drain-seconds", "20"]


@pytest.fixture(scope="module")
def served(cluster: Cluster, arguments: list[str]) -> Iterator[ServedCluster]:
    server = ServedCluster(cluster, *arguments)
    try:
        for model in ("chat", "judge"):
            server.wait_for_count(model, 2)
        yield server
    finally:
        server.close()


async def streamed(url: str) -> Answer:
    return await ask(url, COMPLETIONS, completion([5, 6, 7, 8], LONG, stream=True))


def ended(answer: Answer) -> str:
    """How a stream ended: "done" with the complete answer, or "lost" with one error."""
    errors = [data for data in answer.data if '"error"' in data]
    assert len(errors) <= 1
    if errors:
        assert '"stopped"' in errors[0], errors
        assert "lost" in errors[0]
        return "lost"
    assert answer.data[-1] == "[DONE]"
    return "done"


async def while_streaming(served: ServedCluster, act: object) -> list[str]:
    """How eight streams end, during which `act` is called."""
    streams = [asyncio.create_task(streamed(served.url)) for _ in range(8)]
    await asyncio.to_thread(until, lambda: served.page.total("requests_running", model="chat") == 8)
    await asyncio.sleep(0.3)  # all have sent tokens
    await asyncio.to_thread(act)  # type: ignore[arg-type]
    return [ended(answer) for answer in await asyncio.gather(*streams)]


def test_a_killed_replica_fails_only_its_running_requests(served: ServedCluster) -> None:
    before = replicas("chat")
    assert len(before) == 2
    victim = min(before)
    ends = asyncio.run(while_streaming(served, lambda: os.kill(victim, signal.SIGKILL)))
    assert 0 < ends.count("lost") < 8, ends
    assert served.page.total("replicas_lost_total", model="chat") == 1
    served.wait_for_count("chat", 2)  # Ray has started another replica
    assert victim not in replicas("chat")
    assert len(replicas("chat")) == 2

    async def after() -> list[Answer]:
        return await asyncio.gather(*(ask(served.url, COMPLETIONS, completion([5, 6, 7, 8], 20)) for _ in range(16)))

    assert all(answer.status == 200 for answer in asyncio.run(after()))


def test_a_rolling_update_fails_no_request(served: ServedCluster, cluster: Cluster, arguments: list[str]) -> None:
    before = replicas("chat")

    async def rolled() -> None:
        async with load(served.url, Asked(tokens=200)) as report:
            again = await asyncio.to_thread(ServedCluster, cluster, *arguments, "--max-running", "32")
            try:
                await asyncio.to_thread(
                    until, lambda: len(replicas("chat") - before) == 2 and not replicas("chat") & before
                )
                await asyncio.to_thread(again.wait_for_count, "chat", 2)
                await asyncio.to_thread(served.wait_for_count, "chat", 2)
                await asyncio.to_thread(again.wait_for_count, "judge", 2)
                await report.more(5)
            finally:
                await asyncio.to_thread(again.close)
        assert not report.failures, report.failures[:3]
        assert report.answered["stream"] > 20
        assert served.page.total("replicas_lost_total") == lost

    lost = served.page.total("replicas_lost_total")
    asyncio.run(rolled())


def test_draining_a_node_fails_no_request(served: ServedCluster, cluster: Cluster) -> None:
    """By the preStop hook of the chart's pods."""
    values = {"config": {"models": {"chat": "/models/a"}}, "ray": {"enabled": True}, "models": {"claim": "checkpoints"}}
    [service] = [manifest for manifest in rendered(values) if manifest["kind"] == "RayService"]
    *_, worker = pods_of(service).values()
    command = worker["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1].partition(" && ")[0]
    [node], lost = cluster.ids(), served.page.total("replicas_lost_total")
    node_replicas = set(process_tree(cluster.nodes[1].child.pid)) & (replicas("chat") | replicas("judge"))
    assert node_replicas
    cluster.add()
    until(lambda: len(cluster.ids()) == 2)
    words = [RAY if word == "ray" else word for word in shlex.split(command)]
    words += ["--address", cluster.address, "--node-id", node]  # in a pod, environment variables give both

    async def emptied() -> None:
        async with load(served.url, Asked(tokens=200)) as report:
            await asyncio.to_thread(subprocess.run, words, env=ENVIRONMENT, check=True)
            await asyncio.to_thread(
                until, lambda: not node_replicas & (replicas("chat") | replicas("judge")), patience=180
            )
            assert (len(replicas("chat")), len(replicas("judge"))) == (2, 2)
            await asyncio.to_thread(cluster.nodes.pop(1).kill)
            await report.more(20)
        assert not report.failures, report.failures[:3]
        assert served.page.total("replicas_lost_total") == lost

    asyncio.run(emptied())
    for model in ("chat", "judge"):
        served.wait_for_count(model, 2)


def test_a_removed_node_is_replaced(served: ServedCluster, cluster: Cluster) -> None:
    ends = asyncio.run(while_streaming(served, cluster.nodes[1].kill))
    assert ends.count("lost") < 8, ends
    cluster.nodes.pop(1)
    until(lambda: served.count("chat") == 1)
    until(lambda: served.page.total("wanted_replicas", model="chat") == 2)

    async def on_one() -> list[Answer]:
        return await asyncio.gather(*(ask(served.url, COMPLETIONS, completion([5, 6, 7, 8], 20)) for _ in range(8)))

    assert all(answer.status == 200 for answer in asyncio.run(on_one()))
    cluster.add()
    served.wait_for_count("chat", 2)
    served.wait_for_count("judge", 2)
