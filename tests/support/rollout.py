"""A rolling update as Kubernetes does it, with real servers for pods: what the chart asks for, carried out.

A `Service` forwards connections to pods that are ready, one after the other, and leaves those alone that it has
forwarded: so does a Service of Kubernetes, which knows no requests.  It asks the probe of the chart as a kubelet does.
`roll` replaces pod by pod, with the chart's surge, hook, signal and patience.  The one idea: every number comes out of
the rendered Deployment, so what is proven is proven of the chart.
"""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.load import Asked, begun
from tests.support.processes import Process

Manifest = dict[str, Any]
NEWS = 0.5  # of the hook, until whoever forwards has heard that a pod leaves


@dataclass(frozen=True)
class Terms:
    """What a Deployment says of how its pods come and go."""

    path: str
    period: float
    failures: int
    hook: float
    grace: float
    surge: int

    @classmethod
    def of(cls, deployment: Manifest) -> "Terms":
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        probe, update = container["readinessProbe"], deployment["spec"]["strategy"]["rollingUpdate"]
        assert update["maxUnavailable"] == 0
        return cls(
            path=probe["httpGet"]["path"],
            period=probe["periodSeconds"],
            failures=probe["failureThreshold"],
            hook=container["lifecycle"]["preStop"]["sleep"]["seconds"],
            grace=pod["terminationGracePeriodSeconds"],
            surge=update["maxSurge"],
        )


@dataclass(eq=False)
class Pod:
    process: Process
    url: httpx.URL
    ready: bool = False
    missed: int = 0  # probes, one after the other
    leaving: bool = False


@dataclass
class Gone:
    """How a pod went."""

    code: int
    seconds: float  # from its deletion on
    open: float  # HTTP requests that it had in flight when the signal came
    last: str  # the stream that was begun last


@dataclass
class Service:
    terms: Terms
    pods: list[Pod] = field(default_factory=list)
    turn: int = 0
    url: str = ""
    unserved: int = 0  # connections that came while no pod was ready
    forwarding: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarded = asyncio.create_task(self.forward(reader, writer))
        self.forwarding.add(forwarded)
        forwarded.add_done_callback(self.forwarding.discard)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to one pod, to its end."""
        able = [pod for pod in self.pods if pod.ready and not pod.leaving]
        if not able:  # as a Service without endpoints does
            self.unserved += 1
            writer.transport.abort()
            return
        pod = able[self.turn % len(able)]
        self.turn += 1
        try:
            there, back = await asyncio.open_connection(pod.url.host, pod.url.port)
            await asyncio.gather(pumped(reader, back), pumped(there, writer))
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def probe(self, client: httpx.AsyncClient) -> None:
        """As the kubelet: ready at the first success, not ready after so many failures."""
        while True:
            for pod in list(self.pods):
                good = False
                with suppress(httpx.HTTPError):
                    good = (await client.get(pod.url.join(self.terms.path))).is_success
                pod.missed = 0 if good else pod.missed + 1
                pod.ready = good or (pod.ready and pod.missed < self.terms.failures)
            await asyncio.sleep(self.terms.period)

    async def add(self, start: Callable[[], Process]) -> Pod:
        """A pod that is ready."""
        process = await asyncio.to_thread(start)
        pod = Pod(process, httpx.URL(await asyncio.to_thread(lambda: process.url)))
        self.pods.append(pod)
        while not pod.ready:
            assert process.child.poll() is None, process.log
            await asyncio.sleep(0.01)
        return pod

    async def delete(self, pod: Pod, asked: Asked) -> Gone:
        """At once its hook begins; the news that it leaves needs a part of that time to reach whoever forwards.  When
        the signal comes it has just begun with what is `asked`, since somebody's connection was forwarded last."""
        since = time.monotonic()
        await asyncio.sleep(NEWS * self.terms.hook)
        pod.leaving = True
        await asyncio.sleep((1 - NEWS) * self.terms.hook)
        last = await begun(str(pod.url), asked)
        in_flight = (await asyncio.to_thread(lambda: pod.process.page)).total("http_requests_in_flight")
        pod.process.child.send_signal(signal.SIGTERM)
        left = self.terms.grace - (time.monotonic() - since)
        code = await asyncio.to_thread(pod.process.child.wait, left)  # a kubelet kills it then
        self.pods.remove(pod)
        return Gone(code, time.monotonic() - since, in_flight, await last)


async def pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with suppress(ConnectionError):
        writer.write_eof() if writer.can_write_eof() else writer.close()


@asynccontextmanager
async def service(terms: Terms) -> AsyncGenerator[Service]:
    """A Service without pods, at `url`; whatever it has at the end is killed."""
    found = Service(terms)
    server = await asyncio.start_server(found.take, "127.0.0.1", 0)
    found.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    async with httpx.AsyncClient(timeout=3, verify=False) as client:
        probing = asyncio.create_task(found.probe(client))
        try:
            yield found
        finally:
            probing.cancel()
            server.close()
            for pod in found.pods:
                pod.process.child.kill()
                pod.process.child.wait()
            await asyncio.gather(*found.forwarding)


async def roll(service: Service, start: Callable[[], Process], asked: Asked) -> list[Gone]:
    """Replace every pod: as many more at once as the surge allows, and none goes before another is ready."""
    old, gone = list(service.pods), []
    while old:
        batch, old = old[: service.terms.surge], old[service.terms.surge :]
        for _ in batch:
            await service.add(start)
        gone += await asyncio.gather(*(service.delete(pod, asked) for pod in batch))
    return gone
