"""Compare decoding with llama.cpp on the same file, of published shapes with random weights: a mixture, a hybrid.

    python -m benchmarks.shape_decoding [--install] [--rounds 3] [--threads 2] [--only NAME ...] [--under COMMAND]

The options are those of benchmarks/peers.py; `--install` also writes the files of the chosen shapes, of up to 3.9 GB.
Names for `--only` are those of FILES, or parts of them. The tables have medians of the rounds; below them is the ratio
to llama.cpp within each round: a busy machine moves both sides of a round.
"""

from collections.abc import Sequence

from benchmarks.peers import MODELS, OURS, RUNS, Peer, asked, called, install, interleaved, named, python, rows, table
from benchmarks.real_checkpoints import ratios
from benchmarks.serving import machine
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

FILES = {"olmoe-1b-7b": "olmoe-1b-7b-Q4_0.gguf", "lfm2-350m": "lfm2-350m-Q8_0.gguf"}  # by shape
BRIEF = "--work brief"
FIGURES = ("decode 1", "decode 8", "whole 8", "load", "load processor")
COLUMNS = {
    "decode tokens/s 1/8": ("decode 1", "decode 8"),
    "tokens/s of 8 answers, prompts included": ("whole 8",),
    "first token, last of 1/8, ms": ("first last 1", "first last 8"),
    "load, s / processor s": ("load", "load processor"),
    "MB, peak": ("MB", "MB peak"),
}


def pair(shape: str) -> tuple[Peer, Peer]:
    """The peer first."""
    file = f"{{models}}/{FILES[shape]}"
    return (
        Peer(f"{shape}: llama.cpp", "llamacpp", "llamacpp_generation", file, "", BRIEF),
        Peer(f"{shape}: Polyhead, its default precision", OURS, "polyhead_generation", file, "auto", BRIEF),
    )


def make(chosen: Sequence[str]) -> None:
    """llama.cpp's environment, and the files of the shapes, that are not there yet."""
    install(("llamacpp",), ())
    generator = quickstart.sources(settings.default_model_dir())["smollm2"]  # its tokenizer is copied
    for shape in chosen:
        target = MODELS / FILES[shape]
        if not target.exists():
            words = [python(OURS), "-m", f"{RUNS}.shapes", shape, generator, str(target)]
            print(f"{target.name}: {called(words, {})[1] or 'made'}", flush=True)


def main() -> None:
    options = asked(__doc__ or "")
    chosen = [shape for shape in FILES if named(Peer(shape, "", "", ""), options.only)]
    if options.install:
        make(chosen)
    print(f"{machine()}, {options.threads} threads, medians of {options.rounds} rounds\n")
    for shape in chosen:
        peers = pair(shape)
        figures, reasons = interleaved(peers, options, lambda peer, once: "")
        print(table(f"{shape}, random weights", COLUMNS, rows(peers, figures, reasons)), end="\n\n")
        print(ratios(peers, figures, FIGURES), flush=True)


if __name__ == "__main__":
    main()
