"""Whole trunks that went on learning, and recipes in their smoke form: folders that transformers reads alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.training.data import samples
from polyhead.training.export.finetuned_folder import FinetunedModel, save_finetuned
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.networks.base_model import BaseModelSpec, find_base_folder, write_tiny_base
from polyhead.training.recipes import commands
from polyhead.training.recipes.finetune_run import build_modules
from polyhead.training.recipes.recipe import read_recipe, split_corpus
from polyhead.training.tasks.sources import TASK_SOURCES
from polyhead.training.tasks.task import TaskTraining
from tests.support.recipes import RECIPES, command, finetuned, tried

WHOLE = sorted(path.stem for path in RECIPES.glob("*.toml") if '\nrun = "bert"' in path.read_text())
ADAPTED = "spam"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every recipe of a whole trunk, and one of an adapter, in its smoke form."""
    return tried([*WHOLE, ADAPTED], tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_learned_is_what_transformers_reads(name: str, runs: Path) -> None:
    folder = runs / name / "model"
    ours, architecture = load(str(folder)), json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs = getattr(tf, architecture).from_pretrained(folder).eval()
    encoded = ours.tokenizer.encode(("the lamp is on", "a door is off"))
    batch = RaggedBatch.of([encoded.ids], [encoded.segments])
    with torch.no_grad():
        mine = ours.head(ours.network(batch), batch.starts)
        said = theirs(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segments]))
    logits = said.logits if "logits" in said else torch.stack([said.start_logits, said.end_logits], dim=-1)
    torch.testing.assert_close(mine, logits.reshape(mine.shape), rtol=0, atol=1e-5)
    if ours.task != "span":
        assert tuple(theirs.config.id2label.values()) == ours.labels


def test_a_generator_learns_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices are written transposed again, and its last token's state is scored."""
    chosen = read_recipe(RECIPES / "bert-single.toml")
    chosen = replace(chosen, architecture="GPT2ForSequenceClassification")
    monkeypatch.setattr(commands, "read_recipe", lambda _: chosen)
    commands.train(tmp_path / "gpt.toml", tmp_path, smoke=True)
    ours = load(str(tmp_path / "model"))
    theirs = tf.GPT2ForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = ours.tokenizer.encode("The lamp is on").ids
    with torch.no_grad():
        mine = ours.head(ours.network(RaggedBatch.of([ids])), [0, len(ids)])
        torch.testing.assert_close(mine, theirs(torch.tensor([ids])).logits, rtol=0, atol=1e-5)


def test_a_run_leaves_all_that_a_run_leaves(runs: Path) -> None:
    for name in [*WHOLE, ADAPTED]:
        result = json.loads((runs / name / "result.json").read_text())
        kind = "adapter" if name == ADAPTED else "model"
        assert result[kind] == kind
        assert result["bytes"] == sum(file.stat().st_size for file in (runs / name / kind).glob("*.safetensors"))
        assert result["held_out"]["loss"] > 0


