"""Recurrent encoder-decoders: each says what its paper's formulas say, in any company, row by row or all at once."""

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
every = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def made(changes: dict[str, Any]) -> RecurrentTranslator:
    """In numbers of 64 bits, spread more widely than fresh ones, so that all that is added up matters."""
    torch.manual_seed(5)
    network = RecurrentTranslator(replace(TINY, **changes)).double().eval()
    for parameter in network.parameters():
        parameter.data.normal_(std=0.5)
    return network


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-9)


def stepped(network: Seq2Seq, state: Any, columns: Sequence[Sequence[int]]) -> tuple[list[Tensor], Any]:
    """Logits [N, V] behind each column of tokens, and the last state."""
    found = []
    for column in columns:
        logits, state = network.step(torch.tensor(column), state)
        found.append(logits)
    return found, state


@every
def test_each_says_what_its_formulas_say(variant: dict[str, Any]) -> None:
    network = made(variant)
    wanted = torch.cat([formulas(network, source, target)[0] for source, target in zip(SOURCES, TARGETS, strict=True)])
    assert close(network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)), wanted)
    assert wanted.std(dim=0).min() > 1e-3


@every
def test_one_looks_where_its_formulas_look(variant: dict[str, Any]) -> None:
    network = made(variant)
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


@every
def test_a_target_is_written_step_by_step_as_it_is_taught(variant: dict[str, Any]) -> None:
    network = made(variant)
    taught = network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).split([len(target) for target in TARGETS])
    longest = max(map(len, TARGETS))
    columns = list(zip(*[target + [0] * (longest - len(target)) for target in TARGETS], strict=True))
    steps, _ = stepped(network, network.initial_state(RaggedBatch.of(SOURCES)), columns)
    for n, wanted in enumerate(taught):
        assert close(torch.stack([logits[n] for logits in steps[: len(wanted)]]), wanted)


@every
def test_company_changes_nothing(variant: dict[str, Any]) -> None:
    """Others come, go and are written twice while one is written."""
    network = made(variant)
    alone = [
        stepped(network, network.initial_state(RaggedBatch.of([source])), [(0,), (3,), (9,), (4,)])[0]
        for source in SOURCES
    ]
    _, early = stepped(network, network.initial_state(RaggedBatch.of(SOURCES[:2])), [(0, 0), (3, 3)])
    state = network.join_states([early, network.initial_state(RaggedBatch.of(SOURCES[2:]))])
    (logits,), state = stepped(network, state, [(9, 9, 0, 0)])
    assert all(close(logits[n], alone[n][time][0]) for n, time in ((0, 2), (1, 2), (2, 0), (3, 0)))
    (logits,), state = stepped(network, network.select_rows(state, torch.tensor([3, 1, 3])), [(3, 4, 3)])
    assert all(close(logits[row], alone[n][time][0]) for row, (n, time) in enumerate(((3, 1), (1, 3), (3, 1))))
    assert [len(weights) for weights in network.attention_weights(state)] in ([], [4, 9, 4])
    apart = [network.select_rows(state, torch.tensor([row])) for row in (2, 1)]
    together = network.attention_weights(network.join_states(apart))
    assert all(map(close, together, [network.attention_weights(each)[0] for each in apart[: len(together)]]))
    (logits,), _ = stepped(network, apart[0], [(9,)])
    assert close(logits, alone[3][2])


@every
def test_every_number_is_learned(variant: dict[str, Any]) -> None:
    network = made(variant).train()
    network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).square().sum().backward()
    used = {*range(VOCABULARY)} - {1, 2}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        rows = parameter.grad[sorted(used)] if name == "tokens.weight" else parameter.grad
        assert rows.flatten(1 if rows.dim() > 1 else 0).abs().amax() > 0, name


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("way", [{}, {"bidirectional": False}, {"bidirectional": False, "reversed_source": True}])
def test_the_encoder_reads_as_torch_reads_one_sequence(cell: str, way: dict[str, Any]) -> None:
    network = made({"cell": cell, "depth": 2, **way})
    x = torch.randn(sum(map(len, SOURCES)), TINY.width).double()
    annotations, last = network.encoder(x, [len(source) for source in SOURCES])
    backwards = way.get("reversed_source", False)
    for n, (rows, found) in enumerate(
        zip(*(part.split([len(source) for source in SOURCES]) for part in (x, annotations)), strict=True)
    ):
        out, memory = network.encoder.layers(rows.flip(0) if backwards else rows)
        assert close(found, out.flip(0) if backwards else out)
        whole = torch.stack(memory) if cell == "lstm" else memory[None]
        assert close(last[:, :, :, n].flatten(1, 2), whole)


