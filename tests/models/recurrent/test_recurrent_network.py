"""Recurrent encoder-decoders equal the formulas of their papers, alone and in a batch, by steps and in one pass."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import EncodingError, ModelError
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator, fit_hidden_width
from polyhead.models.seq2seq.protocol import Seq2Seq
from tests.support.recurrent_formulas import formulas

VOCABULARY = 11
TINY = RecurrentConfig(vocab_size=VOCABULARY, width=6, hidden=8, start=0, end=1, pad=2)
LSTM = {"cell": "lstm", "depth": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "gru": {},
    "lstm, two layers": LSTM,
    "gru, last token first": {"bidirectional": False, "reversed_source": True},
    "lstm, one direction": {"bidirectional": False, "cell": "lstm"},
    "bahdanau": {"attention": "bahdanau"},
    "bahdanau, lstm, two layers": {"attention": "bahdanau", **LSTM},
    "bahdanau, last token first": {"attention": "bahdanau", "bidirectional": False, "reversed_source": True},
    "luong, dot, tied": {"attention": "luong", "score": "dot", "tied": True},
    "luong, general, lstm": {"attention": "luong", "score": "general", **LSTM},
    "luong, concat, last token first": {"attention": "luong", "bidirectional": False, "reversed_source": True},
    "luong, dot, local-m": {"attention": "luong", "score": "dot", "reach": "local-m", "window": 1},
    "luong, general, local-p": {"attention": "luong", "score": "general", "reach": "local-p", "window": 2},
    "luong, concat, fed": {"attention": "luong", "input_feeding": True},
    "luong, general, local-p, fed": {
        "attention": "luong", "score": "general", "reach": "local-p", "window": 2, "input_feeding": True, **LSTM,
    },
}  # fmt: skip
SOURCES = [[3, 4, 5], [7, 8, 9, 10, 3, 4, 5, 6, 7], [6], [5, 5, 4, 9]]
TARGETS = [[0, 10, 7, 7, 6], [0, 9, 3, 3], [0, 3, 9, 4, 5, 3, 8], [0]]
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def random_network(changes: dict[str, Any]) -> RecurrentTranslator:
    """A network in float64 with weights larger than initial ones, so that every term of a sum has an effect."""
    torch.manual_seed(5)
    network = RecurrentTranslator(replace(TINY, **changes)).double().eval()
    for parameter in network.parameters():
        parameter.data.normal_(std=0.5)
    return network


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-9)


def run_steps(network: Seq2Seq, state: Any, columns: Sequence[Sequence[int]]) -> tuple[list[Tensor], Any]:
    """Logits [N, V] after each column of tokens, and the last state."""
    found = []
    for column in columns:
        logits, state = network.step(torch.tensor(column), state)
        found.append(logits)
    return found, state


@every_variant
def test_logits_equal_the_formulas(variant: dict[str, Any]) -> None:
    network = random_network(variant)
    wanted = torch.cat([formulas(network, source, target)[0] for source, target in zip(SOURCES, TARGETS, strict=True)])
    assert close(network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)), wanted)
    assert wanted.std(dim=0).min() > 1e-3


@every_variant
def test_attention_weights_equal_the_formulas(variant: dict[str, Any]) -> None:
    network = random_network(variant)
    state = network.initial_state(RaggedBatch.of(SOURCES))
    columns = [(0, 0, 0, 0), (3, 8, 5, 1), (9, 9, 9, 3)]
    for time in range(len(columns)):
        _, state = network.step(torch.tensor(columns[time]), state)
        weights = network.attention_weights(state)
        wanted = [
            formulas(network, source, [column[n] for column in columns[: time + 1]])[1]
            for n, source in enumerate(SOURCES)
        ]
        assert [steps[-1].numel() for steps in wanted if steps] == [weight.numel() for weight in weights]
        assert all(close(weight, steps[-1]) for weight, steps in zip(weights, wanted, strict=False))
    assert bool(weights) == ("attention" in variant)


@every_variant
def test_steps_equal_teacher_forcing(variant: dict[str, Any]) -> None:
    network = random_network(variant)
    trained = network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).split([len(target) for target in TARGETS])
    longest = max(map(len, TARGETS))
    columns = list(zip(*[target + [0] * (longest - len(target)) for target in TARGETS], strict=True))
    steps, _ = run_steps(network, network.initial_state(RaggedBatch.of(SOURCES)), columns)
    for n, wanted in enumerate(trained):
        assert close(torch.stack([logits[n] for logits in steps[: len(wanted)]]), wanted)


@every_variant
def test_the_batch_changes_nothing(variant: dict[str, Any]) -> None:
    """Other sequences join, leave and are duplicated while one is generated."""
    network = random_network(variant)
    each_alone = [
        run_steps(network, network.initial_state(RaggedBatch.of([source])), [(0,), (3,), (9,), (4,)])[0]
        for source in SOURCES
    ]
    _, early = run_steps(network, network.initial_state(RaggedBatch.of(SOURCES[:2])), [(0, 0), (3, 3)])
    state = network.join_states([early, network.initial_state(RaggedBatch.of(SOURCES[2:]))])
    (logits,), state = run_steps(network, state, [(9, 9, 0, 0)])
    assert all(close(logits[n], each_alone[n][time][0]) for n, time in ((0, 2), (1, 2), (2, 0), (3, 0)))
    (logits,), state = run_steps(network, network.select_rows(state, torch.tensor([3, 1, 3])), [(3, 4, 3)])
    assert all(close(logits[row], each_alone[n][time][0]) for row, (n, time) in enumerate(((3, 1), (1, 3), (3, 1))))
    assert [len(weights) for weights in network.attention_weights(state)] in ([], [4, 9, 4])
    apart = [network.select_rows(state, torch.tensor([row])) for row in (2, 1)]
    together = network.attention_weights(network.join_states(apart))
    assert all(map(close, together, [network.attention_weights(each)[0] for each in apart[: len(together)]]))
    (logits,), _ = run_steps(network, apart[0], [(9,)])
    assert close(logits, each_alone[3][2])


@every_variant
def test_every_parameter_has_a_gradient(variant: dict[str, Any]) -> None:
    network = random_network(variant).train()
    network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).square().sum().backward()
    used = {*range(VOCABULARY)} - {1, 2}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        rows = parameter.grad[sorted(used)] if name == "tokens.weight" else parameter.grad
        assert rows.flatten(1 if rows.dim() > 1 else 0).abs().amax() > 0, name


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("direction", [{}, {"bidirectional": False}, {"bidirectional": False, "reversed_source": True}])
def test_the_encoder_equals_torch_on_each_sequence(cell: str, direction: dict[str, Any]) -> None:
    network = random_network({"cell": cell, "depth": 2, **direction})
    x = torch.randn(sum(map(len, SOURCES)), TINY.width).double()
    annotations, last = network.encoder(x, [len(source) for source in SOURCES])
    backwards = direction.get("reversed_source", False)
    for n, (rows, found) in enumerate(
        zip(*(part.split([len(source) for source in SOURCES]) for part in (x, annotations)), strict=True)
    ):
        out, memory = network.encoder.layers(rows.flip(0) if backwards else rows)
        assert close(found, out.flip(0) if backwards else out)
        expected = torch.stack(memory) if cell == "lstm" else memory[None]
        assert close(last[:, :, :, n].flatten(1, 2), expected)


@pytest.mark.parametrize("reach", ["local-m", "local-p"])
def test_local_attention_is_limited_to_its_window(reach: str) -> None:
    """For sources longer and shorter than the window. After the end of a short source, local-m attends to nothing."""
    network = random_network({"attention": "luong", "score": "dot", "reach": reach, "window": 2})
    state = network.initial_state(RaggedBatch.of([[3, 4, 5] * 3, [4] * 2, [5] * 5]))
    for time in range(9):
        _, state = network.step(torch.tensor([time, 3, 4]), state)
        centres = [float(time)] * 3
        if reach == "local-p":
            centres = network.decoder.looking.reach.centre(state.memory[0, -1, :, None], state.source.mask).tolist()
        for weights, centre in zip(
            network.attention_weights(state), torch.tensor(centres).flatten().tolist(), strict=True
        ):
            seen = [s for s in range(len(weights)) if abs(s - centre) <= 2]
            assert weights.nonzero().flatten().tolist() == seen
            total = weights.sum().item()
            assert total == pytest.approx(1.0 if seen else 0.0) if reach == "local-m" else 0 < total < 1


@pytest.mark.parametrize(("drive", "wanted"), [(-9.0, [0, 1]), (0.0, [3, 4, 5]), (9.0, [7])])
def test_a_predicted_position_may_be_anywhere_in_the_source(drive: float, wanted: list[int]) -> None:
    network = random_network({"attention": "luong", "score": "dot", "reach": "local-p", "window": 1})
    reach = network.decoder.looking.reach
    query = torch.ones(1, 1, TINY.hidden).double()
    torch.nn.init.constant_(reach.inner.weight, 1.0)
    torch.nn.init.constant_(reach.out.weight, drive / TINY.hidden)
    mask, scores = torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, 1, 8).double()
    weights = reach(scores, query, mask, torch.zeros(1, 1))
    assert weights[0, 0].nonzero().flatten().tolist() == wanted


LETTERS = range(3, 13)


def trained(changes: dict[str, Any], steps: int) -> RecurrentTranslator:
    """A network trained to reverse words of 4 to 8 letters."""
    torch.manual_seed(1)
    draw = random.Random(1)
    network = RecurrentTranslator(replace(TINY, vocab_size=13, width=16, hidden=32, **changes))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        sources = [draw.choices(LETTERS, k=draw.randint(4, 8)) for _ in range(32)]
        given = RaggedBatch.of([[TINY.start, *reversed(source)] for source in sources])
        right = torch.tensor([token for source in sources for token in [*reversed(source), TINY.end]])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(RaggedBatch.of(sources), given), right).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def greedy_answers(network: Seq2Seq, sources: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers, up to the end token."""
    state, column, columns = (
        network.initial_state(RaggedBatch.of(sources)),
        torch.full((len(sources),), network.start_token),
        [],
    )
    for _ in range(max_tokens):
        logits, state = network.step(column, state)
        column = logits.argmax(dim=-1)
        columns.append(column.tolist())
    return [list(takewhile(lambda token: token != TINY.end, row)) for row in zip(*columns, strict=True)]


