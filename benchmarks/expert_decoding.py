"""Compare decoding of a mixture of experts with llama.cpp on the same file: OLMoE-1B-7B's shape, random weights, Q4_0.

    python -m benchmarks.expert_decoding [--install] [--rounds 3] [--threads 2] [--under COMMAND]

The options are those of benchmarks/peers.py; `--install` also writes the file, of 3.9 GB. The table has medians of the
rounds, and the ratio to llama.cpp within each round: a busy machine moves both sides of a round.
"""

from operator import itemgetter

from benchmarks.peers import MODELS, OURS, RUNS, Peer, asked, called, install, interleaved, python, rows, table
from benchmarks.serving import machine
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

FILE = "olmoe-1b-7b-Q4_0.gguf"
BRIEF = "--work brief"
PAIR = (
    Peer("Polyhead, its default precision", OURS, "polyhead_generation", f"{{models}}/{FILE}", "auto", BRIEF),
    Peer("llama.cpp", "llamacpp", "llamacpp_generation", f"{{models}}/{FILE}", "", BRIEF),
)
FIGURES = ("decode 1", "decode 8", "whole 8")
COLUMNS = {
    "decode tokens/s 1/8": ("decode 1", "decode 8"),
    "tokens/s of 8 answers, prompts included": ("whole 8",),
    "first token, last of 1/8, ms": ("first last 1", "first last 8"),
    "load, s": ("load",),
    "MB, peak": ("MB", "MB peak"),
}


def make() -> None:
    """llama.cpp's environment, and the file, if they are not there."""
    install(("llamacpp",), ())
    if not (MODELS / FILE).exists():
        generator = quickstart.sources(settings.default_model_dir())["smollm2"]  # its tokenizer is copied
        words = [python(OURS), "-m", f"{RUNS}.shapes", "olmoe-1b-7b", generator, str(MODELS / FILE)]
        print(f"{FILE}: {called(words, {})[1] or 'made'}", flush=True)


def main() -> None:
    options = asked(__doc__ or "")
    if options.install:
        make()
    figures, reasons = interleaved(PAIR, options, lambda peer, once: "")
    print(f"{machine()}, {options.threads} threads, medians of {options.rounds} rounds\n")
    print(table("OLMoE-1B-7B's shape, Q4_0", COLUMNS, rows(PAIR, figures, reasons)), end="\n\n")
    for name in FIGURES:
        both = zip(*(map(itemgetter(name), figures[peer]) for peer in PAIR), strict=False)
        print(f"{name}, times llama.cpp in each round:", *(f"{one / other:.2f}" for one, other in both))


if __name__ == "__main__":
    main()
