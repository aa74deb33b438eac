"""GPT's four input formats (Radford et al. 2018, figure 1): their tokens, losses, saved folders and answers."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2LMHeadModel

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.heads import LabelScoring, SequenceHead
from polyhead.models.network.ragged import RaggedBatch
from polyhead.training.data import samples
from polyhead.training.data.examples import Example, group_names
from polyhead.training.loop.errors import RecipeError
from polyhead.training.loop.schedule import TrainingPlan
from polyhead.training.loop.trainer import add_gradients
from polyhead.training.networks.base_model import write_tiny_base
from polyhead.training.networks.delimiter_tokens import add_delimiters
from polyhead.training.recipes import commands
from polyhead.training.recipes.finetune_run import auxiliary_losses
from polyhead.training.recipes.recipe import read_recipe
from polyhead.training.tasks import paraphrases
from polyhead.training.tasks.auxiliary import LanguageModelLoss, special_tokens
from polyhead.training.tasks.choice_task import ChoiceTask
from polyhead.training.tasks.label_task import LabelTask
from polyhead.training.tasks.pair_task import PairItem
from polyhead.training.tasks.similarity_task import SimilarityTask
from polyhead.training.tasks.task import TaskTraining, score_batch
from polyhead.training.tasks.text_reader import TextReader
from tests.support.processes import Process

RECIPES = Path(commands.__file__).parent
NAMES = ("classify", "entail", "similar", "choose")
ONE, OTHER = (
    ["The lamp is on.", "A window is off tonight", "here"],
    ["Each sensor", "is open.", "The door is new again."],
)


def randomise_weights(folder: Path) -> None:
    """Replaces the weights of a folder by large random ones, so that answers differ."""
    torch.manual_seed(3)
    file = folder / "model.safetensors"
    wide = {name: each.normal_(std=0.25) if each.dim() > 1 else each for name, each in load_file(file).items()}
    save_file(wide, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like that of the recipe gpt.toml, with random weights."""
    folder = tmp_path_factory.mktemp("trunk")
    write_tiny_base("GPT2ForSequenceClassification", samples.labelled_sentences().examples, folder, embeds=False)
    randomise_weights(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Smoke runs of the recipes, with random weights."""
    root, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    for name in NAMES:
        commands.train(RECIPES / f"gpt-{name}.toml", root / name, smoke=True)
        randomise_weights(root / name / "model")
    torch.set_num_threads(threads)
    return {name: root / name / "model" for name in NAMES}


@torch.no_grad()
def logits(folder: Path, first: list[str], second: list[str] | None = None) -> torch.Tensor:
    """Logits by the tokenizer, padding and network of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found: torch.Tensor = network(**tokenizer(first, second, padding=True, return_tensors="pt")).logits
    return found


# ---- input formats


@pytest.mark.parametrize("name", ["classify", "entail"])
def test_ablation_recipes_differ_in_one_setting_only(name: str) -> None:
    chosen, fresh, alone = (read_recipe(RECIPES / f"gpt-{name}{how}.toml") for how in ("", "-fresh", "-alone"))
    assert chosen.auxiliary == 0.5
    assert chosen.trunk.delimited
    assert fresh == replace(chosen, trunk=replace(chosen.trunk, fresh=True))
    assert alone == replace(chosen, auxiliary=0.0)


def test_texts_and_pairs_are_delimited_by_three_tokens(trunk: Path, tmp_path: Path) -> None:
    out = add_delimiters(trunk, tmp_path, 0)
    ours, theirs, plain = load(str(out)).tokenizer, AutoTokenizer.from_pretrained(out), load(str(trunk)).tokenizer
    start, delim, extract = map(ours.token_id, ("[START]", "[DELIM]", "[EXTRACT]"))
    one, other = plain.encode("The lamp is on.").ids, plain.encode(" a door\n").ids
    assert ours.encode("The lamp is on.").ids == [start, *one, extract] == theirs("The lamp is on.").input_ids
    [pair] = ours.encode_batch([("The lamp is on.", " a door\n")])
    assert pair.ids == [start, *one, delim, *other, extract] == theirs("The lamp is on.", " a door\n").input_ids
    assert set(pair.segments) == {0}
    assert len({start, delim, extract, *one, *other}) == 3 + len({*one, *other})


def test_new_tokens_have_new_embeddings_and_old_ones_are_kept(trunk: Path, tmp_path: Path) -> None:
    before = load(str(trunk))
    known = before.network.tokens.weight
    same, again, another = (
        load(str(add_delimiters(trunk, tmp_path / name, seed))).network.tokens.weight
        for name, seed in (("same", 0), ("again", 0), ("another", 1))
    )
    assert len(same) == before.tokenizer.vocab_size + 3
    assert torch.equal(same[: len(known)], known)
    assert torch.equal(same, again)
    assert all(not torch.equal(mine, theirs) for mine, theirs in zip(same[-3:], another[-3:], strict=True))


def test_a_base_model_that_already_adds_special_tokens_is_refused(
    trunk: Path, tiny_embedder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"trunk\.delimited: .* is not a GPT2LMHeadModel"):
        add_delimiters(tiny_embedder, tmp_path, 0)
    with pytest.raises(RecipeError, match=r"trunk\.delimited: .* already puts tokens around texts"):
        add_delimiters(add_delimiters(trunk, tmp_path / "once", 0), tmp_path / "twice", 0)


# ---- losses


@pytest.fixture
def task(trunk: Path, tmp_path: Path) -> TaskTraining[Any]:
    loaded = load(str(add_delimiters(trunk, tmp_path / "delimited", 0)))
    torch.manual_seed(5)
    label_task, read = LabelTask(("a", "b")), TextReader(loaded.tokenizer, 64, may_truncate=False)
    texts = [*ONE, *zip(ONE, OTHER, strict=True)]
    items = label_task.items([Example(text, row % 2, "", str(row)) for row, text in enumerate(texts)], read)
    head = SequenceHead(loaded.config, 2, LabelScoring(pooling="last", activation="none", bias=False), "softmax")
    return TaskTraining(
        task=label_task,
        network=loaded.network,
        head=head,
        reader=read,
        train=items,
        validation=items,
        batch=6,
        seed=0,
        auxiliary=(LanguageModelLoss(0.5, special_tokens(loaded.tokenizer)),),
    )


def test_half_of_the_language_model_loss_is_added(task: TaskTraining[Any], tmp_path: Path) -> None:
    """L3 = L2 + 0.5 L1, computed with the network of transformers. L1 is a mean over the tokens of the texts."""
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "delimited").eval()
    weight, new = task.head.out.weight, set(task.reader.tokenizer.encode_batch([("", "")])[0].ids)  # type: ignore[union-attr]
    label_losses, token_losses = [], []
    with torch.no_grad():
        for item in task.train:
            ids = item.encoded.tokens
            out = theirs(torch.tensor([ids]), output_hidden_states=True)
            label_losses.append(-(out.hidden_states[-1][0, -1] @ weight.T).log_softmax(0)[item.label])
            odds = out.logits[0].log_softmax(-1)
            token_losses += [-odds[row, token] for row, token in enumerate(ids[1:]) if token not in new]
    l2, l1 = torch.stack(label_losses).mean(), torch.stack(token_losses).mean()
    [batch] = task.batches(0)
    assert task.counts(batch) == (6, len(token_losses))
    assert len(new) == 3
    assert len(token_losses) == sum(len(item.encoded.tokens) for item in task.train) - 3 * 2 - 3 * 3
    torch.testing.assert_close(task.losses(batch).detach(), torch.stack([l2, 0.5 * l1]), rtol=0, atol=1e-5)
    assert add_gradients(task, TrainingPlan(epochs=1, rate=1e-3), [batch]) == pytest.approx(
        float(l2 + 0.5 * l1), abs=1e-5
    )


