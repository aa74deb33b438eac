"""Finetuning recipes: the split leaks nothing, a tiny network learns, and PEFT loads the saved adapter."""

import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import BertForSequenceClassification
from typer.testing import CliRunner

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.tensor_files import read_safetensors
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.cli.main import app
from polyhead.service.runtime.tokenizer_check import TokenizerCheck
from polyhead.training.data import vader
from polyhead.training.data.examples import (
    Corpus,
    Example,
    Split,
    group_names,
    hash_share,
    near_duplicates,
    split_by_domain,
    split_by_source,
)
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.lora_training import LoraConfig, add_adapters, merge_adapters
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.networks.base_model import BaseModelSpec
from polyhead.training.recipes import commands
from polyhead.training.recipes.recipe import FinetuneData, FinetuneRecipe, read_recipe
from tests.support import checkpoints
from tests.support.places import ROOT
from tests.support.recipes import finetuned

SHIPPED = ROOT / "service" / "runtime" / "quickstart" / "sentiment"
RECIPE = ROOT / "training" / "recipes" / "sentiment.toml"
LABELS = ("NEGATIVE", "POSITIVE")
TARGETS = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")


def example(
    text: str, source: str, domain: str = "tweet", label: int = 0, subjects: tuple[str, ...] = ()
) -> Example[int]:
    return Example(text, label, domain, source, subjects)


# ---- the data


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_ratings_become_examples(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "ratings.tar.gz",
        {
            vader.DOMAINS["movie"]: "1\t2.3\tA joy, says Harry Potter's ''wizard''.\r\n2\t0.4\tSo so.\r\n3\t-0.5\tNo.",
            vader.DOMAINS["tweet"]: "7\t-1.25\tTom &amp; Jerry   &lt;/3\r\n",
            vader.DOMAINS["amazon"]: "12_3\t0.5\tnice.\t\r\n".replace("\t\r", "\r"),
        },
    )
    assert vader.read_archive(path) == [
        Example('A joy, says Harry Potter\'s "wizard".', 1, "movie", "1", ("Harry Potter's",)),
        Example("No.", 0, "movie", "3"),
        Example("Tom & Jerry </3", 0, "tweet", "7"),
        Example("nice.", 1, "amazon", "12"),
    ]


def test_related_examples_are_one_group() -> None:
    examples = [
        example("the battery is dead after a week", "12", "amazon"),
        example("and the box was crushed", "12", "amazon"),
        example("Today SUX so very much!!!", "1"),
        example("today sux so very much", "2"),
        example("Solaris is a slow dream", "1", "movie", subjects=("Steven Soderbergh",)),
        example("He has done better, and worse", "2", "movie", subjects=("Steven Soderbergh",)),
        example("an entirely different thing", "3", "movie"),
    ]
    names = group_names(examples)
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert names[4] == names[5]
    assert len(set(names)) == 4


def texts() -> st.SearchStrategy[list[str]]:
    words = st.sampled_from(["a", "b", "c", "d", "e", "f", "g"])
    return st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), min_size=2, max_size=12)


@given(texts())
@settings(max_examples=200, deadline=None)
def test_near_duplicates_are_all_found(drawn: list[str]) -> None:
    """Equal to a comparison of every pair."""
    bags = [set(text.split()) for text in drawn]
    every = {
        (one, other)
        for other in range(len(bags))
        for one in range(other)
        if len(bags[one] & bags[other]) >= 0.6 * len(bags[one] | bags[other])
    }
    assert set(near_duplicates(drawn, 0.6)) == every


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("uvwxyz"), texts()), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_the_split_leaks_nothing(documents: list[tuple[int, str, list[str]]]) -> None:
    examples = [example(text, str(source), subjects=(subject,)) for source, subject, some in documents for text in some]
    split = split_by_source(Corpus(examples, LABELS), 0.3, 0.3)
    parts = [split.train, split.validation, split.held_out]
    assert sum(map(len, parts)) == len(examples)
    for key in (lambda e: e.source, lambda e: e.subjects, lambda e: frozenset(e.text.split())):
        seen = [{key(one) for one in part} for part in parts]
        assert not seen[0] & seen[1]
        assert not seen[0] & seen[2]
        assert not seen[1] & seen[2]


def test_the_split_is_deterministic() -> None:
    """The split is the same on every machine and in any order, with about the requested shares."""
    examples = [example(f"word{number} other{number}", str(number)) for number in range(3000)]
    split = split_by_source(Corpus(examples, LABELS), 0.1, 0.2)
    shuffled = split_by_source(Corpus(random.Random(0).sample(examples, len(examples)), LABELS), 0.1, 0.2)
    assert set(split.held_out) == set(shuffled.held_out)
    assert len(split.held_out) == pytest.approx(600, abs=70)
    assert len(split.validation) == pytest.approx(300, abs=50)
    assert hash_share("tweet 1") == pytest.approx(0.20084052372486616)


