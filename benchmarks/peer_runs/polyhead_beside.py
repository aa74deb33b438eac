"""One call with 10,000 texts, and its effect on a client that sends one short text at a time.

Both use HTTP, each from a separate process, on the same cores as the server. The long call is answered as a list and as
lines, first alone, then with the other client. Its time ends with the last byte of the answer; the time of parsing the
answer is not included.
"""

from concurrent.futures import Future, ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from time import perf_counter, sleep

from benchmarks.peer_runs.polyhead_http_texts import Client, flags
from benchmarks.peer_runs.text_workload import EXACT, MANY, SECONDS, memory, spans, texts
from benchmarks.peer_runs.workload import asked, print_figures, times
from benchmarks.serving import Running, serve

ACCEPTED = {"list": "application/json", "lines": "application/x-ndjson"}
PACE_S = 0.1  # from one short call to the next, if it is answered by then
Long = tuple[float, float]  # seconds until the first line, and until the last byte


def long_call(url: str, accept: str, some: list[str]) -> Long:
    began = perf_counter()
    response = Client(url).post("/embed", {"inputs": some}, accept)
    response.readline()
    first, count = perf_counter() - began, 1
    while response.readline():
        count += 1
    assert count in (1, len(some)), "an answer is missing"
    return first, perf_counter() - began


def short_calls(client: Client, some: list[str], beside: Future[Long]) -> list[float]:
    """Seconds of each, one after the other for as long as the long call takes; not at once, or else most of them
    would be of the moments when they are quick."""
    taken: list[float] = []
    for text in cycle(some):
        if beside.done():
            break
        began = perf_counter()
        client.embed([text])
        taken.append(perf_counter() - began)
        sleep(max(PACE_S - taken[-1], 0.0))
    return taken


def measured(server: Running) -> dict[str, object]:
    given, client = texts(), Client(server.url)
    short, many = given[str(EXACT[0])], given[MANY]
    figures = spans("short", times(client.embed, [[text] for text in short], SECONDS))
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        for name, accept in ACCEPTED.items():
            other.submit(long_call, server.url, accept, short).result()  # a process is there, and all has been met
            _, alone = other.submit(long_call, server.url, accept, many).result()
            call = other.submit(long_call, server.url, accept, many)
            taken = short_calls(client, short, call)
            first, both = call.result()
            figures |= {f"{name} alone": len(many) / alone, f"{name} beside": len(many) / both, f"{name} first": first}
            figures |= {f"{name} shorts": len(taken), **spans(f"short, {name}", taken)}
    return {**figures, **memory(server.pid)}


def main() -> None:
    run = asked()
    with serve(*flags(run)) as server:
        print_figures(measured(server))


if __name__ == "__main__":
    main()
