"""A config file that `serve deploy` sends to a running cluster, and the answers of Ray's own proxy after it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cluster.nodes import ENVIRONMENT, HOST, Cluster, free_port, replicas, until
from tests.support.load import Asked, load
from tests.support.processes import Page

pytestmark = pytest.mark.timeout(900)
SERVE = str(Path(sys.executable).with_name("serve"))


class Deployed:
    """The application of a config file, through the proxy of the head."""

    def __init__(self, cluster: Cluster, folder: Path, models: dict[str, str]) -> None:
        port = free_port()
        self.cluster, self.file, self.url = cluster, folder / "serve.yaml", f"http://{HOST}:{port}"
        self.args = {
            "models": models,
            "replicas": "2",
            "replica_cpus": 0.3,
            "cache_tokens": 65_536,
            "drain_seconds": 20,
        }
        self.config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": HOST, "port": port},
            "applications": [
                {
                    "name": "polyhead",
                    "import_path": "polyhead.service.fleet.ray_app:application",
                    "route_prefix": "/",
                    "args": self.args,
                    "deployments": [{"name": "Ingress", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.2}}],
                }
            ],
        }

    def deploy(self, **args: object) -> None:
        self.args.update(args)
        self.file.write_text(yaml.safe_dump(self.config), "utf-8")
        command = [SERVE, "deploy", "--address", self.cluster.dashboard, str(self.file)]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> str:
        """The status of the application, as `serve status` reports it."""
        command = [SERVE, "status", "--address", self.cluster.dashboard]
        report = yaml.safe_load(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True).stdout)
        return str(report["applications"].get("polyhead", {}).get("status"))

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200
        except httpx.TransportError:
            return False


def test_deploying_a_file_again_fails_no_request(
    cluster: Cluster, tmp_path: Path, long_generator: Path, tiny_classifier: Path
) -> None:
    deployed = Deployed(cluster, tmp_path, {"chat": str(long_generator), "judge": str(tiny_classifier)})
    deployed.deploy()
    until(deployed.ready)
    until(lambda: deployed.status() == "RUNNING")
    before = {name: replicas(name) for name in ("chat", "judge", "Ingress")}
    assert {name: len(found) for name, found in before.items()} == dict.fromkeys(before, 2)

    async def rolled() -> None:
        async with load(deployed.url, Asked(tokens=200)) as report:
            await asyncio.to_thread(deployed.deploy, max_running=32)
            for name, old in before.items():
                await asyncio.to_thread(
                    until, lambda name=name, old=old: len(replicas(name) - old) == 2 and not replicas(name) & old
                )
            await asyncio.to_thread(until, lambda: deployed.status() == "RUNNING")
            await report.more(5)
        assert not report.failures, report.failures[:3]
        assert report.answered["stream"] > 20

    asyncio.run(rolled())
    page = Page(httpx.get(f"{deployed.url}/metrics", timeout=10).text)
    assert page.total("replicas", model="chat") == 2
    assert page.total("replicas_lost_total") == 0
