"""Measure decisions (typed questions about a text, POST /v1/systemone): same bits, speed beside peers, and accuracy.

    python -m benchmarks.decisions [--figures bits ten throughput latency accuracy formats] [--quick] [--install]
        [--rounds 3] [--threads 2] [--repeats 1000] [--texts 200] [--words 60] [--sets NAME ...] [--models NAME ...]
        [--only NAME ...] [--json FILE] [--keep FOLDER]

| figure | what is measured | goal |
|---|---|---|
| bits | repeats of a call alone, in company, prefix stored or not, under preemption: how many differ | 0 |
| ten | ten questions about a state of 1,000 tokens, against one question: ratio of the times | at most 1.3 |
| throughput | decisions a second, beside llama.cpp's server and vLLM's build for CPUs | 3 times theirs |
| latency | one question about 300 tokens over HTTP, p50 | encoder 6 ms, SmolLM2 60 ms |
| accuracy | accuracy, Brier score and calibration error on labelled texts | error at most 0.03 when calibrated |
| formats | the same figures for other wordings of the prompt, and for several orders of the options | |

The first four are the default. `--install` makes the peers' environments and models under .bench/, as
benchmarks/peers.py does, and downloads labelled texts. `--quick` shortens everything: to see that it works, not for
figures. Client and server run on the same cores. Rows are printed as JSON lines on standard error and written to
`--json`, tables on standard output.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks import decision_bits, decision_calibration, decision_formats, decision_peers, decision_sets
from benchmarks.decision_bits import Kind
from benchmarks.decision_formats import FORMATS, SERVED, measure
from benchmarks.decision_peers import texts_of
from benchmarks.decision_sets import LabelledSet
from benchmarks.peers import MODELS
from benchmarks.serving import Running, machine, serve
from polyhead.service.config import settings
from polyhead.service.decisions.question import OptionScores
from polyhead.service.runtime import quickstart

TEN_GOAL, TEN_STATE = 1.3, 1000
SUBJECTS = ("a film", "sport", "money", "food", "travel", "music", "health", "school", "politics", "a machine")
PRECISIONS = ("int8", "int4", "float32")
LATENCY_STATE = 300  # tokens
WARM = 3  # calls that are not counted
GOALS_MS = {"encoder": 6.0, "smollm2": 60.0}
EDGEJEV_MS = 15.6  # a question on 4 cores, as its package's summary says; its weights are in no package registry
ECE_GOAL = 0.03
WORDS = 60  # of a labelled text
CLIENTS = 16  # of labelled texts that have questions of their own
CALL_LIMIT_S = 3600.0  # of all texts of a set
PERMUTATIONS = (1, 2, 4)
ENTAILMENT = ("entailment", "neutral", "contradiction")
YES_OR_NO = {"type": "noul", "instructions": "Does the writer like what the text is about?"}
Row = dict[str, Any]
Options = argparse.Namespace


def make_entailment(folder: Path, target: Path) -> str:
    """A classifier of entailment with MiniLM's shape and random weights, for times and bits."""
    if not target.exists():
        torch.manual_seed(0)
        encoder = folder / quickstart.ENCODER.member
        labels = dict(enumerate(ENTAILMENT))
        config = transformers.AutoConfig.from_pretrained(encoder, id2label=labels, label2id=None)
        config.label2id = {name: index for index, name in labels.items()}
        config.architectures = None
        target.parent.mkdir(parents=True, exist_ok=True)
        transformers.BertForSequenceClassification(config).save_pretrained(target)
        transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(target)
    return str(target)


