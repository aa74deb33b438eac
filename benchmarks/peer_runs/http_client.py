"""Streams of completions over HTTP, all started at once, by one asynchronous client in a separate process.

    python -m benchmarks.peer_runs.http_client URL MODEL [--streams 32]

Prompts are words of one token each, so servers that do not accept token ids get the same prompts.
"""

import argparse
import asyncio
import json
import statistics
from random import Random
from time import perf_counter
from typing import Any

import httpx

from benchmarks.peer_runs.workload import NEW, PROMPT, Answer, print_figures

WORDS = [
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"),
    *("his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were"),
    *("her", "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "more", "no"),
    *("if", "out", "so", "said", "what", "up", "its", "about", "into", "than", "them", "can", "only", "other", "new"),
]
# What a server takes beside the rest, by its model's name: texts as long as they are asked for, and a count of tokens.
EXTRAS = {"ignore_eos": True, "stream_options": {"include_usage": True}}
TAKING = {"polyhead", "vllm", "llama.cpp"}


def prompt(choice: Random) -> str:
    return " ".join(choice.choice(WORDS) for _ in range(PROMPT))


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """When each token came; several in one event count as the server says, in the end."""
    answer, began = Answer(), perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                answer.times.append(perf_counter() - began)
            count = (event.get("usage") or {}).get("completion_tokens")
    answer.tokens = [0] * (count or len(answer.times))
    return answer


async def together(url: str, body: dict[str, Any], seed: int, streams: int) -> tuple[list[Answer], float]:
    choice = Random(seed)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = perf_counter()
        answers = await asyncio.gather(*(stream(client, body | {"prompt": prompt(choice)}) for _ in range(streams)))
        return answers, perf_counter() - began


def figures(answers: list[Answer], took: float) -> dict[str, float]:
    firsts = [answer.times[0] * 1000 for answer in answers]
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "tokens": tokens,
        "tokens/s": tokens / took,
        "first p50": statistics.median(firsts),
        "first last": max(firsts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    body = {"model": options.model, "max_tokens": NEW, "temperature": 0, "stream": True}
    if options.model in TAKING:
        body |= EXTRAS
    asyncio.run(together(options.url, body | {"max_tokens": 8}, 0, 4))  # to warm up
    print_figures(dict(figures(*asyncio.run(together(options.url, body, 1, options.streams)))))


if __name__ == "__main__":
    main()
