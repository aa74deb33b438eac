"""onnxruntime over an exported encoder and the tokenizer of its folder, padded; runs in its own environment."""

from tokenizers import Tokenizer

from benchmarks.peer_runs.onnxruntime_encoding import Vectors, encoder, opened
from benchmarks.peer_runs.text_workload import LONGEST, Answer, reading
from benchmarks.peer_runs.workload import asked, print_figures


def embedder(tokenizer: Tokenizer, encode: Vectors) -> Answer:
    def embed(texts: list[str]) -> list[list[float]]:
        return encode([encoding.ids for encoding in tokenizer.encode_batch(texts)])

    return embed


def main() -> None:
    run = asked()
    tokenizer = Tokenizer.from_file(str(run.tokenizer / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    print_figures(reading(embedder(tokenizer, encoder(opened(run)))))


if __name__ == "__main__":
    main()