def test_an_excluded_domain_is_held_out_completely() -> None:
    examples = [
        example("what a lovely day it is", "1", "tweet"),
        example("What a LOVELY day it is!", "1", "movie"),
        *(example(f"word{number} other{number}", str(number), "movie") for number in range(2, 50)),
    ]
    split = split_by_domain(Corpus(examples, LABELS), "tweet", 0.1)
    assert [one.domain for one in split.held_out] == ["tweet"]
    assert not any("LOVELY" in one.text for one in split.train + split.validation)


# ---- low-rank layers


def test_adding_and_merging_adapters_keeps_the_outputs(tiny_embedder: Path) -> None:
    network, batch = load(str(tiny_embedder)).network, RaggedBatch.of([[2, 9, 8, 3], [2, 30, 3]])
    with torch.no_grad():
        before = network(batch)
        layers = add_adapters(network, LoraConfig(rank=4, alpha=8, targets=TARGETS))
        assert len(layers) == 12
        torch.testing.assert_close(network(batch), before, rtol=0, atol=0)
        for layer in layers.values():
            torch.nn.init.normal_(layer.b, std=0.1)
        after = network(batch)
        assert (after - before).abs().max() > 0.1
        merge_adapters(network, layers)
        torch.testing.assert_close(network(batch), after, rtol=1e-5, atol=1e-5)
    assert not any("linear" in name for name, _ in network.named_parameters())


def test_only_the_low_rank_matrices_are_trained(tiny_embedder: Path) -> None:
    network = load(str(tiny_embedder)).network
    add_adapters(network, LoraConfig(rank=4, alpha=8, targets=("attention.query", "mlp.down")))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"blocks.{layer}.{part}.{side}" for layer in (0, 1) for part in ("attention.query", "mlp.down") for side in "ab"
    }


def test_an_unknown_target_is_refused_by_name(tiny_embedder: Path) -> None:
    network = load(str(tiny_embedder)).network
    with pytest.raises(RecipeError, match=r"lora\.targets.*'query_key'.*attention\.query"):
        add_adapters(network, LoraConfig(rank=4, alpha=8, targets=("query_key",)))


# ---- a complete run


def separable(count: int, seed: int) -> list[Example[int]]:
    """Sentences in two domains whose label depends on one word."""
    draw = random.Random(seed)
    filler = ["the", "quick", "brown", "fox", "film", "dog", "acted", "shot", "far", "too", "long", "money"]
    examples = []
    for number in range(count):
        label = number % 2
        words = draw.choices(filler, k=draw.randint(2, 9))
        words.insert(draw.randrange(len(words)), ("bad", "good")[label])
        examples.append(example(" ".join(words), str(number), ("film", "dog")[number % 4 < 2], label))
    return examples


def tiny_recipe(**plan: float) -> FinetuneRecipe:
    return FinetuneRecipe(
        architecture="BertForSequenceClassification",
        seed=3,
        threads=1,
        trunk=BaseModelSpec(name="tiny", folder=Path()),
        data=FinetuneData(source="vader", batch=16),
        lora=LoraConfig(rank=4, alpha=8, dropout=0.05, targets=TARGETS),
        plan=TrainingPlan(**{"epochs": 4, "rate": 5e-3, **plan}),  # type: ignore[arg-type]
    )


def train_adapter(folder: Path, out: Path) -> dict[str, Any]:
    split = Split(separable(480, 0), separable(40, 1), separable(120, 2))
    return finetuned(tiny_recipe(), folder, split, Corpus([], LABELS), out)


@pytest.fixture(scope="module")
def run(tiny_embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("run")
    return train_adapter(tiny_embedder, out), out


def test_a_tiny_network_learns(run: tuple[dict[str, Any], Path]) -> None:
    result, _ = run
    assert result["held_out"]["accuracy"] > 0.9
    kinds = {f"{kind} of {label}" for kind in ("precision", "recall") for label in LABELS}
    assert set(result["held_out"]) == {"loss", "accuracy", "film", "dog"} | kinds
    assert result["baselines"] == {"majority": 0.5}
    assert result["cut"] == {"train": 0, "validation": 0, "held_out": 0}
    assert result["texts"] == {"train": 480, "validation": 40, "held_out": 120}


def test_every_figure_is_saved(run: tuple[dict[str, Any], Path]) -> None:
    result, out = run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "epoch" in line]
    steps = [line for line in lines if "rate" in line]
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4]
    assert [line["step"] for line in steps] == [20, 40, 60, 80, 100, 120]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["rate"] < 1e-4
    kept = json.loads((out / "result.json").read_text())
    assert kept["held_out"] == result["held_out"]
    assert kept["bytes"] == (out / "adapter" / "adapter_model.safetensors").stat().st_size