def test_an_accumulated_step_has_the_same_loss_and_gradients(task: TaskTraining[Any]) -> None:
    plan, [batch] = TrainingPlan(epochs=1, rate=1e-3), task.batches(0)
    loss = add_gradients(task, plan, [batch])
    gradients = [each.grad.clone() for each in task.network.parameters() if each.grad is not None]
    task.network.zero_grad(), task.head.zero_grad()
    parts = [task.task.pack(some, task.reader, learning=True) for some in (task.train[:1], task.train[1:])]
    assert add_gradients(task, plan, parts) == pytest.approx(loss, abs=1e-5)
    again = [each.grad for each in task.network.parameters() if each.grad is not None]
    for mine, theirs in zip(again, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_only_a_generator_has_a_language_model_loss(tiny_embedder: Path) -> None:
    chosen = read_recipe(RECIPES / "gpt-classify.toml")
    with pytest.raises(RecipeError, match=r"auxiliary: .* only generators can predict the next one"):
        auxiliary_losses(chosen, load(str(tiny_embedder)))


# ---- both orders


@torch.no_grad()
def test_a_pair_is_scored_by_the_sum_of_states_of_both_orders(runs: dict[str, Path]) -> None:
    loaded = load(str(runs["similar"]))
    similarity, read = SimilarityTask(("different", "same")), TextReader(loaded.tokenizer, 64, may_truncate=False)
    forward = [Example(pair, 1, "", "") for pair in zip(ONE, OTHER, strict=True)]
    backward = [Example((second, first), 1, "", "") for first, second in zip(ONE, OTHER, strict=True)]
    found = [
        score_batch(loaded.network, loaded.head, similarity.pack(similarity.items(some, read), read, learning=False))
        for some in (forward, backward)
    ]
    assert torch.equal(*found)
    orders = [[(each.text) for each in some] for some in (forward, backward)]
    states = [
        torch.stack([loaded.network(RaggedBatch.of([text.tokens]))[-1] for text in read(texts)]) for texts in orders
    ]
    expected = F.linear(states[0] + states[1], loaded.head.out.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)
    assert float((found[0] - 2 * F.linear(states[0], loaded.head.out.weight)).abs().max()) > 0.01  # type: ignore[arg-type]


def test_the_field_both_orders_is_checked(runs: dict[str, Path], tmp_path: Path) -> None:
    assert [load(str(runs[name])).both_orders for name in NAMES] == [False, False, True, False]
    config = json.loads((runs["similar"] / "config.json").read_text())
    for said, error, message in (
        ({"both_orders": "yes"}, CheckpointError, "both_orders is 'yes', which should be true or false"),
        ({"problem_type": "multi_label_classification"}, UnsupportedError, "both_orders .* this head has sigmoid"),
    ):
        folder = tmp_path / str(len(said) + len(message))
        shutil.copytree(runs["similar"], folder)
        (folder / "config.json").write_text(json.dumps({**config, **said}))
        with pytest.raises(error, match=message):
            load(str(folder))


def test_adapters_do_not_support_both_orders(tmp_path: Path) -> None:
    text = (RECIPES / "gpt-similar.toml").read_text().replace("dropout = 0.1", "").replace("fresh = false", "")
    (tmp_path / "x.toml").write_text(text + '\n[lora]\nrank = 2\nalpha = 4.0\ntargets = ["mlp.up"]\n')
    with pytest.raises(RecipeError, match="lora: an adapter has no field for how paraphrases are read"):
        read_recipe(tmp_path / "x.toml")


# ---- saved folders


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_transformers_reads_the_same_scores(name: str, runs: dict[str, Path]) -> None:
    """With its own tokenizer, for texts in a padded batch."""
    loaded = load(str(runs[name]))
    ids = [each.ids for each in loaded.tokenizer.encode_batch([*zip(ONE, OTHER, strict=True)])]
    batch = RaggedBatch.of(ids)
    mine = loaded.head(loaded.network(batch), batch.starts)
    torch.testing.assert_close(mine, logits(runs[name], ONE, OTHER), rtol=0, atol=1e-5)
    assert loaded.task == ("rank" if name == "choose" else "classify")


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Process]:
    process = Process(*(f"{name}={runs[name]}" for name in NAMES))
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def post(server: Process, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_served_scores_equal_the_trained_network(server: Process, runs: dict[str, Path]) -> None:
    """Clients send plain texts and pairs; the tokenizer adds the special tokens."""
    alone = post(server, "models/classify/predict", inputs=[[text] for text in ONE])
    pairs = post(server, "models/entail/predict", inputs=[list(pair) for pair in zip(ONE, OTHER, strict=True)])
    expected = (logits(runs["classify"], ONE), logits(runs["entail"], ONE, OTHER))
    for found, raw in zip((alone, pairs), expected, strict=True):
        for row, odds in zip(found, raw.softmax(-1), strict=True):
            assert [each["score"] for each in row] == pytest.approx(sorted(odds.tolist(), reverse=True), abs=1e-4)
    ranked = post(server, "models/choose/rerank", query=ONE[0], texts=OTHER, raw_scores=True)
    raw = logits(runs["choose"], [ONE[0]] * 3, OTHER)[:, 0].tolist()
    assert {each["index"]: each["score"] for each in ranked} == pytest.approx(dict(enumerate(raw)), abs=1e-4)


def test_the_order_of_a_pair_changes_no_score(server: Process, runs: dict[str, Path]) -> None:
    forward, backward = ([list(pair) for pair in zip(*both, strict=True)] for both in ((ONE, OTHER), (OTHER, ONE)))
    raw = logits(runs["similar"], ONE, OTHER) + logits(runs["similar"], OTHER, ONE)
    for closed, expected in ((False, raw.softmax(-1)), (True, raw)):
        found, other = (
            post(server, "models/similar/predict", inputs=some, raw_scores=closed) for some in (forward, backward)
        )
        assert found == other
        said = [{each["label"]: each["score"] for each in row} for row in found]
        labels = load(str(runs["similar"])).labels
        for mine, theirs in zip(said, expected.tolist(), strict=True):
            assert mine == pytest.approx(dict(zip(labels, theirs, strict=True)), abs=1e-4)
    one = post(server, "models/similar", inputs={"text": ONE[0], "text_pair": OTHER[0]})
    assert post(server, "models/similar", inputs={"text": OTHER[0], "text_pair": ONE[0]}) == one


def test_a_single_text_is_refused_by_a_pair_model(server: Process) -> None:
    answer = httpx.post(f"{server.url}/models/similar/predict", json={"inputs": "a lamp"}, timeout=60)
    assert answer.status_code == 422
    assert "inputs: must be a pair of texts, similar compares them in both orders" in answer.text


# ---- training data


def test_sentences_with_a_common_translation_are_paraphrases() -> None:
    translated = [
        ("Heat up", "Aufwärmen"),
        ("Reheat!", "aufwärmen"),
        ("heat up!", "Wärmen"),
        ("Heat meter", "Wärmezähler"),
        ("Heat pump", "Wärmepumpe"),
        ("Cool down", "Abkühlen"),
    ]
    corpus = paraphrases.pair_sentences([Example(ours, theirs, "en-de", ours) for ours, theirs in translated])
    same, other = ([each for each in corpus.examples if each.label == label] for label in (1, 0))
    assert corpus.labels == ("different", "same")
    assert [each.text for each in same] == [("Heat up", "Reheat!")]
    assert len(other) == 1
    assert other[0].text[0] == "Heat up"
    assert other[0].text[1] in {"Heat meter", "Heat pump"}
    assert len(set(group_names(corpus.examples, corpus.group_similar))) == 1, (
        "pairs with a common sentence are one group"
    )


def test_negative_pairs_share_as_many_words() -> None:
    near = {"red lamp on": 2 / 4, "lamp": 1 / 3, "red lamp near": 2 / 4, "door": 0.0}
    assert {text: paraphrases.jaccard_overlap("red lamp out", text) for text in near} == pytest.approx(near)
    meanings = {"red lamp off": ("aus",), "red lamp out": ("aus",), "red lamp on": ("an",), "lamp": ("lampe",)}
    [(one, other)] = paraphrases.other_meaning_pairs(meanings, paraphrases.same_meaning_pairs(meanings))
    assert (one, other) == ("red lamp off", "red lamp on")


def test_the_baseline_is_word_overlap(trunk: Path) -> None:
    read = TextReader(load(str(trunk)).tokenizer, 64, may_truncate=False)
    pairs = [("the lamp", "the lamp"), ("the lamp", "lamp the"), ("the lamp", "a door"), ("a door", "here")]
    similarity = SimilarityTask(("different", "same"))
    items = similarity.items([Example(pair, int(row < 2), "", str(row)) for row, pair in enumerate(pairs)], read)
    found = similarity.baselines(items, items[1:], lambda _: torch.zeros(0))
    assert found == {"majority": pytest.approx(1 / 3), "words in common": 1.0}


def test_baselines_of_multiple_choice() -> None:
    items = [PairItem("a red lamp", ("a red lamp here", "a door", "x", "y"), is_truncated=False)]
    items += [PairItem("a red lamp", ("a door", "a red lamp here", "x", "y"), is_truncated=False)] * 2
    choices = ChoiceTask()
    said = torch.tensor([[2.0, 1, 1, 1], [1.0, 0, 0, 1], [0.0, 1, 0, 0]])
    assert choices.figures(items, said) == {"accuracy": pytest.approx(1 / 3)}
    found = choices.baselines(items, items, lambda _: torch.zeros(0))
    assert found == {"by lot": 0.25, "words in common": pytest.approx(1 / 3)}
