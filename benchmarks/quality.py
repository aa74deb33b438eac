"""Compare the quality of narrow formats on real files, Polyhead beside llama.cpp, against float32 of the same file.

    python -m benchmarks.quality [--install] [--parts text first encoders] [--files NAME ...] [--tokens 2000]
        [--precision auto int8 int4 float32] [--json FILE]

Float32 is computed by Polyhead's compiled step from the numbers in the file. There are three parts.

`text`: generators read a text, the same tokens in both programs, in windows of at most 512. The table has the KL
divergence of next-token distributions from float32's in nats (mean, 99th percentile, largest), how often the likeliest
token is float32's, and the change of the log-probability of the token that follows.

`first`: for 200 prompts of one line, how often the first token of a greedy answer is float32's; for all of them, and
for those where float32's two likeliest tokens are more than one nat apart.

`encoders`: the sentiment classifier's accuracy on sentences that its recipe held out, and the cosine of MiniLM's
vectors. Four-bit weights are calibrated first, on other texts.

The text is that of `polyhead quality`, followed by newspaper editorials if more tokens are requested. `auto` is the
precision that a server would choose for the file. `--install` makes llama.cpp's environment under .bench/, and the
files. No times are measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import encoder_quality, peers
from benchmarks.package_parts import CODER, GEMMA
from benchmarks.prose import sentences
from benchmarks.serving import machine
from polyhead.models import checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.quantization.divergence import Divergence
from polyhead.service.cli import quality
from polyhead.service.cli.differences import EncodedText
from polyhead.service.config import settings
from polyhead.service.resources import machine as capacity
from polyhead.service.runtime import quickstart

PEER = "llamacpp"
PROMPTS = Path(__file__).parent / "quality_prompts.txt"
TOKENS = 2000
ROUND = 4  # windows whose logits are held at once: a gigabyte of them with a large vocabulary
SURE = 1.0  # nats between float32's two likeliest tokens
EDITORIALS = "nytEditorialSnippets"
PARTS = ("text", "first", "encoders")
# Files by name, and how those are made that are not fetched: by which environment, from which file.
FILES = {
    "smollm2-Q4_1": "",
    "smollm2-Q8_0": f"{peers.OURS} convert Q8_0 smollm2-Q4_1",
    "smollm2-Q4_0": f"{peers.OURS} convert Q4_0 smollm2-Q4_1",
    "smollm2-Q4_K_M": f"{PEER} llamacpp_quantize Q4_K_M smollm2-Q4_1",
    "qwen2.5-coder-0.5b-Q4_K_M": "",
    "qwen2.5-coder-0.5b-Q8_0": f"{peers.OURS} convert Q8_0 qwen2.5-coder-0.5b-Q4_K_M",
    "gemma3-270m-Q4_K_M": "",
}
PARTED = {"qwen2.5-coder-0.5b-Q4_K_M": CODER, "gemma3-270m-Q4_K_M": GEMMA}
Found = dict[str, Any]  # a row of a table, for programs


def path_of(name: str) -> Path:
    if name == "smollm2-Q4_1":
        return Path(quickstart.sources(settings.default_model_dir())["smollm2"])
    return peers.MODELS / f"{name}.gguf"


def install() -> None:
    """llama.cpp's environment and the files that are not there yet; prints what is not available, and continues."""
    peers.install((PEER,), ())
    quickstart.fetch_all(settings.default_model_dir())
    for name, parted in PARTED.items():
        parted.join(path_of(name))
    for name, how in FILES.items():
        if how and not path_of(name).exists():
            environment, run, kind, source = how.split()
            words = [peers.python(environment), "-m", f"{peers.RUNS}.{run}", kind, str(path_of(source))]
            print(f"{name}: {peers.called([*words, str(path_of(name))], {})[1] or 'made'}", flush=True)


