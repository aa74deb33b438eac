"""Compare text generation over HTTP with `transformers.generate`: the text, and the speed of sixteen prompts at once.

    python -m benchmarks.generation [--rounds 3] [--only parity|speed]

Both run SmolLM2-135M-Instruct in float32 from the same GGUF file on the same cores: the peer in this process, one
prompt after the other, the server in its own process. Rounds alternate, and the server is idle while the peer works.
"""

import argparse
import asyncio
import time
from pathlib import Path

import httpx
import torch
import transformers

from benchmarks.prose import sentences
from benchmarks.serving import Running, machine, report, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

NEW_TOKENS = 64


class Peer:
    """transformers, greedy, one prompt at a time."""

    def __init__(self, file: Path) -> None:
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompt: str, eos: bool) -> list[int]:
        inputs = self.tokenizer(prompt, return_tensors="pt")
        least = 0 if eos else NEW_TOKENS
        out = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=least, do_sample=False)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def text(self, prompt: str) -> str:
        return self.tokenizer.decode(self.generate(prompt, eos=True), skip_special_tokens=True)


async def complete(client: httpx.AsyncClient, prompt: str, **fields: object) -> dict[str, object]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, **fields}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


async def together(server: Running, prompts: list[str], width: int, **fields: object) -> list[dict[str, object]]:
    """All prompts, at most `width` at a time."""
    gate = asyncio.Semaphore(width)

    async def one(prompt: str) -> dict[str, object]:
        async with gate:
            return await complete(client, prompt, **fields)

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        return await asyncio.gather(*map(one, prompts))


def parity(server: Running, peer: Peer, prompts: list[str]) -> None:
    expected = [peer.text(prompt) for prompt in prompts]
    for width in (1, 16):
        answers = asyncio.run(together(server, prompts, width))
        texts = [answer["choices"][0]["text"] for answer in answers]  # type: ignore[index]
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        print(f"greedy text equal to transformers, {width:2d} at a time: {same} of {len(prompts)}")


def speed(server: Running, peer: Peer, prompts: list[str], rounds: int) -> None:
    ours, theirs = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        tokens = sum(len(peer.generate(prompt, eos=False)) for prompt in prompts)
        theirs.append(tokens / (time.perf_counter() - began))
        began = time.perf_counter()
        answers = asyncio.run(together(server, prompts, len(prompts), ignore_eos=True))
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)  # type: ignore[index]
        ours.append(tokens / (time.perf_counter() - began))
    report(f"{len(prompts)} generations", ours, theirs, "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("parity", "speed"))
    options = parser.parse_args()
    folder = settings.default_model_dir()
    file = Path(quickstart.sources(folder)["smollm2"])
    prompts = sentences(folder / "prose", 50)
    peer = Peer(file)
    print(machine())
    with serve(f"smollm2={file}", "--precision", "float32") as server:
        if options.only != "speed":
            parity(server, peer, prompts)
        if options.only != "parity":
            speed(server, peer, prompts[:16], options.rounds)
        print(f"ready after {server.ready_s:.1f} s, {server.resident_mb():.0f} MB resident")


if __name__ == "__main__":
    main()
