"""Compare embeddings and labels of texts, tokenisation included, by Polyhead and by common libraries.

    python -m benchmarks.texts [--install] [--rounds 3] [--threads 2] [--only NAME ...] [--under COMMAND]

Environments, models and options are those of benchmarks/peers.py; `--install` makes those that are missing. All read
the same prose: 16, 64 and 256 tokens, and documents of their original length. Peers pad and sort as they do by default.
In every round answers are compared with those of the first peer in the table; a peer with other answers has no figures.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

from benchmarks.peers import OURS, Peer, asked, install, interleaved, rows, table
from benchmarks.serving import machine

NEEDED = ("onnxruntime", "sentence")  # environments
MADE = ("minilm-fused.onnx", "minilm-int8.onnx", "minilm-sentiment", "texts.json")
COSINE = {"float32": 0.999, "int8": 0.98}  # at least, to the embedding of the first in the table
AGREEING = {"float32": 1.0, "int8": 0.95}  # of the labels, at least
LABELS = "{models}/minilm-sentiment"
HTTP = "polyhead_http_texts"
TOKENIZER = "--tokenizer {encoder}"

EMBEDDING = (
    Peer("embed: sentence-transformers float32", "sentence", "sentence_texts", "{encoder}", "float32"),
    Peer(
        "embed: onnxruntime float32", "onnxruntime", "onnxruntime_texts", f"{{models}}/{MADE[0]}", "float32", TOKENIZER
    ),
    Peer("embed: onnxruntime int8", "onnxruntime", "onnxruntime_texts", f"{{models}}/{MADE[1]}", "int8", TOKENIZER),
    Peer("embed: Polyhead float32", OURS, "polyhead_texts", "{encoder}", "float32"),
    Peer("embed: Polyhead int8", OURS, "polyhead_texts", "{encoder}", "int8"),
    Peer("embed: Polyhead float32 over HTTP", OURS, HTTP, "{encoder}", "float32"),
    Peer("embed: Polyhead int8 over HTTP", OURS, HTTP, "{encoder}", "int8"),
)
LABELLING = (
    Peer("label: transformers pipeline float32", OURS, "pipeline_texts", LABELS, "float32"),
    Peer("label: Polyhead float32", OURS, "polyhead_texts", LABELS, "float32"),
    Peer("label: Polyhead int8", OURS, "polyhead_texts", LABELS, "int8"),
    Peer("label: Polyhead float32 over HTTP", OURS, HTTP, LABELS, "float32"),
    Peer("label: Polyhead int8 over HTTP", OURS, HTTP, LABELS, "int8"),
)
BESIDE = (
    Peer("beside: float32", OURS, "polyhead_beside", "{encoder}", "float32"),
    Peer("beside: int8", OURS, "polyhead_beside", "{encoder}", "int8"),
)
LENGTHS = ("16", "64", "256", "mixed")
COLUMNS = {
    "texts/s in batches of 32": [f"texts/s {length}" for length in LENGTHS],
    "mixed, 256 in one call": ("texts/s whole",),
    "alone p50, ms": [f"p50 {length}" for length in LENGTHS],
    "alone p99, ms": [f"p99 {length}" for length in LENGTHS],
    "MB, peak": ("MB", "MB peak"),
}
BESIDE_COLUMNS = {
    "short alone p50 / p99, ms": ("p50 short", "p99 short"),
    "beside the list": ("p50 short, list", "p99 short, list"),
    "beside the lines": ("p50 short, lines", "p99 short, lines"),
    "list, texts/s alone / beside": ("list alone", "list beside"),
    "lines": ("lines alone", "lines beside"),
    "first line, s": ("lines first",),
    "MB, peak": ("MB", "MB peak"),
}
Vectors = Sequence[Sequence[float]]


class Agreement:
    """Compares the answers of a round's peers with the first of their table, and keeps the least alike."""

    def __init__(self) -> None:
        self._first: dict[str, list[object]] = {}  # by table
        self.least: dict[str, float] = {}  # by peer: cosine, or how many labels agree

    def check(self, peer: Peer, figures: dict[str, object]) -> str:
        """Takes the answers out of `figures`.  What is wrong with them, or nothing."""
        answers = figures.pop("answers", None)
        if not isinstance(answers, list):
            return ""
        kind = peer.name.split(":")[0]
        first = self._first.setdefault(kind, answers)
        alike, bounds = (cosine, COSINE) if kind == "embed" else (agreeing, AGREEING)
        found = alike(answers, first)
        self.least[peer.name] = min(found, self.least.get(peer.name, 1.0))
        return f"answers otherwise: {found:.4f}" if found < bounds[peer.precision] else ""


def cosine(some: Vectors, others: Vectors) -> float:
    """The least of all pairs."""

    def dot(one: Sequence[float], other: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    return min(dot(a, b) / sqrt(dot(a, a) * dot(b, b)) for a, b in zip(some, others, strict=True))


def agreeing(some: Sequence[Sequence[object]], others: Sequence[Sequence[object]]) -> float:
    return sum(one[0] == other[0] for one, other in zip(some, others, strict=True)) / len(some)


def main() -> None:
    options = asked(__doc__ or "")
    if options.install:
        install(NEEDED, MADE)
    agreement = Agreement()
    figures, reasons = interleaved((*EMBEDDING, *LABELLING, *BESIDE), options, agreement.check)
    print(f"{machine()}, {options.threads} threads, medians of up to {options.rounds} rounds\n")
    shown: tuple[tuple[str, Sequence[Peer], Mapping[str, Sequence[str]]], ...] = (
        ("embed: 16 / 64 / 256 / mixed", EMBEDDING, COLUMNS),
        ("label: 16 / 64 / 256 / mixed", LABELLING, COLUMNS),
        ("10,000 texts in one call", BESIDE, BESIDE_COLUMNS),
    )
    for title, group, columns in shown:
        if found := rows(group, figures, reasons):
            print(table(title, columns, found), end="\n\n")
    for name, least in agreement.least.items():
        print(f"{name}: {'cosine' if name.startswith('embed') else 'labels alike'} {least:.5f} at least")
    if any(reason.startswith("answers otherwise") for reason in reasons.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