def test_with_attention_longer_words_are_learned_than_without() -> None:
    """Reversing eight letters after few steps: with attention most letters are right, without it about chance."""
    words = [random.Random(seed).choices(LETTERS, k=8) for seed in range(64)]
    shares = []
    for changes in ({}, {"attention": "bahdanau"}, {"attention": "luong", "score": "general"}):
        answers = greedy_answers(trained(changes, 100), words, 10)
        pairs = [
            pair for word, answer in zip(words, answers, strict=True) for pair in zip(word[::-1], answer, strict=False)
        ]
        shares.append(sum(wanted == letter for wanted, letter in pairs) / sum(map(len, words)))
    without_attention, *with_attention = shares
    assert without_attention < 0.4
    assert min(with_attention) > 0.6


@pytest.mark.parametrize(("sources", "targets"), [([[3], []], [[0], [0]]), ([[3]], [[]]), ([], [])])
def test_a_sequence_without_a_token_is_refused(sources: list[list[int]], targets: list[list[int]]) -> None:
    with pytest.raises(EncodingError, match="no token"):
        random_network({})(RaggedBatch.of(sources), RaggedBatch.of(targets))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "rnn"}, "cell is 'rnn', which should be one of gru, lstm"),
        ({"attention": "self"}, "one of none, bahdanau, luong"),
        ({"score": "dot"}, "score is 'dot', which should be 'concat' where attention is 'none'"),
        ({"reach": "local-m", "attention": "bahdanau"}, "should be 'global' where attention is 'bahdanau'"),
        ({"input_feeding": True, "attention": "bahdanau"}, "input_feeding is True, which should be False"),
        ({"hidden": 7}, "hidden is 7, which should be even"),
        ({"reversed_source": True}, "false if both directions are read"),
        ({"depth": 0}, "depth is 0, which should be a whole number from 1 to"),
        ({"width": True}, "width is True"),
        ({"tied": 1}, "tied is 1, which should be true or false"),
        ({"end": VOCABULARY}, "end is 11, which should be a token below 11"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": "some"}, "dropout is 'some'"),
    ],
)
def test_invalid_configurations_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(TINY, **changes)