@dataclass(frozen=True)
class Engine:
    """What answers for a file: Polyhead in a precision, or llama.cpp (`precision` empty)."""

    name: str
    precision: str = ""

    def logits(self, path: Path, windows: Sequence[list[int]], threads: int, *, last: bool = False) -> Iterator[Tensor]:
        """[T, V] of each window, or [1, V] of its last token."""
        if not self.precision:
            yield from theirs(path, windows, threads, last=last)
            return
        chosen = settings.read_settings({"precision": self.precision, "threads": threads})
        steps = [[EncodedText(list(window), [])] for window in windows]
        for answers, _ in quality.QualityMeasurement(str(path), chosen).run_batches(chosen, steps, quiet):
            yield answers[0].values[-1:] if last else answers[0].values


def theirs(path: Path, windows: Sequence[list[int]], threads: int, *, last: bool) -> Iterator[Tensor]:
    """Of llama.cpp, in a process of its own.  Raises RuntimeError with the reason if there are none."""
    with tempfile.TemporaryDirectory(prefix="logits-", dir=peers.BENCH) as folder:
        asked, out = Path(folder) / "windows.json", Path(folder) / "logits.npy"
        asked.write_text(json.dumps(windows))
        words = [peers.python(PEER), "-m", f"{peers.RUNS}.llamacpp_logits", str(path), str(asked), str(out)]
        words += ["--threads", str(threads), *(["--last"] if last else [])]
        if reason := peers.called(words, {})[1]:
            raise RuntimeError(reason)
        every, done = np.load(out, mmap_mode="r"), 0
        for window in windows:
            count = 1 if last else len(window)
            yield torch.from_numpy(np.array(every[done : done + count]))
            done += count


def quiet(what: str, done: int, total: int) -> None:
    """Progress is not shown."""


def engines(path: Path, precisions: Sequence[str]) -> list[Engine]:
    """Each precision once; `auto` under the name of what a server would choose."""
    usual = quality.QualityMeasurement(str(path), settings.read_settings({"precision": "auto"})).placement.precision
    chosen = dict.fromkeys(usual if precision == "auto" else precision for precision in precisions)
    ours = [Engine(f"Polyhead {name}{' (default)' if name == usual else ''}", name) for name in chosen]
    return [Engine("llama.cpp"), *ours]


@contextmanager
def reported(row: Found) -> Iterator[None]:
    """Why a peer has no figures is a row too."""
    try:
        yield
    except RuntimeError as error:
        row["reason"] = str(error)


def text_of(what: Description, tokens: int) -> str:
    """The command's text, and editorials after it if it has fewer tokens."""
    text = quality.TEXT_FILE.read_text(encoding="utf-8")
    if tokens <= len(what.tokenizer.encode(text, special=False)):
        return text
    return "\n".join([text, *sentences(settings.default_model_dir() / "prose", 1 << 20, EDITORIALS)])


def compared(name: str, tokens: int, chosen: Sequence[Engine], threads: int) -> list[Found]:
    """Part `text` for one file: a row for each engine."""
    path = path_of(name)
    what = checkpoint.describe_source(str(path))
    steps = quality.cut_windows(what, text_of(what, tokens), "the text", tokens)
    windows = [passage.tokens for [passage] in steps]
    found = {engine: Divergence() for engine in chosen}
    rows: dict[Engine, Found] = {engine: {"file": name, "engine": engine.name} for engine in chosen}
    for start in range(0, len(windows), ROUND):
        some = windows[start : start + ROUND]
        expected = list(Engine("float32", "float32").logits(path, some, threads))
        for engine in chosen:
            with reported(rows[engine]):
                for window, one, other in zip(some, expected, engine.logits(path, some, threads), strict=True):
                    count = min(one.size(1), other.size(1))  # a table of embeddings may be padded
                    following = torch.tensor(window[1:])
                    found[engine].add(one[:-1, :count], other[:-1, :count], following)
    return [row | (asdict(found[engine].figures) if "reason" not in row else {}) for engine, row in rows.items()]


