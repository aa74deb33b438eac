"""A rolling update under load, as on Kubernetes: no request fails.

Two servers with real checkpoints stand for the pods. All times and limits of the rollout come from the rendered chart.
"""

import asyncio
from pathlib import Path

from tests.support.load import Asked, load
from tests.support.manifests import kinds, rendered
from tests.support.processes import Process
from tests.support.rollout import Terms, roll, service

# Shorter times than the chart's: a preStop hook of one second instead of five, a probe every second instead of five
SHORT = {
    "replicas": 2,
    "preStopSeconds": 1,
    "config": {"drain_seconds": 30},
    "probes": {"ready": {"periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 2}},
}


def test_an_update_fails_no_request(long_generator: Path, tiny_classifier: Path) -> None:
    deployment, long = kinds(rendered(SHORT))["Deployment"], Asked(tokens=400)

    def start() -> Process:
        return Process(f"chat={long_generator}", f"judge={tiny_classifier}", "--drain-seconds", "30")

    async def updated() -> None:
        async with service(Terms.of(deployment)) as pods:
            await asyncio.gather(*(pods.add(start) for _ in range(deployment["spec"]["replicas"])))
            first = list(pods.pods)
            async with load(pods.url, Asked(tokens=100)) as report:
                gone = await roll(pods, start, long)
                await report.more(1)
            assert not report.failures
            assert not pods.unserved
            assert len(pods.pods) == len(first)
            assert not set(first) & set(pods.pods)
            assert [pod.code for pod in gone] == [0, 0]
            assert all(pod.open for pod in gone)  # requests were open that could have been cut off
            assert len({pod.last for pod in gone}) == 1

    asyncio.run(updated())
