"""Sorts texts by what a classifier says: publish, hold for a person, or refuse. One text a line.

    make serve                       # in another terminal
    python examples/moderate.py < comments.txt

The quick start has a classifier of sentiment, so this example holds back what is negative. With a classifier of
toxicity only --model and --label change. Choose the thresholds on texts of your own, of which you know the answer.
"""

import argparse
import sys
from collections.abc import Sequence

import httpx

COMMENTS = (
    "Thank you, this saved my weekend!",
    "It is a table. It has four legs.",
    "Not great, but it does the job.",
    "This is the worst product I have ever bought, and the support is useless.",
)


def find_probabilities(url: str, model: str, label: str, texts: Sequence[str]) -> list[float]:
    """The probability of `label` for each text. One call has all texts: the server computes them in common batches."""
    body = {"inputs": [[text] for text in texts], "truncate": True}
    answer = httpx.post(f"{url}/models/{model}/predict", json=body, timeout=60).raise_for_status().json()
    return [next(score["score"] for score in scores if score["label"] == label) for scores in answer]


def decide(probability: float, hold: float, refuse: float) -> str:
    if probability >= refuse:
        return "refuse"
    return "hold" if probability >= hold else "publish"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", default="sentiment")
    parser.add_argument("--label", default="NEGATIVE", help="the label that counts against a text")
    parser.add_argument("--hold", type=float, default=0.5, help="from this probability on a person decides")
    parser.add_argument("--refuse", type=float, default=0.98, help="from this probability on a text is refused")
    given = parser.parse_args()
    texts = COMMENTS if sys.stdin.isatty() else [line.strip() for line in sys.stdin if line.strip()] or COMMENTS
    probabilities = find_probabilities(given.url, given.model, given.label, texts)
    for text, probability in zip(texts, probabilities, strict=True):
        print(f"{decide(probability, given.hold, given.refuse):8}{probability:.3f}  {text}")


if __name__ == "__main__":
    try:
        main()
    except httpx.ConnectError:
        raise SystemExit("No server answers: start one (make serve), or give its address (--url).") from None