@every_variant
def test_a_budget_of_parameters_is_met(variant: dict[str, Any]) -> None:
    config = replace(TINY, **variant)
    before = torch.random.get_rng_state()
    found = fit_hidden_width(config, 30_000)
    assert torch.equal(before, torch.random.get_rng_state())
    assert replace(found, hidden=config.hidden) == config
    count = sum(parameter.numel() for parameter in RecurrentTranslator(found).parameters())
    assert abs(count - 30_000) <= 3_000


def test_a_budget_below_the_smallest_network_is_refused() -> None:
    with pytest.raises(ModelError, match="100 parameters cannot be reached by this network: the nearest has"):
        fit_hidden_width(TINY, 100)


@every_variant
def test_dropout_is_applied_in_training_only(variant: dict[str, Any]) -> None:
    network = random_network({**variant, "dropout": 0.5})
    sources, targets = RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)
    assert close(network(sources, targets), random_network(variant)(sources, targets))
    rows, hidden = [], network.train().dropout
    hidden.register_forward_hook(
        lambda module, given, random_network: rows.append(int((random_network == 0).any(dim=-1).sum()))
    )
    network(sources, targets)
    assert len(rows) == 3
    assert all(rows), "source embeddings, target embeddings and inputs of the output layer"


@every_variant
def test_bfloat16_is_close_to_float32(variant: dict[str, Any]) -> None:
    """Mixed precision in training, and a network in bfloat16."""
    network = random_network(variant).float()
    sources, targets = (
        RaggedBatch.of(SOURCES[:2] * 2),
        RaggedBatch.of([TARGETS[0]] * 4),
    )  # of equal lengths, as in a padded batch
    wanted = network(sources, targets)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(sources, targets)
    mixed.float().sum().backward()
    for found in (mixed, network.bfloat16()(sources, targets)):
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
