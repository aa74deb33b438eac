"""Answers a question about each text, or leaves it to a person where the model is not certain. One text a line.

    make serve                       # in another terminal
    python examples/decide.py < comments.txt

The quick start's classifier of sentiment answers with its own labels. With a generator, a classifier of entailment or
GLiClass (--model) write options of your own. Choose --least on texts of your own, of which you know the answer.
"""

import argparse
import sys

from openai import APIConnectionError, OpenAI

QUESTION = {
    "type": "choice",
    "name": "tone",
    "instructions": "What is the tone of the text?",
    "choices": [{"value": "POSITIVE"}, {"value": "NEGATIVE"}],
}
COMMENTS = (
    "Thank you, this saved my weekend!",
    "It is a table. It has four legs.",
    "This is the worst product I have ever bought, and the support is useless.",
)


def ask(client: OpenAI, model: str, text: str, least: float) -> str:
    """The chosen option with its confidence. The server refuses an answer that is less certain than `least`."""
    decision = client.decisions.create(
        model=model, input=text, questions=[QUESTION], extra_body={"min_confidence": least}
    )
    [answer] = decision.answers
    return f"{answer.choice} {answer.confidence:.2f}" if answer.type == "choice" else "a person"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--model", default="sentiment")
    parser.add_argument("--least", type=float, default=0.9, help="below this confidence a person answers")
    given = parser.parse_args()
    texts = COMMENTS if sys.stdin.isatty() else [line.strip() for line in sys.stdin if line.strip()] or COMMENTS
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none")
    for text in texts:
        print(f"{ask(client, given.model, text, given.least):15}{text}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        raise SystemExit("No server answers: start one (make serve), or give its address (--url).") from None
