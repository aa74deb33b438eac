"""Fully finetuned base models, and recipes in their smoke form: transformers loads their folders with equal outputs."""

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
from tests.families.conformance import save_checkpoint
from tests.families.test_encoders import ROWS
from tests.support.recipes import RECIPES, command, finetuned, tried

WHOLE = sorted(path.stem for path in RECIPES.glob("*.toml") if '\nrun = "bert"' in path.read_text())
ADAPTED = "spam"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smoke runs of every recipe that trains all weights, and of one that trains an adapter."""
    return tried([*WHOLE, ADAPTED], tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", WHOLE)
def test_transformers_loads_the_finetuned_folder(name: str, runs: Path) -> None:
    folder = runs / name / "model"
    ours, architecture = load(str(folder)), json.loads((folder / "config.json").read_text())["architectures"][0]
    theirs = getattr(tf, architecture).from_pretrained(folder).eval()
    encoded = ours.tokenizer.encode(("the lamp is on", "a door is off"))
    batch = RaggedBatch.of([encoded.ids], [encoded.segments])
    with torch.no_grad():
        ours_out = ours.head(ours.network(batch), batch.starts)
        theirs_out = theirs(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segments]))
    logits = (
        theirs_out.logits
        if "logits" in theirs_out
        else torch.stack([theirs_out.start_logits, theirs_out.end_logits], dim=-1)
    )
    torch.testing.assert_close(ours_out, logits.reshape(ours_out.shape), rtol=0, atol=1e-5)
    if ours.task != "span":
        assert tuple(theirs.config.id2label.values()) == ours.labels


def test_a_generator_is_finetuned_as_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2: its matrices are saved transposed, and the state of the last token is scored."""
    chosen = read_recipe(RECIPES / "bert-single.toml")
    chosen = replace(chosen, architecture="GPT2ForSequenceClassification")
    monkeypatch.setattr(commands, "read_recipe", lambda _: chosen)
    commands.train(tmp_path / "gpt.toml", tmp_path, smoke=True)
    ours = load(str(tmp_path / "model"))
    theirs = tf.GPT2ForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    ids = ours.tokenizer.encode("The lamp is on").ids
    with torch.no_grad():
        ours_out = ours.head(ours.network(RaggedBatch.of([ids])), [0, len(ids)])
        torch.testing.assert_close(ours_out, theirs(torch.tensor([ids])).logits, rtol=0, atol=1e-5)


def test_a_run_writes_all_its_files(runs: Path) -> None:
    for name in [*WHOLE, ADAPTED]:
        result = json.loads((runs / name / "result.json").read_text())
        kind = "adapter" if name == ADAPTED else "model"
        assert result[kind] == kind
        assert result["bytes"] == sum(file.stat().st_size for file in (runs / name / kind).glob("*.safetensors"))
        assert result["held_out"]["loss"] > 0


