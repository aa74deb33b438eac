"""Recipes as they are read: wrong fields are named, and what a recipe takes from its base."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.service.runtime import quickstart
from polyhead.training.data.examples import Corpus, Example
from polyhead.training.loop.errors import RecipeError
from polyhead.training.recipes.recipe import FinetuneData, read_recipe, split_corpus
from tests.support.places import ROOT
from tests.support.recipes import RECIPES


def test_the_recipe_of_the_quick_start_is_read() -> None:
    read = read_recipe(RECIPES / "sentiment.toml")
    assert read.trunk.package == quickstart.ENCODER.package
    assert f"{read.trunk.folder}/" == quickstart.ENCODER.member
    assert quickstart.ADAPTER.samefile(ROOT / "service" / "runtime" / "quickstart" / "sentiment")


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("sentiment", "seed = 0", "seed = 0\nspeed = 1", ".*speed"),
        ("sentiment", "rank = 8", 'rank = "eight"', r".*lora\.rank"),
        ("sentiment", "rank = 8", "rank = 0", r".*lora\.rank"),
        ("sentiment", "rank = 8", "", r".*lora\.rank"),
        ("sentiment", "epochs = 2", "epochs = 2\nepoch = 3", r".*plan\.epoch"),
        ("sentiment", 'source = "vader"', 'source = "imdb"', r".*data\.source"),
        ("sentiment", 'kind = "wheel"', 'kind = "wheel"\nhash = "0"', r".*trunk\.package\.hash"),
        ("sentiment", "[lora]", "[lora", ".*is not TOML"),
        ("gpt", "seed = 0", "seed = 0\nspeed = 1", "speed"),
        ("gpt", "heads = 4", "heads = 4\nhead = 1", r"network\.head: "),
        ("gpt", "heads = 4", 'heads = "many"', r"network\.heads"),
        ("gpt", 'kind = "gpt"', 'kind = "gtp"', r"network\.kind: 'gtp' is none of gpt, bert"),
        ("gpt", 'source = "prose"', 'source = "verse"', r"data\.source: .*'verse' is none of prose, en-de"),
        (
            "gpt",
            'source = "prose"',
            'source = "en-de"',
            r"data\.source: a network of kind 'gpt' learns from one of prose",
        ),
        ("gpt", "seed = 0", "seed = 0\nsmoothing = 0.1", "smoothing: only translation networks have it"),
        ("gpt", "seed = 0", "seed = 0\nhidden = 0.4", "hidden: a network of kind 'gpt' has no tokens hidden from it"),
        ("gpt", "seed = 0", "seed = 0\nhidden = 1.0", "hidden: Input should be less than 1"),
        ("gpt", "rate = 3e-3", "rate = 3e-3\nrates = 1", r"plan\.rates"),
    ],
)
def test_a_wrong_recipe_names_its_field(name: str, old: str, new: str, complaint: str, tmp_path: Path) -> None:
    text = (RECIPES / f"{name}.toml").read_text()
    assert old in text
    (tmp_path / "wrong.toml").write_text(text.replace(old, new))
    with pytest.raises(RecipeError, match=rf"wrong\.toml: {complaint}"):
        read_recipe(tmp_path / "wrong.toml")


def test_heads_must_divide_the_width(tmp_path: Path) -> None:
    recipe = read_recipe(RECIPES / "gpt.toml")
    uneven = replace(recipe, network=recipe.network | {"heads": 3})
    with pytest.raises(RecipeError, match=r"network\.heads: 128 features cannot be shared evenly among 3"):
        uneven.network_size(tmp_path).model_config(300, 8, causal=True)


def test_a_recipe_has_a_base_model_or_a_network(tmp_path: Path) -> None:
    (tmp_path / "neither.toml").write_text("seed = 0")
    result = CliRunner().invoke(app, ["train", str(tmp_path / "neither.toml")])
    assert result.exit_code == 1
    assert "it needs either trunk, a checkpoint to finetune, or network, to train one from scratch" in result.stderr


def test_a_recipe_may_extend_another(tmp_path: Path) -> None:
    base = read_recipe(RECIPES / "bahdanau.toml")
    other = read_recipe(RECIPES / "luong-local.toml")
    named = {"attention": "luong", "score": "general", "reach": "local-p"}
    assert other.network == base.network | named
    assert (other.data, other.plan.rate) == (base.data, base.plan.rate)
    for name, text in {"a": 'base = "b.toml"', "b": 'base = "a.toml"', "c": 'base = "none.toml"'}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    with pytest.raises(RecipeError, match=r"a\.toml: base: it is based on itself"):
        read_recipe(tmp_path / "a.toml")
    with pytest.raises(RecipeError, match=r"none\.toml: cannot be read"):
        read_recipe(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('base = "/dev/zero"', "/dev/zero: is no regular file"),
        ('base = "pipe"', "pipe: is no regular file"),
        ('base = "long"', "long: is longer than 16 KiB"),
        ('base = "a/../r.toml"', "more than 16 files are based on each other"),
        ("base = 1", r"r\.toml: base: 1 should be the path of a file"),
        ('base = "\\u0000"', r"r\.toml: base: '\\x00' should be the path of a file"),
        ("a = " + "[" * 15_000, r"r\.toml: has more than 16 tables and lists inside each other"),
        (".".join("a" * 3_000) + " = 1", r"r\.toml: has more than 16 tables and lists inside each other"),
        ("a = " + "1" * 10_000, r"r\.toml: is not TOML: .*4300"),
        ("a = 1979-13-01", r"r\.toml: is not TOML"),
        ("[network]\nkind = []", r"r\.toml: "),
    ],
)
def test_no_file_of_a_recipe_holds_the_command(text: str, complaint: str, tmp_path: Path) -> None:
    """Devices, pipes and long files are not read, and what is nested deep or based on itself is named."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").mkdir()
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError, match=complaint):
        read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize("field", ["parameters = 0", "hidden = 16"])
