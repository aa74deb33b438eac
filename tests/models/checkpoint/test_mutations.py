"""Random changes in every file of a checkpoint end in a clear error or a working model, never in a crash or a hang."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support import gguf_files, mutations

SEED, COUNT, MORE = 24, 4, 60  # mutations of each file, in the short and in the long form
PATIENCE = 900.0  # seconds for all mutations, which take one or two minutes
SECONDS = 10.0  # of CPU time for one mutation


@pytest.fixture
def sources(tiny_generator: Path, tiny_embedder: Path, tiny_classifier: Path, tmp_path: Path) -> list[Path]:
    """A folder with a chat template, one of sentence-transformers, two with older vocabulary files, and a GGUF file."""
    generator, embedder = (
        Path(shutil.copytree(each, tmp_path / name))
        for each, name in ((tiny_generator, "generator"), (tiny_embedder, "embedder"))
    )
    (generator / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "max_length": 20}))
    special = {"cls_token": "[CLS]", "additional_special_tokens": ["[SEP]", {"content": "[PAD]", "lstrip": True}]}
    (embedder / "special_tokens_map.json").write_text(json.dumps(special))
    words = Path(shutil.copytree(tiny_classifier, tmp_path / "words"))
    pieces = json.loads((words / "tokenizer.json").read_text())["model"]["vocab"]
    (words / "tokenizer.json").unlink()
    (words / "vocab.txt").write_text("\n".join(sorted(pieces, key=pieces.__getitem__)))
    merged = Path(shutil.copytree(tiny_generator, tmp_path / "merged"))
    model = json.loads((merged / "tokenizer.json").read_text())["model"]
    (merged / "tokenizer.json").unlink()
    (merged / "vocab.json").write_text(json.dumps(model["vocab"]))
    (merged / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    described = json.loads((merged / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (merged / "tokenizer_config.json").write_text(json.dumps(described))
    return [generator, embedder, words, merged, quantised(tmp_path, tiny_generator)]


def quantised(place: Path, generator: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(generator)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    network = LlamaForCausalLM(config)
    metadata = gguf_files.decoder_metadata(config) | gguf_files.byte_level_metadata(tokenizer)
    path = place / "model.gguf"
    gguf_files.write(path, "llama", metadata, gguf_files.converted("llama", network))
    return path


def test_every_mutation_loads_or_is_refused_with_a_message(sources: list[Path], tmp_path: Path, full: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    many = str(MORE if full else COUNT)
    command = [sys.executable, mutations.__file__, str(SEED), many, str(place), *map(str, sources)]
    with (tmp_path / "errors.txt").open("w") as errors:
        patience = PATIENCE * (10 if full else 1)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=patience, check=False, text=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {outcomes[-1:]}: {(tmp_path / 'errors.txt').read_text()[-2000:]}"
    assert [each for each in outcomes if each["crashed"]] == []
    assert [each for each in outcomes if each["seconds"] > SECONDS] == []
    kinds = Counter(each["outcome"].partition(":")[0] for each in outcomes)
    assert kinds["refused"] > len(outcomes) / 4, kinds  # otherwise the mutations would have no effect
    assert kinds["loaded"] > len(outcomes) / 10, kinds  # otherwise they would be refused for another reason
