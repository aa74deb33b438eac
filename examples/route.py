"""Leads requests of customers to a department, without training: each text is compared with a description.

    make serve                       # in another terminal
    python examples/route.py "My parcel has not arrived."

An embedder compares vectors; that is enough for topics. For finer questions serve a larger generator, a classifier of
entailment or GLiClass, and ask /v1/decisions or its task zero-shot-classification with the same descriptions.
"""

import argparse

import httpx

DEPARTMENTS = {
    "billing": "a question about a bill, a payment or a refund",
    "shipping": "a question about a delivery or a parcel",
    "technical": "the program does not work or shows an error",
}
REQUESTS = (
    "My card was charged twice.",
    "Where is my parcel?",
    "The app crashes when I open it.",
    "Do you like jazz?",
)


def compare(url: str, text: str) -> dict[str, float]:
    """The similarity of the text with the description of each department, -1 to 1."""
    inputs = {"source_sentence": text, "sentences": list(DEPARTMENTS.values())}
    answer = httpx.post(f"{url}/models/minilm/similarity", json={"inputs": inputs}).raise_for_status().json()
    return dict(zip(DEPARTMENTS, answer, strict=True))


def choose(scores: dict[str, float], least: float) -> str:
    """The most similar department, or a person if none is similar enough."""
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= least else "a person"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="*", default=REQUESTS)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--least", type=float, default=0.2, help="below this similarity a person reads the text")
    given = parser.parse_args()
    for text in given.text:
        scores = compare(given.url, text)
        shown = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
        print(f"{choose(scores, given.least):10}{text}  ({shown})")


if __name__ == "__main__":
    try:
        main()
    except httpx.ConnectError:
        raise SystemExit("No server answers: start one (make serve), or give its address (--url).") from None