def test_an_interrupted_run_is_resumed(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run that is resumed writes the same bytes as an uninterrupted one, also for an adapter."""
    losses = TaskTraining.losses
    for name, made in (("bert-tags", "model/model.safetensors"), (ADAPTED, "adapter/adapter_model.safetensors")):
        left = iter([True, True, True, False])

        def interrupt(self: Any, batch: Any, left: Any = left) -> torch.Tensor:
            if not next(left, True):
                raise KeyboardInterrupt
            return losses(self, batch)

        monkeypatch.setattr(TaskTraining, "losses", interrupt)
        with pytest.raises(KeyboardInterrupt):
            commands.train(RECIPES / f"{name}.toml", tmp_path / name, smoke=True)
        assert not (tmp_path / name / made).exists()
        commands.train(RECIPES / f"{name}.toml", tmp_path / name, smoke=True, resume=True)
        assert (tmp_path / name / made).read_bytes() == (runs / name / made).read_bytes()


def test_a_tiny_network_learns_to_find_answers(trunk: Path, tmp_path: Path) -> None:
    """Each sentence has two questions, so the answer depends on the question."""
    chosen = read_recipe(RECIPES / "bert-span.toml").smoke_recipe()
    chosen = replace(chosen, dropout=0.0, plan=TrainingPlan(epochs=12, rate=1e-2))
    corpus = samples.span_questions()
    result = finetuned(chosen, trunk, split_corpus(chosen.data, corpus), corpus, tmp_path)
    assert result["held_out"]["exact"] > 0.9
    assert set(result["held_out"]) == {"loss", "exact", "F1", "how", "when"}


# ---- base models


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the recipe bert.toml."""
    folder = tmp_path_factory.mktemp("trunks") / "bert" / "model"
    write_tiny_base("BertForTokenClassification", samples.labelled_sentences().examples, folder, embeds=False)
    return folder


def initial_weights(trunk: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    chosen = read_recipe(RECIPES / "bert-single.toml")
    chosen = replace(chosen, trunk=replace(chosen.trunk, **changes))
    network, head, _ = build_modules(chosen, load(str(trunk)), TASK_SOURCES["topics"].create_task(("a", "b")), 2)
    return network.state_dict(), head.state_dict()


def test_it_starts_from_pretrained_weights_unless_fresh(trunk: Path) -> None:
    """The layer before the classifier is the pooler of next-sentence prediction."""
    pretrained = load_file(trunk / "model.safetensors")
    network, head = initial_weights(trunk)
    assert network["tokens.weight"].equal(pretrained["bert.embeddings.word_embeddings.weight"])
    assert head["dense.weight"].equal(pretrained["bert.pooler.dense.weight"])
    assert not head["out.bias"].any()
    again, other = initial_weights(trunk, fresh=True)
    assert not torch.isclose(again["tokens.weight"], network["tokens.weight"]).all()
    assert again["tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not other["dense.weight"].equal(head["dense.weight"])
    assert again.keys() == network.keys()


def test_the_base_model_is_the_result_of_another_run(trunk: Path, tmp_path: Path) -> None:
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


def test_an_architecture_that_cannot_be_saved_is_refused_before_training(trunk: Path) -> None:
    chosen = replace(read_recipe(RECIPES / "bert-single.toml"), architecture="BertForNextSentencePrediction")
    with pytest.raises(RecipeError, match=r"'BertForNextSentencePrediction' of family 'bert' can be adapted with lora"):
        build_modules(chosen, load(str(trunk)), TASK_SOURCES["topics"].create_task(("a", "b")), 2)
    with pytest.raises(
        RecipeError, match="'T5ForConditionalGeneration' is of no family that can be trained here: bert, gpt2"
    ):
        write_tiny_base("T5ForConditionalGeneration", [], trunk, embeds=False)


def test_a_head_with_other_global_tokens_than_its_base_is_refused(tmp_path: Path) -> None:
    """It would be trained on states that it is not served with."""
    chosen = replace(read_recipe(RECIPES / "bert-single.toml"), architecture="LongformerForSequenceClassification")
    base = load(str(save_checkpoint(ROWS["LongformerModel"], tmp_path)))
    with pytest.raises(RecipeError, match=r"architecture: .* reads attention with other global tokens than"):
        build_modules(chosen, base, TASK_SOURCES["topics"].create_task(("a", "b")), 2)


def test_links_of_the_base_model_are_not_copied(tmp_path: Path) -> None:
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


def test_links_of_a_run_are_not_copied(tmp_path: Path) -> None:
    model, secret = tmp_path / "run" / "model", tmp_path / "secret"
    model.mkdir(parents=True)
    secret.write_text("secret")
    (model / "vocab.txt").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is a link that leads out of its folder"):
        commands.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_exported(runs: Path, tmp_path: Path) -> None:
    for name, file in (("bert-tags", "model/model.safetensors"), (ADAPTED, "adapter/adapter_model.safetensors")):
        command("export", runs / name, tmp_path / name)
        assert (tmp_path / name / Path(file).name).read_bytes() == (runs / name / file).read_bytes()


def test_evaluating_the_saved_folder_gives_the_reported_figures(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = read_recipe(RECIPES / "bert-tags.toml").smoke_recipe()
    monkeypatch.setattr(commands, "read_recipe", lambda _: chosen)
    monkeypatch.setitem(
        TASK_SOURCES, "brown", replace(TASK_SOURCES["brown"], read_corpus=lambda _: samples.tagged_sentences())
    )  # type: ignore[index]
    reported = command("evaluate", runs / "bert-tags" / "model", RECIPES / "bert-tags.toml")
    kept = json.loads((runs / "bert-tags" / "result.json").read_text())["held_out"]
    assert reported == "".join(f"{name}: {value:.4f}\n" for name, value in kept.items())
