"""Cut the texts that every peer reads: with a given number of tokens each, and documents of their original length.

    python -m benchmarks.peer_runs.cut FOLDER TARGET

FOLDER is that of an encoder. Its tokens are counted, special ones included. Runs in Polyhead's own environment.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from benchmarks.peer_runs.text_workload import EXACT, LONGEST, MANY, MIXED, MIXED_TEXTS, TEXTS_EACH
from benchmarks.prose import documents
from polyhead.service.config import settings

SPECIAL = 2  # around a text
PAGE = 100  # documents that are cut as one: tokenising a text takes more than in proportion to its length


def pieces(tokenizer: Tokenizer, text: str, tokens: int) -> Iterator[str]:
    """One after the other, each begins with a word and has exactly so many tokens."""
    encoding, start = tokenizer.encode(text, add_special_tokens=False), 0
    while (end := start + tokens - SPECIAL) <= len(encoding.ids):
        piece = text[encoding.offsets[start][0] : encoding.offsets[end - 1][1]]
        if encoding.tokens[start].startswith("##"):
            start += 1
            continue
        if len(tokenizer.encode(piece).ids) == tokens:
            yield piece
        start = end


def cut(text: str, encoding: Encoding) -> str:
    """At most LONGEST tokens of it."""
    whole = len(encoding.ids) <= LONGEST
    return text if whole else text[: encoding.offsets[LONGEST - SPECIAL][1]]


def spread(counts: list[int]) -> str:
    parts = statistics.quantiles(counts, n=100)
    quantiles = ", ".join(f"p{part} {parts[part - 1]:.0f}" for part in (10, 50, 90, 99))
    return f"{len(counts)} texts, tokens {quantiles}, mean {statistics.mean(counts):.1f}"


def main() -> None:
    tokenizer = Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    written = documents(settings.default_model_dir() / "prose")
    short = [cut(text, encoding) for text, encoding in zip(written, tokenizer.encode_batch(written), strict=True)]
    pages = [" ".join(written[first : first + PAGE]) for first in range(0, len(written), PAGE)]
    texts = {
        str(count): list(islice((piece for page in pages for piece in pieces(tokenizer, page, count)), TEXTS_EACH))
        for count in EXACT
    }
    texts |= {MIXED: short[:MIXED_TEXTS], MANY: short[-10_000:]}
    for name, some in texts.items():
        print(f"{name}: {spread([len(encoding.ids) for encoding in tokenizer.encode_batch(some)])}")
    Path(sys.argv[2]).write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