def test_a_run_that_was_ended_goes_on(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same folder, byte for byte, as one that was not; an adapter's too."""
    losses = TaskTraining.losses
    for name, made in (("bert-tags", "model/model.safetensors"), (ADAPTED, "adapter/adapter_model.safetensors")):
        left = iter([True, True, True, False])

        def ending(self: Any, batch: Any, left: Any = left) -> torch.Tensor:
            if not next(left, True):
                raise KeyboardInterrupt
            return losses(self, batch)

        monkeypatch.setattr(TaskTraining, "losses", ending)
        with pytest.raises(KeyboardInterrupt):
            commands.train(RECIPES / f"{name}.toml", tmp_path / name, smoke=True)
        assert not (tmp_path / name / made).exists()
        commands.train(RECIPES / f"{name}.toml", tmp_path / name, smoke=True, resume=True)
        assert (tmp_path / name / made).read_bytes() == (runs / name / made).read_bytes()


def test_a_tiny_network_learns_where_answers_stand(trunk: Path, tmp_path: Path) -> None:
    """Of every sentence two things are asked, so the question decides."""
    chosen = read_recipe(RECIPES / "bert-span.toml").smoke_recipe()
    chosen = replace(chosen, dropout=0.0, plan=TrainingPlan(epochs=12, rate=1e-2))
    corpus = samples.span_questions()
    result = finetuned(chosen, trunk, split_corpus(chosen.data, corpus), corpus, tmp_path)
    assert result["held_out"]["exact"] > 0.9
    assert set(result["held_out"]) == {"loss", "exact", "F1", "how", "when"}


# ---- trunks


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if bert.toml had made it."""
    folder = tmp_path_factory.mktemp("trunks") / "bert" / "model"
    write_tiny_base("BertForTokenClassification", samples.labelled_sentences().examples, folder, embeds=False)
    return folder


def begun(trunk: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    chosen = read_recipe(RECIPES / "bert-single.toml")
    chosen = replace(chosen, trunk=replace(chosen.trunk, **changes))
    network, head, _ = build_modules(chosen, load(str(trunk)), TASK_SOURCES["topics"].create_task(("a", "b")), 2)
    return network.state_dict(), head.state_dict()


def test_it_begins_with_what_was_pretrained_unless_it_is_fresh(trunk: Path) -> None:
    """The layer before the scores is the one that told whether texts follow."""
    pretrained = load_file(trunk / "model.safetensors")
    network, head = begun(trunk)
    assert network["tokens.weight"].equal(pretrained["bert.embeddings.word_embeddings.weight"])
    assert head["dense.weight"].equal(pretrained["bert.pooler.dense.weight"])
    assert not head["out.bias"].any()
    again, other = begun(trunk, fresh=True)
    assert not torch.isclose(again["tokens.weight"], network["tokens.weight"]).all()
    assert again["tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not other["dense.weight"].equal(head["dense.weight"])
    assert again.keys() == network.keys()


def test_a_trunk_is_what_another_run_made(trunk: Path, tmp_path: Path) -> None:
    runs = trunk.parents[1]
    assert find_base_folder(BaseModelSpec(run="bert"), tmp_path, runs) == trunk
    with pytest.raises(RecipeError, match=r"trunk\.run: .*does not exist; train the recipe 'gpt' first"):
        find_base_folder(BaseModelSpec(run="gpt"), tmp_path, runs)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('run = "bert"', "", "trunk: it needs either run, the name of another run, or folder"),
        ('run = "bert"', 'run = "bert"\nfolder = "x"', "trunk: it needs either run"),
        ("dropout = 0.1", "dropout = -0.1", "dropout"),
        ("[plan]", "[lora]\nrank = 1\nalpha = 1\ntargets = []\n[plan]", "dropout: only a trunk that is trained whole"),
        ("dropout = 0.1", "", None),
    ],
)
def test_a_wrong_recipe_names_its_field(old: str, new: str, complaint: str | None, tmp_path: Path) -> None:
    text = (RECIPES / "bert-single.toml").read_text()
    assert old in text
    (tmp_path / "some.toml").write_text(text.replace(old, new))
    if complaint is None:
        assert read_recipe(tmp_path / "some.toml").dropout == 0
    else:
        with pytest.raises(RecipeError, match=rf"some\.toml: {complaint}"):
            read_recipe(tmp_path / "some.toml")


def test_what_nobody_can_write_is_refused_before_it_is_learned(trunk: Path) -> None:
    chosen = replace(read_recipe(RECIPES / "bert-single.toml"), architecture="BertForNextSentencePrediction")
    with pytest.raises(RecipeError, match=r"'BertForNextSentencePrediction' of family 'bert' can be adapted with lora"):
        build_modules(chosen, load(str(trunk)), TASK_SOURCES["topics"].create_task(("a", "b")), 2)
    with pytest.raises(
        RecipeError, match="'T5ForConditionalGeneration' is of no family that can be trained here: bert, gpt2"
    ):
        write_tiny_base("T5ForConditionalGeneration", [], trunk, embeds=False)


def test_what_a_trunk_links_to_is_not_copied(tmp_path: Path) -> None:
    trunk, secret = tmp_path / "trunk", tmp_path / "secret"
    trunk.mkdir()
    secret.write_text("secret")
    (trunk / "vocab.txt").symlink_to(secret)
    learned = FinetunedModel(
        base_folder=trunk,
        family="bert",
        architecture="",
        network=cast(Any, None),
        head=torch.nn.Identity(),
        labels=(),
        config_fields={},
    )
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is a link that leads out of its folder"):
        save_finetuned(learned, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_a_run_links_to_is_not_copied(tmp_path: Path) -> None:
    """A copy of a link leads where the link did, and what it leads to is not read."""
    model, secret = tmp_path / "run" / "model", tmp_path / "secret"
    model.mkdir(parents=True)
    secret.write_text("secret")
    (model / "vocab.txt").symlink_to(secret)
    commands.export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "vocab.txt").is_symlink()


def test_a_run_is_exported(runs: Path, tmp_path: Path) -> None:
    for name, file in (("bert-tags", "model/model.safetensors"), (ADAPTED, "adapter/adapter_model.safetensors")):
        command("export", runs / name, tmp_path / name)
        assert (tmp_path / name / Path(file).name).read_bytes() == (runs / name / file).read_bytes()


def test_what_was_written_does_as_well_as_what_was_told(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = read_recipe(RECIPES / "bert-tags.toml").smoke_recipe()
    monkeypatch.setattr(commands, "read_recipe", lambda _: chosen)
    monkeypatch.setitem(
        TASK_SOURCES, "brown", replace(TASK_SOURCES["brown"], read_corpus=lambda _: samples.tagged_sentences())
    )  # type: ignore[index]
    said = command("evaluate", runs / "bert-tags" / "model", RECIPES / "bert-tags.toml")
    kept = json.loads((runs / "bert-tags" / "result.json").read_text())["held_out"]
    assert said == "".join(f"{name}: {value:.4f}\n" for name, value in kept.items())
