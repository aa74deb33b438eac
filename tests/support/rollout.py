"""A rolling update as Kubernetes does it, with real servers as pods, with the settings of the chart.

A `Service` forwards connections to ready pods, one after the other, and does not touch those that it has forwarded,
like a Service of Kubernetes, which does not see requests. It sends the probe of the chart like a kubelet. `roll`
replaces pod after pod, with the chart's surge, hook, signal and grace period. Every number comes from the rendered
Deployment."""

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
NEWS = 0.5  # of the hook, until the Service stops forwarding to a pod that is deleted


@dataclass(frozen=True)
class Terms:
    """The settings of a Deployment for starting and ending pods."""

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
    """How a pod ended."""

    code: int
    seconds: float  # since its deletion
    open: float  # HTTP requests in flight at the signal
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
        """Forward one connection to one pod, until it ends."""
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
        """Like a kubelet: ready at the first success, not ready after so many failures."""
        while True:
            for pod in list(self.pods):
                good = False
                with suppress(httpx.HTTPError):
                    good = (await client.get(pod.url.join(self.terms.path))).is_success
                pod.missed = 0 if good else pod.missed + 1
                pod.ready = good or (pod.ready and pod.missed < self.terms.failures)
            await asyncio.sleep(self.terms.period)

    async def add(self, start: Callable[[], Process]) -> Pod:
        """Start a pod and wait until it is ready."""
        process = await asyncio.to_thread(start)
        pod = Pod(process, httpx.URL(await asyncio.to_thread(lambda: process.url)))
        self.pods.append(pod)
        while not pod.ready:
            assert process.child.poll() is None, process.log
            await asyncio.sleep(0.01)
        return pod

    async def delete(self, pod: Pod, asked: Asked) -> Gone:
        """Its hook starts at once; the Service stops forwarding to it after a part of that time. At the signal it
        has just begun the request `asked`, whose connection was forwarded last."""
        since = time.monotonic()
        await asyncio.sleep(NEWS * self.terms.hook)
        pod.leaving = True
        await asyncio.sleep((1 - NEWS) * self.terms.hook)
        last = await begun(str(pod.url), asked)
        in_flight = (await asyncio.to_thread(lambda: pod.process.page)).total("http_requests_in_flight")
        pod.process.child.send_signal(signal.SIGTERM)
        left = self.terms.grace - (time.monotonic() - since)
        code = await asyncio.to_thread(pod.process.child.wait, left)  # then a kubelet kills it
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
    """A Service without pods, at `url`; pods that are left at the end are killed."""
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
    """Replace every pod: as many at once as the surge allows; none is deleted before another is ready."""
    old, gone = list(service.pods), []
    while old:
        batch, old = old[: service.terms.surge], old[service.terms.surge :]
        for _ in batch:
            await service.add(start)
        gone += await asyncio.gather(*(service.delete(pod, asked) for pod in batch))
    return gone