@pytest.mark.parametrize("reach", ["local-m", "local-p"])
def test_a_local_reach_sees_its_window_and_no_more(reach: str) -> None:
    """Of sources longer and shorter than it is; behind the end of a short one a monotonic reach sees nothing."""
    network = made({"attention": "luong", "score": "dot", "reach": reach, "window": 2})
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
def test_a_foretold_place_may_be_anywhere_in_the_source(drive: float, wanted: list[int]) -> None:
    network = made({"attention": "luong", "score": "dot", "reach": "local-p", "window": 1})
    reach = network.decoder.looking.reach
    query = torch.ones(1, 1, TINY.hidden).double()
    torch.nn.init.constant_(reach.inner.weight, 1.0)
    torch.nn.init.constant_(reach.out.weight, drive / TINY.hidden)
    mask, scores = torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, 1, 8).double()
    weights = reach(scores, query, mask, torch.zeros(1, 1))
    assert weights[0, 0].nonzero().flatten().tolist() == wanted


LETTERS = range(3, 13)


def taught(changes: dict[str, Any], steps: int) -> RecurrentTranslator:
    """To write words of 4 to 8 letters backwards."""
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
def written(network: Seq2Seq, sources: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """What is likeliest each time, up to the end."""
    state, column, columns = (
        network.initial_state(RaggedBatch.of(sources)),
        torch.full((len(sources),), network.start_token),
        [],
    )
    for _ in range(most):
        logits, state = network.step(column, state)
        column = logits.argmax(dim=-1)
        columns.append(column.tolist())
    return [list(takewhile(lambda token: token != TINY.end, row)) for row in zip(*columns, strict=True)]


def test_attention_learns_words_that_a_fixed_context_cannot_hold() -> None:
    """Eight letters backwards, after so few steps: with attention most are right, without it no more than chance."""
    words = [random.Random(seed).choices(LETTERS, k=8) for seed in range(64)]
    shares = []
    for changes in ({}, {"attention": "bahdanau"}, {"attention": "luong", "score": "general"}):
        answers = written(taught(changes, 100), words, 10)
        pairs = [
            pair for word, answer in zip(words, answers, strict=True) for pair in zip(word[::-1], answer, strict=False)
        ]
        shares.append(sum(wanted == letter for wanted, letter in pairs) / sum(map(len, words)))
    unaware, *attentive = shares
    assert unaware < 0.4
    assert min(attentive) > 0.6


@pytest.mark.parametrize(("sources", "targets"), [([[3], []], [[0], [0]]), ([[3]], [[]]), ([], [])])
def test_a_sequence_without_a_token_is_refused(sources: list[list[int]], targets: list[list[int]]) -> None:
    with pytest.raises(EncodingError, match="no token"):
        made({})(RaggedBatch.of(sources), RaggedBatch.of(targets))


@pytest.mark.parametrize(
    ("changes", "sentence"),
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
def test_what_makes_no_network_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        replace(TINY, **changes)


@every
def test_a_budget_of_parameters_is_met(variant: dict[str, Any]) -> None:
    config = replace(TINY, **variant)
    before = torch.random.get_rng_state()
    found = fit_hidden_width(config, 30_000)
    assert torch.equal(before, torch.random.get_rng_state())
    assert replace(found, hidden=config.hidden) == config
    count = sum(parameter.numel() for parameter in RecurrentTranslator(found).parameters())
    assert abs(count - 30_000) <= 3_000


def test_a_budget_below_the_least_network_is_refused() -> None:
    with pytest.raises(ModelError, match="100 parameters cannot be reached by this network: the nearest has"):
        fit_hidden_width(TINY, 100)


@every
def test_dropout_is_for_training(variant: dict[str, Any]) -> None:
    network = made({**variant, "dropout": 0.5})
    sources, targets = RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)
    assert close(network(sources, targets), made(variant)(sources, targets))
    rows, hidden = [], network.train().dropout
    hidden.register_forward_hook(lambda module, given, made: rows.append(int((made == 0).any(dim=-1).sum())))
    network(sources, targets)
    assert len(rows) == 3
    assert all(rows), "vectors of what is read, of what is written, and what the output matrix is given"


@every
def test_half_the_bits_are_enough(variant: dict[str, Any]) -> None:
    """Mixed precision in training, and a network that is narrow itself."""
    network = made(variant).float()
    sources, targets = (
        RaggedBatch.of(SOURCES[:2] * 2),
        RaggedBatch.of([TARGETS[0]] * 4),
    )  # of one length, as rectangles are
    wanted = network(sources, targets)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(sources, targets)
    mixed.float().sum().backward()
    for found in (mixed, network.bfloat16()(sources, targets)):
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
