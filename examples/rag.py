"""Answers a question from a few documents: embed them, find the nearest, rerank those, and chat with the best.

make serve                       # in another terminal
python examples/rag.py "How long is the guarantee of a lamp?"
"""

import argparse

import httpx
from openai import APIConnectionError, OpenAI

DOCUMENTS = (
    "Orders are sent within two working days. We deliver to all countries of the European Union.",
    "Goods can be returned within 30 days. The customer pays for the parcel, we refund the price within a week.",
    "Lamps have a guarantee of five years, batteries of one year.",
    "Our shop in Vienna is open from Monday to Friday, from 9 to 18 o'clock.",
    "Gift cards are valid for three years and cannot be paid out in cash.",
)
NEAREST = 3  # documents that are reranked


def find_nearest(client: OpenAI, question: str) -> list[str]:
    """The documents whose vectors are nearest to the question's. Vectors have length 1: the product is the cosine."""
    answer = client.embeddings.create(model="minilm", input=[question, *DOCUMENTS])
    asked, *known = (item.embedding for item in answer.data)
    scores = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in known]
    return [text for _, text in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True)][:NEAREST]


def rerank(url: str, question: str, texts: list[str]) -> str:
    """The best of the texts. A cross-encoder does this better; the quick start has none and compares vectors."""
    body = {"model": "minilm", "query": question, "documents": texts, "top_n": 1}
    answer = httpx.post(f"{url}/v1/rerank", json=body).raise_for_status().json()
    return texts[answer["results"][0]["index"]]


def answer(client: OpenAI, question: str, source: str) -> str:
    prompt = f"Answer in one sentence, from this text only.\n\nText: {source}\n\nQuestion: {question}"
    messages = [{"role": "user", "content": prompt}]
    said = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=60)
    return said.choices[0].message.content or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="How long is the guarantee of a lamp?")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none")
    source = rerank(given.url, given.question, find_nearest(client, given.question))
    print(f"question  {given.question}\nsource    {source}\nanswer    {answer(client, given.question, source)}")


if __name__ == "__main__":
    try:
        main()
    except (httpx.ConnectError, APIConnectionError):
        raise SystemExit("No server answers: start one (make serve), or give its address (--url).") from None