def test_a_rerun_is_the_same_to_the_byte(run: tuple[dict[str, Any], Path], tiny_embedder: Path, tmp_path: Path) -> None:
    result, out = run
    again = train_adapter(tiny_embedder, tmp_path)
    assert again["held_out"] == result["held_out"]
    for name in ("adapter_model.safetensors", "adapter_config.json", "config.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (out / "adapter" / name).read_bytes()


def test_peft_reads_the_same_probabilities(run: tuple[dict[str, Any], Path], tiny_embedder: Path) -> None:
    result, _ = run
    ours = load(f"{tiny_embedder}+{result['adapter']}")
    assert ours.task == "classify"
    assert ours.labels == LABELS
    base = BertForSequenceClassification.from_pretrained(tiny_embedder, num_labels=2)
    theirs = PeftModel.from_pretrained(base, result["adapter"]).eval()
    for text in ("the quick good fox", "too long, far too bad", "money"):
        ids = ours.tokenizer.encode(text).ids
        batch = RaggedBatch.of([ids])
        with torch.no_grad():
            ours_out = ours.head.postprocess(ours.head(ours.network(batch), batch.starts))
            reference = theirs(torch.tensor([ids])).logits.softmax(-1)
        torch.testing.assert_close(ours_out, reference, rtol=0, atol=1e-5)
    weights = {name for name, _ in theirs.named_parameters() if "lora_A" in name}
    assert len(weights) == 12


# ---- recipes


def test_an_architecture_of_another_family_is_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    wrong = FinetuneRecipe(**{**vars(tiny_recipe()), "architecture": "RobertaForSequenceClassification"})
    split = Split(separable(4, 0), separable(4, 1), separable(4, 2))
    with pytest.raises(
        RecipeError, match=r"'RobertaForSequence.*can classify; there are: BertForSequenceClassification"
    ):
        finetuned(wrong, tiny_embedder, split, Corpus([], LABELS), tmp_path)


def test_a_text_that_is_too_long_is_not_cut(tiny_embedder: Path, tmp_path: Path) -> None:
    split = Split([example("good " * checkpoints.POSITIONS, "9")], separable(4, 1), separable(4, 2))
    with pytest.raises(RecipeError, match=r"data\.most_tokens: \d+ tokens, at most 256.*'good good"):
        finetuned(tiny_recipe(), tiny_embedder, split, Corpus([], LABELS), tmp_path)


# ---- the shipped adapter


@pytest.mark.parametrize("delimited", [False, True])
def test_a_tokenizer_is_tried_before_it_is_read(
    tiny_embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimited: bool
) -> None:
    """`train` has a child process try the tokenizer of its recipe's base first, `evaluate` that of the folder."""

    def refuse(_: TokenizerCheck, source: Path, __: object) -> None:
        raise CheckpointError("the child process ended", file=str(source))

    chosen = replace(tiny_recipe().smoke_recipe(), lora=None)
    chosen = replace(chosen, trunk=replace(chosen.trunk, folder=tiny_embedder, delimited=delimited))
    known = chosen.source
    source = replace(known, read_corpus=lambda _: known.create_sample())
    monkeypatch.setattr(FinetuneRecipe, "source", source)
    monkeypatch.setattr(commands, "read_recipe", lambda _: chosen)
    monkeypatch.setattr(TokenizerCheck, "check_folder", refuse)
    monkeypatch.setattr(Tokenizer, "from_folder", lambda _: pytest.fail("the tokenizer was read"))
    for arguments in (
        ("train", tmp_path / "some.toml", "--out", tmp_path / "out"),
        ("evaluate", tiny_embedder, tmp_path / "some.toml"),
        ("evaluate", tiny_embedder, tmp_path / "some.txt"),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 1
        assert f"{tiny_embedder}: the child process ended" in result.stderr


def test_the_shipped_adapter_is_small_and_complete() -> None:
    weights = SHIPPED / "adapter_model.safetensors"
    assert weights.stat().st_size <= 1_000_000
    entries = read_safetensors(weights)
    shape = read_recipe(RECIPE).lora
    assert len(entries) == 6 * len(shape.targets) * 2 + 4
    assert entries["base_model.model.classifier.weight"].shape == (2, 384)
    settings = json.loads((SHIPPED / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["classifier", "pooler"]
    assert (settings["r"], settings["lora_alpha"]) == (shape.rank, shape.alpha)
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["id2label"] == {"0": "NEGATIVE", "1": "POSITIVE"}