def bits(options: Options) -> Iterator[Row]:
    folder = options.folder
    sources = quickstart.sources(folder)
    generator, nli = sources["smollm2"], make_entailment(folder, MODELS / "minilm-entailment")
    label = {"it": {"type": "noul", "instructions": "POSITIVE"}}
    asked = decision_peers.QUESTIONS
    kinds = (
        *(Kind(f"generator {each}", generator, each, asked, writes=True) for each in PRECISIONS),
        *(Kind(f"entailment {each}", nli, each, asked) for each in PRECISIONS),
        *(Kind(f"classifier {each}", sources["sentiment"], each, label) for each in PRECISIONS),
    )
    texts = texts_of(generator, 200, 60)
    for kind in (kind for kind in kinds if is_named(kind.name, options.models)):
        yield decision_bits.check(kind, texts, -(-options.repeats // len(kinds)), options.threads)


def show_bits(rows: Sequence[Row]) -> str:
    columns = ("kind", "repeats", *decision_bits.CASES, "preemptions")
    whole = sum(row["repeats"] for row in rows)
    return f"{grid(columns, rows)}\n\n{sum(row['differing'] for row in rows)} of {whole} repeats differ; goal 0"


def questions(count: int) -> Mapping[str, Any]:
    """So many different questions, answered by yes or no."""
    asked = (f"Is the text about {subject}?" for subject in SUBJECTS[:count])
    return {f"q{number}": {"type": "noul", "instructions": text} for number, text in enumerate(asked)}


def ask(http: httpx.Client, model: str, state: str, asked: Mapping[str, Any]) -> tuple[float, int]:
    """Milliseconds of a call whose state is not in the cache, and the tokens of its prompts."""
    body = {"model": model, "state": state, "questions": asked, "cache_salt": uuid.uuid4().hex}
    began = time.perf_counter()
    answer = http.post("/v1/systemone", json=body)
    took = (time.perf_counter() - began) * 1000
    answer.raise_for_status()
    return took, answer.json()["usage"]["input_tokens"]


def ten(options: Options) -> Iterator[Row]:
    """One and ten questions take turns, each with a new text."""
    for name, source in generators(options):
        rounds = 2 if options.quick else 8
        texts = texts_of(source, 2 * rounds + 1, TEN_STATE)
        flags = ("--threads", str(options.threads), "--log-level", "warning")
        one, many = questions(1), questions(len(SUBJECTS))
        with serve(f"it={source}", *flags) as server, httpx.Client(base_url=server.url, timeout=300) as http:
            ask(http, "it", texts.pop(), many)
            pairs = [(ask(http, "it", texts.pop(), one), ask(http, "it", texts.pop(), many)) for _ in range(rounds)]
        ones, tens = ([took for took, _ in each] for each in zip(*pairs, strict=True))
        tokens = pairs[0][0][1]
        yield {
            "model": name,
            "one, ms": statistics.median(ones),
            "ten, ms": statistics.median(tens),
            "ratio": statistics.median(tens) / statistics.median(ones),
            "tokens of one": tokens,
            "beside the state, each": pairs[0][1][1] / len(SUBJECTS) - TEN_STATE,
        }


def show_ten(rows: Sequence[Row]) -> str:
    columns = ("model", "one, ms", "ten, ms", "ratio", "tokens of one", "beside the state, each")
    return f"Ten questions about {TEN_STATE} tokens against one; goal {TEN_GOAL}\n\n{grid(columns, rows)}"


def throughput(options: Options) -> Iterator[Row]:
    plan = decision_peers.Plan(options.rounds, options.threads, 6.0, only=tuple(options.only))
    if options.quick:
        plan = decision_peers.Plan(1, options.threads, 4.0, 120, tuple(options.only))
    for case in decision_peers.cases(generator_of(options)):
        if not is_named(case.name, options.models):
            continue
        if Path(case.source).exists():
            yield from asyncio.run(decision_peers.compare(case, plan))
        else:
            print(f"{case.name} is not there: run with --install", file=sys.stderr)


def show_throughput(rows: Sequence[Row]) -> str:
    found = defaultdict[str, list[Row]](list)
    for row in rows:
        found[row["model"]].append(row)
    return "\n\n".join(decision_peers.show(model, each) for model, each in found.items())


def latency(options: Options) -> Iterator[Row]:
    """Models of one server take turns, each call with a new text: in their default precision, then in int8."""
    folder, calls = options.folder, 10 if options.quick else 100
    sources = quickstart.sources(folder)
    nli = make_entailment(folder, MODELS / "minilm-entailment")
    served = {"entailment": nli, "sentiment": sources["sentiment"], "smollm2": sources["smollm2"]}
    label = {"it": {"type": "noul", "instructions": "POSITIVE"}}
    encoder_texts = texts_of(str(folder / quickstart.ENCODER.member), calls + WARM, LATENCY_STATE)
    texts = {"smollm2": texts_of(sources["smollm2"], calls + WARM, LATENCY_STATE)}
    for precision in ("auto", "int8"):
        took = defaultdict[str, list[float]](list)
        flags = ("--precision", precision, "--threads", str(options.threads), "--log-level", "warning")
        named = [f"{name}={source}" for name, source in served.items()]
        with serve(*named, *flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(calls + WARM):
                for name in served:
                    asked = label if name == "sentiment" else {"it": YES_OR_NO}
                    took[name].append(ask(http, name, texts.get(name, encoder_texts)[number], asked)[0])
        for name, times in took.items():
            known = sorted(times[WARM:])
            p99 = known[min(int(len(known) * 0.99), len(known) - 1)]
            yield {
                "model": name,
                "precision": precision,
                "calls": calls,
                "p50, ms": statistics.median(known),
                "p99, ms": p99,
                "goal, ms": GOALS_MS.get(name, GOALS_MS["encoder"]),
            }


def show_latency(rows: Sequence[Row]) -> str:
    lines = [
        f"One question about {LATENCY_STATE} tokens, over HTTP; entailment: MiniLM's shape, random weights",
        "",
        grid(("model", "precision", "calls", "p50, ms", "p99, ms", "goal, ms"), rows),
        "",
        f"edgejev 0.3.2 says {EDGEJEV_MS} ms a question on 4 cores; its weights are in no package registry, so it is "
        "not run here",
    ]
    return "\n".join(lines)


def accuracy(options: Options) -> Iterator[Row]:
    """Every set to every model that can answer it, over HTTP: as it is, then with each calibration of half of them."""
    sets = decision_sets.read_sets(options.folder, options.sets, options.texts, options.words)
    sources = quickstart.sources(options.folder)
    flags = ("--threads", str(options.threads), "--log-level", "warning")
    for name, source in (*generators(options), ("sentiment", sources["sentiment"])):
        if not is_named(name, options.models):
            continue
        with serve(f"it={source}", *flags) as server:
            for labelled in sets:
                if name != "sentiment" or labelled.own_label:
                    known = labelled.as_own_label() if name == "sentiment" else labelled
                    found = asyncio.run(answer(server, known))
                    answers = [each.answer for each in known.examples]
                    which = {"model": name, "set": known.name}
                    if options.keep:
                        keep(options.keep / f"{name}-{known.name}.json", known, found)
                    yield which | asdict(measure(answers, found))
                    yield from (which | row for row in decision_calibration.compare_maps(known, found))


def keep(file: Path, labelled: LabelledSet, found: Sequence[OptionScores]) -> None:
    """Write the texts, their answers and the probabilities that were found."""
    rows = zip(labelled.examples, found, strict=True)
    content = [{"text": each.text, "answer": each.answer, "found": scores.probabilities} for each, scores in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


async def answer(server: Running, labelled: LabelledSet) -> list[OptionScores]:
    """The probabilities of each text, of all in one call where they have the same question."""
    async with httpx.AsyncClient(base_url=server.url, timeout=CALL_LIMIT_S) as http:
        alike = not any(example.asks for example in labelled.examples)
        return await (answer_lines if alike else answer_calls)(http, labelled)


async def answer_lines(http: httpx.AsyncClient, labelled: LabelledSet) -> list[OptionScores]:
    first = {"questions": {"it": labelled.question}}
    lines = [first, *({"state": example.text} for example in labelled.examples)]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)
    found = dict[int, OptionScores]()
    headers = {"Content-Type": "application/x-ndjson"}
    async with http.stream("POST", "/v1/systemone", content=content, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            answer = json.loads(line)
            found[answer["index"]] = read_scores(answer)
    return [found[number] for number in range(len(labelled.examples))]


async def answer_calls(http: httpx.AsyncClient, labelled: LabelledSet) -> list[OptionScores]:
    gate = asyncio.Semaphore(CLIENTS)

    async def one(example: decision_sets.Labelled) -> OptionScores:
        body = {"state": example.text, "questions": {"it": labelled.ask(example)}}
        async with gate:
            answer = await http.post("/v1/systemone", json=body)
        answer.raise_for_status()
        return read_scores(answer.json())

    return await asyncio.gather(*map(one, labelled.examples))


def read_scores(answer: Mapping[str, Any]) -> OptionScores:
    """Of an answer, or a line of one. Raises KeyError for the line of an error."""
    shares, mass = answer["answers"]["it"]["probabilities"], answer["diagnostics"]["it"]["label_mass"]
    return OptionScores(tuple(shares.values()), mass)


QUALITY = ("texts", "accuracy", "auc", "log_loss", "brier", "ece", "label_mass")
MAPS = ("map", "held out", "accuracy", "brier", "ece", "ece by chance", "log_loss")


def show_accuracy(rows: Sequence[Row]) -> str:
    maps = [row for row in rows if "map" in row]
    tables = [grid(("model", "set", *QUALITY), [row for row in rows if "map" not in row])]
    if maps:
        title = f"Each half, calibrated on the other; ECE of 15 bins of as many texts, goal {ECE_GOAL}"
        tables += [title, grid(("model", "set", *MAPS), maps)]
    return "\n\n".join(tables)


def formats(options: Options) -> Iterator[Row]:
    """Every format, then the served one with several orders of the options."""
    sets = decision_sets.read_sets(options.folder, options.sets, options.texts, options.words)
    for name, source in generators(options):
        chosen = [SERVED] if options.quick else list(FORMATS)
        for row in asyncio.run(collect(source, sets, chosen, options.threads)):
            yield {"model": name, **row}


async def collect(source: str, sets: Sequence[LabelledSet], chosen: Sequence[str], threads: int) -> list[Row]:
    found = list[Row]()
    async with decision_formats.asking(source, threads) as it:
        async for row in decision_formats.compare(it, sets, chosen, PERMUTATIONS):
            found.append(row)
            report(row)
    return found


def show_formats(rows: Sequence[Row]) -> str:
    """The mean over the sets, of each model and of both."""
    found = defaultdict[tuple[str, str], list[Row]](list)
    for row in rows:
        for model in (row["model"], "mean"):
            found[model, row["format"]].append(row)
    means = [
        {"model": model, "format": title, **{name: statistics.fmean(row[name] for row in each) for name in QUALITY}}
        for (model, title), each in found.items()
    ]
    return grid(("model", "format", *QUALITY[1:]), means)


def generator_of(options: Options) -> str:
    return quickstart.sources(options.folder)["smollm2"]


def generators(options: Options) -> Iterator[tuple[str, str]]:
    """Names and files of the generators that are there."""
    coder = MODELS / f"{decision_peers.CODER}-Q4_K_M.gguf"
    for name, source in (("SmolLM2-135M", generator_of(options)), ("Qwen2.5-Coder-0.5B", str(coder))):
        if not is_named(name, options.models):
            continue
        if Path(source).exists():
            yield name, source
        else:
            print(f"{name} is not there: run with --install", file=sys.stderr)


def is_named(name: str, parts: Sequence[str]) -> bool:
    return any(part.lower() in name.lower() for part in parts)


def grid(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Markdown of some columns of the rows."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


Figure = tuple[Callable[[Options], Iterator[Row]], Callable[[Sequence[Row]], str]]
FIGURES: Mapping[str, Figure] = {
    "bits": (bits, show_bits),
    "ten": (ten, show_ten),
    "throughput": (throughput, show_throughput),
    "latency": (latency, show_latency),
    "accuracy": (accuracy, show_accuracy),
    "formats": (formats, show_formats),
}


def report(row: Row) -> None:
    print(json.dumps(row), file=sys.stderr, flush=True)


def asked(words: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--figures", nargs="*", default=["bits", "ten", "throughput", "latency"], choices=list(FIGURES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=0, help="of the call whose bits are compared; 0: 1,000, or 48")
    parser.add_argument("--texts", type=int, default=0, help="of each labelled set; 0: 200, or 12")
    parser.add_argument("--sets", nargs="*", default=list(decision_sets.SETS), choices=list(decision_sets.SETS))
    parser.add_argument("--words", type=int, default=WORDS, help="of a labelled text; the rest is cut")
    parser.add_argument("--models", nargs="*", default=[""], help="parts of names of models, or of kinds for bits")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of servers")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the probabilities of labelled texts")
    options = parser.parse_args(words)
    options.repeats = options.repeats or (48 if options.quick else 1000)
    options.texts = options.texts or (12 if options.quick else 200)
    options.folder = settings.default_model_dir()
    return options


def main() -> None:
    options = asked()
    settings.set_library_defaults()
    quickstart.fetch_all(options.folder)
    if options.install:
        decision_peers.install(str(MODELS / f"{decision_peers.CODER}-Q4_K_M.gguf"))
    print(f"{machine()}, {options.threads} threads{', quick: not for figures' if options.quick else ''}\n", flush=True)
    every = list[Row]()
    for name in options.figures:
        run, show = FIGURES[name]
        rows = list[Row]()
        for row in run(options):
            rows.append(row)
            report({"figure": name, **row})
        every += [{"figure": name, **row} for row in rows]
        print(show(rows), end="\n\n", flush=True)
    if options.json:
        options.json.write_text("".join(f"{json.dumps(row)}\n" for row in every))


if __name__ == "__main__":
    main()
