"""Pretraining objectives: packed batches have the losses of padded ones; masking and pairing have the right shares."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.tokenizer import Tokenizer
from polyhead.training.data import vocabulary_training as vocabulary
from polyhead.training.data.examples import Example
from polyhead.training.loop import entropy
from polyhead.training.networks.named_networks import build_encoder, build_generator
from polyhead.training.networks.network_size import TransformerSize
from polyhead.training.objectives import masked
from polyhead.training.objectives.causal import CausalObjective
from polyhead.training.objectives.masked import MaskedObjective, TextPair, swap_seconds
from polyhead.training.objectives.objective import LossPart, ObjectiveTraining, measure_objective
from polyhead.training.objectives.translation import TranslationObjective

SHAPE = TransformerSize(width=16, depth=1, heads=2)
TEXTS = ["The lamp is on. The door is open.\nA window is new.", "It rains.", "No. Yes! A door is a door is a door?"]
LONG = 40


def documents(texts: list[str] = TEXTS) -> list[Example[None]]:
    return [Example(text, None, "made up", str(at)) for at, text in enumerate(texts)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("words")
    vocabulary.write_gpt_vocabulary(TEXTS, 280, folder / "generator")
    vocabulary.write_translator_vocabulary(TEXTS, 280, folder / "translator")
    vocabulary.write_bert_vocabulary(TEXTS, 60, folder / "pieces")
    return {name: Tokenizer.from_folder(folder / name) for name in ("generator", "translator", "pieces")}


def causal(tokenizers: dict[str, Tokenizer], limit: int = LONG) -> CausalObjective:
    torch.manual_seed(0)
    network, head = build_generator(SHAPE, tokenizers["generator"], limit)
    return CausalObjective(network=network, head=head, tokenizer=tokenizers["generator"], limit=limit)  # type: ignore[arg-type]


def masked_objective(tokenizers: dict[str, Tokenizer], limit: int = LONG) -> MaskedObjective:
    torch.manual_seed(0)
    network, head, follows = build_encoder(SHAPE, tokenizers["pieces"], limit)
    return MaskedObjective(network=network, head=head, next_head=follows, tokenizer=tokenizers["pieces"], limit=limit)  # type: ignore[arg-type]


# ---- vocabularies


def test_byte_level_vocabularies_decode_any_text_exactly(tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("generator", "translator"):
        for text in ("The lamp", "schöner 🙂\n\t日本", "<|endoftext|></s>"):
            assert tokenizers[name].decode(tokenizers[name].encode(text, untrusted=True).ids) == text


def test_special_tokens_have_their_roles(tokenizers: dict[str, Tokenizer]) -> None:
    end = tokenizers["generator"].token_id("<|endoftext|>")
    assert tokenizers["generator"].bos_id == tokenizers["generator"].eos_id == end
    translator = tokenizers["translator"]
    assert (translator.pad_id, translator.bos_id, translator.eos_id) == (0, 1, 2)
    assert translator.encode("on").ids[-1] == 2
    assert translator.encode("on").ids.count(2) == 1
    pieces = tokenizers["pieces"]
    assert pieces.encode(("on", "off")).pieces[0] == "[CLS]"
    assert pieces.token_id("[PAD]") == 0
    assert pieces.mask_id == 4


def test_vocabulary_training_is_deterministic(tmp_path: Path) -> None:
    texts = [*TEXTS, "ab ba cd dc ef fe gh hg " * 3, "日"]
    for name, write in (("b", vocabulary.write_gpt_vocabulary), ("w", vocabulary.write_bert_vocabulary)):
        for again in ("1", "2", "3"):
            write(texts, 290 if name == "b" else 70, tmp_path / name / again)
        for file in (tmp_path / name / "1").iterdir():
            assert len({(tmp_path / name / again / file.name).read_bytes() for again in "123"}) == 1


def test_a_rare_letter_is_not_in_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "RARE_LETTER", 20)
    vocabulary.write_bert_vocabulary(["a b " * 10 + "ä日"], 60, tmp_path)
    assert (tmp_path / "vocab.txt").read_text().split() == [*vocabulary.WORD_PIECES, "a", "b", "##a", "##b"]


# ---- causal language modelling


def test_documents_are_split_so_that_every_token_is_predicted_once(tokenizers: dict[str, Tokenizer]) -> None:
    objective = causal(tokenizers, 5)
    items, end = objective.items(documents()), tokenizers["generator"].eos_id
    predicted = [token for item in items for token in item[1:]]
    assert predicted == [token for text in TEXTS for token in [*tokenizers["generator"].encode(text).ids, end]]
    assert max(map(len, items)) == 6
    assert sum(item[0] == end for item in items) == len(TEXTS)


def test_the_loss_of_a_packed_batch_equals_that_of_a_padded_one(tokenizers: dict[str, Tokenizer]) -> None:
    """The reference: sequences padded to the longest, and the mean loss over tokens that are not padding."""
    objective = causal(tokenizers)
    items = objective.items(documents())
    part = objective.loss_parts(items, random.Random(0))["next"]
    longest = max(map(len, items)) - 1
    rows, right = torch.zeros(len(items), longest).long(), torch.full((len(items), longest), -100)
    for at, item in enumerate(items):
        rows[at, : len(item) - 1], right[at, : len(item) - 1] = torch.tensor(item[:-1]), torch.tensor(item[1:])
    logits = objective.head(objective.network(RaggedBatch.of(rows.tolist())))
    torch.testing.assert_close(part.mean_loss(), F.cross_entropy(logits, right.flatten()), rtol=0, atol=1e-6)
    assert len({len(item) for item in items}) > 1
    assert objective.counts(items) == (len(part.targets),)


def test_perplexity_does_not_depend_on_the_batches(tokenizers: dict[str, Tokenizer]) -> None:
    objective = causal(tokenizers, 8)
    items = objective.items(documents())
    one, many = (measure_objective(objective, items, tokens) for tokens in (10_000, 32))
    assert one == pytest.approx(many)
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))


def test_a_generator_learns(tokenizers: dict[str, Tokenizer]) -> None:
    objective = causal(tokenizers, 16)
    items = objective.items(documents())
    task = ObjectiveTraining(objective=objective, train=items, validation=items, tokens=200, seed=0)
    optimizer = torch.optim.AdamW({p: None for module in task.modules() for p in module.parameters()}, lr=1e-2)
    before = task.evaluate()["loss"]
    for _ in range(25):
        for batch in task.batches(0):
            task.losses(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert task.evaluate()["loss"] < before / 2


def test_smoothing_spreads_the_target() -> None:
    scores, right = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
    spread = torch.tensor([[0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]])
    expected = -(spread * scores.log_softmax(-1)).sum()
    part = LossPart(scores, (torch.eye(3), None), right, 0.1)
    torch.testing.assert_close(part.mean_loss(), expected)
    assert part.loss_and_hits()[0] == pytest.approx(-scores.log_softmax(-1)[0, 0].item())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_pieces_equals_the_loss_at_once(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, biased: bool
) -> None:
    """The reference: torch's cross-entropy of all scores at once, and its gradients."""
    monkeypatch.setattr(entropy, "CHUNK_SCORES", 3 * 7)
    torch.manual_seed(0)
    learned = [(4 * torch.randn(shape)).requires_grad_() for shape in ((8, 5), (7, 5), (7,))[: 2 + biased]]
    right = torch.randint(7, (8,))
    part = LossPart(learned[0], (learned[1], learned[2] if biased else None), right, smoothing)
    scores = F.linear(*learned)
    expected = F.cross_entropy(scores, right, label_smoothing=smoothing)
    torch.testing.assert_close(part.mean_loss(), expected, rtol=1e-6, atol=1e-6)
    found, wanted = (torch.autograd.grad(3 * loss, learned) for loss in (part.mean_loss(), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    loss, hits = part.loss_and_hits()
    assert loss == pytest.approx(F.cross_entropy(scores, right, reduction="sum").item())
    assert hits == int((scores.argmax(dim=-1) == right).sum())


def test_extreme_scores_have_a_finite_loss_and_no_scores_none() -> None:
    far = LossPart(torch.tensor([[1e4, 0.0]]), (torch.eye(2), None), torch.tensor([1]))
    assert far.mean_loss().item() == far.loss_and_hits()[0] == 1e4
    states = torch.zeros(0, 2, requires_grad=True)
    nothing = LossPart(states, (torch.eye(2), None), torch.zeros(0).long())
    nothing.mean_loss().backward()
    assert (nothing.mean_loss().item(), nothing.loss_and_hits(), states.grad is not None) == (0.0, (0.0, 0), True)


def test_products_in_bfloat16_have_the_losses_of_float32() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    right, found = torch.randint(5, (6,)), []
    for precise in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            loss = LossPart(states, (weight, None), right).mean_loss()
        found.append((loss, *torch.autograd.grad(loss, (states, weight))))
    torch.testing.assert_close(*found, rtol=0, atol=0.03)
    assert {part.dtype for part in found[1]} == {torch.float32}


# ---- masked language modelling


def test_the_masked_share_can_be_set(tokenizers: dict[str, Tokenizer]) -> None:
    objective = replace(masked_objective(tokenizers), hidden_share=0.4)
    [pair] = objective.items(documents(TEXTS[:1]))
    hidden = round(0.4 * len(pair.first)) + round(0.4 * len(pair.second))
    assert (
        len(objective.mask_pair(pair, random.Random(0)).rows)
        == hidden
        > masked_count(masked_objective(tokenizers), pair)
    )
    assert objective.counts([pair]) == (hidden, 1)


def masked_count(objective: MaskedObjective, pair: TextPair) -> int:
    return len(objective.mask_pair(pair, random.Random(0)).rows)


def test_the_output_bias_starts_from_token_frequencies(tokenizers: dict[str, Tokenizer]) -> None:
    objective = masked_objective(tokenizers)
    objective.initialise_bias([TextPair([7, 7, 7], [8]), TextPair([9], [7])])
    odds = objective.head.output.bias.detach().softmax(-1)
    assert odds[7] == pytest.approx(5 / (6 + len(odds)))
    assert odds[8] == odds[9] == pytest.approx(2 / (6 + len(odds)))
    assert odds.sum() == pytest.approx(1)


def test_masked_tokens_have_the_shares_of_bert(tokenizers: dict[str, Tokenizer]) -> None:
    objective, draw = masked_objective(tokenizers), random.Random(0)
    common = [objective.tokenizer.token_id(letter) for letter in "abd"]
    pair = TextPair([common[0], common[1]] * 100, [common[2]] * 100)  # type: ignore[list-item]
    plain = [2, *pair.first, 3, *pair.second, 3]
    outcomes: Counter[str] = Counter()
    for _ in range(100):
        masked_pair = objective.mask_pair(pair, draw)
        assert len(masked_pair.rows) == len(set(masked_pair.rows)) == 45
        assert masked_pair.targets == [plain[row] for row in masked_pair.rows]
        assert not {0, 201, 302} & set(masked_pair.rows)
        unmasked = set(range(len(plain))) - set(masked_pair.rows)
        assert all(masked_pair.tokens[row] == plain[row] for row in unmasked)
        for row in masked_pair.rows:
            outcomes[
                "mask" if masked_pair.tokens[row] == 4 else "same" if masked_pair.tokens[row] == plain[row] else "other"
            ] += 1
        assert masked_pair.segments == [0] * 202 + [1] * 101
    shares = {name: count / 4500 for name, count in outcomes.items()}
    assert shares["mask"] == pytest.approx(0.8, abs=0.03)
    assert shares["other"] == pytest.approx(0.1, abs=0.03)


def test_random_replacements_are_no_special_tokens(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "MASK_SHARE", 0.0)
    monkeypatch.setattr(masked, "RANDOM_SHARE", 1.0)
    objective, draw = masked_objective(tokenizers), random.Random(0)
    masked_pair = [objective.mask_pair(TextPair([7] * 20, [8] * 20), draw) for _ in range(50)]
    assert min(each.tokens[row] for each in masked_pair for row in each.rows) > 4


def test_half_of_the_pairs_have_a_swapped_second_text() -> None:
    items = [TextPair([at], [at, at]) for at in range(50)]
    draw = random.Random(0)
    shares = []
    for _ in range(40):
        swapped, labels = swap_seconds(items, draw)
        assert [int(pair.first[0] != pair.second[0]) for pair in swapped] == labels
        assert sorted(pair.second for pair in swapped) == [pair.second for pair in items]
        shares.append(sum(labels) / len(labels))
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.05)
    assert swap_seconds(items[:1], draw) == (items[:1], [0])


def test_pairs_are_consecutive_sentences_within_the_limit(tokenizers: dict[str, Tokenizer]) -> None:
    objective = masked_objective(tokenizers, 16)
    items = objective.items(documents())
    assert max(map(objective.size, items)) <= 16
    mixed = [TextPair(one.first, other.second) for one in items for other in items]  # any two texts may be paired
    assert max(map(objective.size, mixed)) <= 16
    tokens = [token for pair in items for token in [*pair.first, *pair.second]]
    assert tokens == [token for text in TEXTS for token in objective.tokenizer.encode(text, special=False).ids]
    assert all(pair.first and pair.second for pair in items)


def test_counts_equal_the_numbers_of_targets(tokenizers: dict[str, Tokenizer]) -> None:
    """The counts that weight batches are known before pairs are swapped at random."""
    objective = masked_objective(tokenizers, 32)
    items = objective.items(documents(TEXTS * 4))
    for seed in range(5):
        parts = objective.loss_parts(items, random.Random(seed))
        assert tuple(len(part.targets) for part in parts.values()) == objective.counts(items)
    assert measure_objective(objective, items, 200) == measure_objective(objective, items, 200)
    assert set(measure_objective(objective, items, 200)) == {"loss", "masked accuracy", "masked loss", "next accuracy"}


# ---- translations


class BagTranslator(nn.Module):
    """A minimal translator: logits depend on the mean of the source embeddings and on the token before."""

    start_token = 1

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(tokens, 8), nn.Linear(8, tokens)

    def readout(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        read = torch.stack([self.table(some).mean(0) for some in torch.split(sources.tokens, sources.lengths)])
        return self.table(targets.tokens) + read.repeat_interleave(torch.tensor(targets.lengths), 0)  # type: ignore[no-any-return]

    @property
    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        return self.out.weight, self.out.bias


def test_translations_are_trained_by_teacher_forcing(tokenizers: dict[str, Tokenizer]) -> None:
    torch.manual_seed(0)
    network = BagTranslator(tokenizers["translator"].vocab_size)
    objective = TranslationObjective(network=network, tokenizer=tokenizers["translator"], limit=20, smoothing=0.1)  # type: ignore[arg-type]
    pairs = [("on", "The lamp is on"), ("door", "A"), ("x" * 50, "too long"), ("short", "y" * 50)]
    items = objective.items([Example(ours, theirs, "", ours) for ours, theirs in pairs])
    assert len(items) == 2
    assert all(side[-1] == 2 for item in items for side in (item.source, item.target))
    part = objective.loss_parts(items, random.Random(0))["written"]
    alone = [objective.loss_parts([item], random.Random(0))["written"] for item in items]
    counts = [len(item.target) for item in items]
    assert objective.counts(items) == (sum(counts),)
    expected = sum(each.mean_loss() * count for each, count in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(part.mean_loss(), expected)
    first = network.readout(RaggedBatch.of([items[0].source]), RaggedBatch.of([[1, *items[0].target[:-1]]]))
    torch.testing.assert_close(part.states[: counts[0]], first)


def test_dropout_is_applied_in_training_only(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    shape = TransformerSize(width=16, depth=1, heads=2, dropout=0.5)
    network = build_generator(shape, tokenizers["generator"], 8)[0]
    batch = RaggedBatch.of([[1, 2, 3]])
    assert not torch.equal(network.train()(batch), network(batch))
    assert torch.equal(network.eval()(batch), network(batch))
