"""Compare classification over HTTP with transformers' padded batches: the probabilities, and the speed.

    python -m benchmarks.encoder [--rounds 5]

1,000 sentences of mixed length are sent in batches of 32 texts, in arrival order. The peer runs the same merged
classifier in float32 in this process, with each batch padded to its longest sentence. The server answers one batch
after the other over HTTP, with client and server on the same cores. Rounds alternate. Then short sentences are sent one
at a time: measured are the time of a request and the server's own time of the forward pass.
"""

import argparse
import statistics
import time

import httpx
import torch
import transformers
from peft import PeftModel

from benchmarks.prose import sentences
from benchmarks.serving import Running, machine, report, serve
from benchmarks.vitals import Page
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

BATCH, SHORT, ALONE = 32, 80, 300  # texts; characters; requests
STAGE = "polyhead_stage_seconds"


class Peer:
    """transformers and peft: base model and adapter merged, batches padded."""

    def __init__(self, base_folder: str, adapter: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(base_folder)
        base = transformers.AutoModelForSequenceClassification.from_pretrained(base_folder, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()

    @torch.inference_mode()
    def classify(self, texts: list[str]) -> list[list[float]]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        probabilities: list[list[float]] = self.model(**inputs).logits.softmax(-1).tolist()
        return probabilities


def classify(client: httpx.Client, texts: list[str]) -> list[list[float]]:
    """Probabilities (negative, positive) of each text."""
    answer = client.post("/models/sentiment/predict", json={"inputs": [[text] for text in texts]})
    answer.raise_for_status()
    scores = [{label["label"]: label["score"] for label in labels} for labels in answer.json()]
    return [[row["NEGATIVE"], row["POSITIVE"]] for row in scores]


def measure(server: Running, peer: Peer, texts: list[str], rounds: int) -> None:
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    ours, theirs, worst = [], [], 0.0
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(rounds):
            began = time.perf_counter()
            expected = [row for batch in batches for row in peer.classify(batch)]
            theirs.append(len(texts) / (time.perf_counter() - began))
            began = time.perf_counter()
            answered = [row for batch in batches for row in classify(client, batch)]
            ours.append(len(texts) / (time.perf_counter() - began))
            worst = max(worst, float((torch.tensor(answered) - torch.tensor(expected)).abs().max()))
    report(f"{len(texts)} sentences, batches of {BATCH}", ours, theirs, "texts/s")
    print(f"largest difference of a probability: {worst:.1e}")


def alone(server: Running, texts: list[str]) -> None:
    """Milliseconds of a request with one short sentence, and of its forward pass."""
    taken = []
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for text in texts[: ALONE // 10]:
            classify(client, [text])
        before = Page(client.get("/metrics").text)
        for text in texts:
            began = time.perf_counter()
            classify(client, [text])
            taken.append(time.perf_counter() - began)
        after = Page(client.get("/metrics").text)
    seconds, steps = (
        after.total(STAGE + part, stage="forward") - before.total(STAGE + part, stage="forward")
        for part in ("_sum", "_count")
    )
    p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
    print(f"{len(texts)} short sentences alone: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms over HTTP; ", end="")
    print(f"forward {seconds / steps * 1e3:.2f} ms in the mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="float32")
    options = parser.parse_args()
    folder = settings.default_model_dir()
    source = quickstart.sources(folder)["sentiment"]
    base_folder, adapter = source.split("+")
    texts = sentences(folder / "prose", 1000)
    print(machine())
    with serve(f"sentiment={source}", "--precision", options.precision) as server:
        measure(server, Peer(base_folder, adapter), texts, options.rounds)
        alone(server, [text for text in sentences(folder / "prose", 4000) if len(text) < SHORT][:ALONE])
        print(f"ready after {server.ready_s:.1f} s, {server.resident_mb():.0f} MB resident")


if __name__ == "__main__":
    main()