def first_tokens(name: str, chosen: Sequence[Engine], threads: int) -> list[Found]:
    """Part `first` for one file."""
    path = path_of(name)
    what = checkpoint.describe_source(str(path))
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    windows = [encoding.ids for encoding in what.tokenizer.encode_batch(prompts)]
    expected = torch.cat([*Engine("float32", "float32").logits(path, windows, threads, last=True)])
    two = expected.log_softmax(-1).topk(2).values
    sure = two[:, 0] - two[:, 1] > SURE
    rows = []
    for engine in chosen:
        row: Found = {"file": name, "engine": engine.name}
        with reported(row):
            logits = torch.cat([*engine.logits(path, windows, threads, last=True)])
            same = logits.argmax(-1) == expected.argmax(-1)
            differ = [prompt for prompt, alike in zip(prompts, (same | ~sure).tolist(), strict=True) if not alike]
            row |= {"prompts": len(prompts), "same": int(same.sum())}
            row |= {"sure": int(sure.sum()), "sure_same": int((same & sure).sum()), "sure_different": differ}
        rows.append(row)
    return rows


def text_cells(row: Found) -> list[str]:
    kl = (f"{row[f'kl_{which}']:.5f}" for which in ("mean", "p99", "max"))
    changes = (f"{row[f'logprob_change_{which}']:.4f}" for which in ("mean", "max"))
    return [*kl, f"{row['top1_agreement']:.2%}", *changes, f"{row['perplexity']:.3f}", f"{row['tokens']}"]


def first_cells(row: Found) -> list[str]:
    whole, sure = row["same"] / row["prompts"], row["sure_same"] / max(row["sure"], 1)
    return [f"{whole:.1%} of {row['prompts']}", f"{sure:.1%} of {row['sure']}"]


def encoder_cells(row: Found) -> list[str]:
    if "cosine_mean" in row:
        figures = "cosine mean {cosine_mean:.5f}, p1 {cosine_p1:.5f}, least {cosine_min:.5f}"
    else:
        figures = (
            "accuracy {accuracy:.2%}, in float32 {reference_accuracy:.2%}; same label {label_agreement:.2%}; "
            "largest change of a probability {probability_change_max:.4f}"
        )
    return [str(row["texts"]), figures.format(**row)]


TABLES = {
    "text": (
        ("KL mean", "KL p99", "KL largest", "same likeliest", "log p mean", "log p largest", "perplexity", "tokens"),
        text_cells,
    ),
    "first": (("same first token", "same where float32 is sure"), first_cells),
    "encoders": (("texts", "against float32"), encoder_cells),
}


def table(part: str, rows: Sequence[Found]) -> str:
    """Markdown."""
    columns, cells_of = TABLES[part]
    lines = [f"| file | engine | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for row in rows:
        reason = row.get("reason")
        cells = [reason, *[""] * (len(columns) - 1)] if reason else cells_of(row)
        lines.append(f"| {row['file']} | {row['engine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make llama.cpp's environment and the files first")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--files", nargs="+", default=[*FILES], choices=[*FILES])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the text, for each file")
    known = ("auto", "float32", "int8", "int4")
    parser.add_argument("--precision", nargs="+", default=["auto", "int8", "int4", "float32"], choices=known)
    parser.add_argument("--threads", type=int, default=capacity.compute_threads())
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser.parse_args()


def main() -> None:
    options = asked()
    if options.install:
        install()
    found: Found = {"machine": machine()}
    print(machine(), flush=True)
    for part in (part for part in PARTS if part in options.parts):
        found[part] = []
        if part == "encoders":
            narrow = [precision for precision in options.precision if precision in ("int8", "int4")]
            found[part] = [*encoder_quality.found(settings.default_model_dir(), narrow, options.threads)]
            print(f"\n{table(part, found[part])}", flush=True)
            continue
        for name in options.files:
            if not path_of(name).exists():
                print(f"{name} is not there: run with --install", file=sys.stderr)
                continue
            chosen, threads = engines(path_of(name), options.precision), options.threads
            if part == "text":
                rows = compared(name, options.tokens, chosen, threads)
            else:
                rows = first_tokens(name, chosen, threads)
            found[part] += rows
            print(f"\n{table(part, rows)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    settings.set_library_defaults()
    main()