def test_the_size_of_cells_is_given_once(tmp_path: Path, field: str) -> None:
    (tmp_path / "r.toml").write_text(f'base = "{RECIPES / "bahdanau.toml"}"\n[network]\n{field}\n')
    with pytest.raises(RecipeError, match=r"r\.toml: network: .*either how wide it is, hidden, or how many parameters"):
        read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize("share", ["1.0", "-0.1"])
def test_dropout_must_be_below_one(tmp_path: Path, share: str) -> None:
    (tmp_path / "r.toml").write_text(f'base = "{RECIPES / "gpt.toml"}"\n[network]\ndropout = {share}\n')
    with pytest.raises(RecipeError, match=r"r\.toml: network\.dropout: Input should be"):
        read_recipe(tmp_path / "r.toml")


@pytest.mark.parametrize(
    ("shares", "complaint"),
    [
        ({"held_out": 0.0}, "held_out"),
        ({"validation": 1.0, "held_out": 0.0}, "train"),
        ({"leave_out": "news"}, r"data\.leave_out: 'news' is none of dog, film"),
    ],
)
def test_no_part_may_be_empty(shares: dict[str, float], complaint: str) -> None:
    examples = [Example(f"word{row} other{row}", row % 2, ("film", "dog")[row % 2], str(row)) for row in range(100)]
    with pytest.raises(RecipeError, match=complaint):
        split_corpus(FinetuneData(source="vader", **shares), Corpus(examples, ("a", "b")))  # type: ignore[arg-type]


def test_the_order_of_fields_stays() -> None:
    """A saved run is resumed only with the same text of its recipe."""
    network, finetune = (read_recipe(RECIPES / f"{name}.toml").describe() for name in ("gpt", "sentiment"))
    names = ["seed", "threads", "data", "network", "plan", "device", "smoothing", "hidden"]
    assert list(json.loads(network)) == names
    assert list(json.loads(network)["data"]) == ["source", "tokens", "context", "words", "validation", "held_out"]
    assert finetune.startswith("FinetuneRecipe(architecture='BertForSequenceClassification', seed=0, threads=1, trunk=")
    assert "data=FinetuneData(source='vader', batch=32, validation=0.1, held_out=0.1, leave_out='', most_tokens=0)" in (
        finetune
    )
