"""Autoscaling on a real cluster by queued tokens, and many models on few replicas."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.nodes import Cluster, ServedCluster, replicas, until
from tests.support.crowd import COMPLETIONS, ask, completion
from tests.support.load import Asked, load

pytestmark = pytest.mark.timeout(900)
QUEUED = 2000  # tokens per replica


@pytest.fixture(scope="module")
def arguments(long_generator: Path, tiny_classifier: Path) -> list[str]:
    models = [f"chat={long_generator}", f"judge={tiny_classifier}"]
    flags = ["--replicas", "1-2", "--queued-tokens", str(QUEUED), "--replica-cpus", "0.4", "--drain-seconds", "20"]
    return [*models, *flags, "--cache-tokens", "65536"]


@pytest.fixture(scope="module")
def served(cluster: Cluster, arguments: list[str]) -> Iterator[ServedCluster]:
    with closing(ServedCluster(cluster, *arguments)) as server:
        for model in ("chat", "judge"):
            server.wait_for_count(model, 1)
        yield server


def test_scaling_up_and_down_fails_no_request(served: ServedCluster) -> None:
    [first] = replicas("chat")

    async def queue_tokens(enough: asyncio.Event) -> None:
        """Keeps more than ten thousand tokens queued."""

        async def one() -> None:
            while not enough.is_set():
                answer = await ask(served.url, COMPLETIONS, completion([5, 6, 7, 8], 3000))
                assert answer.status == 200, answer.body

        await asyncio.gather(*(one() for _ in range(8)))

    async def grown_and_shrunk() -> None:
        enough = asyncio.Event()
        async with load(served.url, Asked(tokens=200, streams=1, calls=1)) as report:
            adding = asyncio.create_task(queue_tokens(enough))
            try:
                await asyncio.to_thread(served.wait_for_count, "chat", 2)
            finally:
                enough.set()
                await adding
            grown = replicas("chat")
            assert first in grown
            assert len(grown) == 2
            await asyncio.to_thread(until, lambda: len(replicas("chat")) == 1)
            await asyncio.to_thread(served.wait_for_count, "chat", 1)
            await report.more(20)
        assert not report.failures, report.failures[:3]
        assert served.page.total("replicas_lost_total") == 0
        assert served.count("judge") == 1, "classifications are too few tokens for a second replica"

    asyncio.run(grown_and_shrunk())


def test_many_models_share_replicas_that_hold_one_model_each(
    cluster: Cluster, tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path
) -> None:
    models = {"mood": tiny_classifier, "embed": tiny_embedder, "rank": tiny_ranker}
    flags = ["--pools", "small=mood+embed+rank", "--pool-models", "1", "--replicas", "2", "--replica-cpus", "0.2"]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/models/mood/predict", {"inputs": "a good film"}),
        ("/v1/embeddings", {"model": "embed", "input": "a good film"}),
        ("/v1/rerank", {"model": "rank", "query": "a film", "documents": ["a good film", "bread"]}),
    ]

    async def answers(http: httpx.AsyncClient) -> list[Any]:
        responses = await asyncio.gather(*(http.post(path, json=body) for path, body in requests))
        assert [answer.status_code for answer in responses] == [200] * len(requests), [
            answer.text for answer in responses
        ]
        bodies = [answer.json() for answer in responses]
        return [{**one, "id": ""} if isinstance(one, dict) else one for one in bodies]

    async def again_and_again(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            first = await answers(http)
            for _ in range(8):
                assert await answers(http) == first

    with closing(ServedCluster(cluster, *(f"{name}={path}" for name, path in models.items()), *flags)) as pool:
        for model in models:
            pool.wait_for_count(model, 2)
        asyncio.run(again_and_again(pool.url))
        assert pool.page.total("replicas_lost_total") == 0
        assert len(replicas("small")) == 2
