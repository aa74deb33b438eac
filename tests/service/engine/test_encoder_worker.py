"""The encoder worker: with a fake network that makes every mistake visible, and with a tiny real one."""

import random
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.decision_heads import DecisionHead
from polyhead.models.network.heads import Pooler
from polyhead.models.network.label_heads import LabelHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.network.work_pieces import Pieces
from polyhead.service.core.errors import BadRequest, Expired, StepFailed
from polyhead.service.core.request import Done, Encode, Failed, HeadOutput, Terms, TokenOutputs
from polyhead.service.engine.encoder_worker import EncoderWorker, QueryNetwork
from tests.support.engine_fakes import FakeEncoder, FakeHead, RecordingTicket, ask, finish, finish_with_failures, turn


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks of this size are slower on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encoder(executor: FakeEncoder, **options: int) -> EncoderWorker:
    return EncoderWorker(executor, FakeHead(), model="reader", task="embed", **options)


def failure(ticket: RecordingTicket) -> StepFailed:
    assert isinstance(ticket.events[-1], Failed)
    assert isinstance(ticket.events[-1].error, StepFailed)
    return ticket.events[-1].error


def encode(tokens: list[int], **options: object) -> Encode:
    return Encode("test", tuple(tokens), **options)  # type: ignore[arg-type]


def values(ticket: RecordingTicket) -> list[float]:
    encoded, done = ticket.events
    assert isinstance(encoded, HeadOutput)
    assert done == Done("encoded", len(ticket.request.tokens))
    return encoded.values


def test_each_text_gets_its_own_answer() -> None:
    executor = FakeEncoder()
    worker = encoder(executor)
    long, short = ask(worker, encode([5, 6, 7], raw=True), encode([9], raw=True))
    (report,) = finish(worker)
    assert values(long) == [18.0, 3.0, 0.0]
    assert values(short) == [9.0, 0.0, 0.0]
    assert executor.seen[0].tokens == [9, 5, 6, 7], "shortest first"
    assert executor.seen[0].starts == [0, 1, 4]
    assert executor.seen[0].segments is None
    assert (report.sequences, report.tokens, len(report.queue_s), report.waiting) == (2, 4, 2, 0)


def test_each_request_has_its_own_options() -> None:
    worker = encoder(FakeEncoder())
    options = [{}, {"raw": True}, {"dimensions": 1}, {"raw": True, "dimensions": 2}, {}]
    tickets = ask(worker, *[encode([3, 1], **option) for option in options])
    finish(worker)
    length = (4.0**2 + 1) ** 0.5
    whole = pytest.approx([4 / length, 1 / length, 0.0])
    wanted = [whole, [4.0, 1.0, 0.0], [1.0], [4.0, 1.0], whole]
    assert [values(ticket) for ticket in tickets] == wanted, "truncated before special tokens are added"
    assert all(type(value) is float for ticket in tickets for value in values(ticket))


def test_texts_without_segments_get_zeros_beside_texts_with_segments() -> None:
    worker = encoder(FakeEncoder())
    plain, pair = ask(worker, encode([5, 5, 5], raw=True), encode([1, 2], segments=(0, 1), raw=True))
    finish(worker)
    assert values(plain) == [15.0, 3.0, 0.0]
    assert values(pair) == [3.0, 1.0, 1.0]
    with pytest.raises(BadRequest, match="1 segments for 2 tokens"):
        worker.validate(encode([1, 2], segments=(1,)))
    with pytest.raises(BadRequest, match="no tokens"):
        worker.validate(encode([]))


def test_steps_are_filled_first_come_first_served() -> None:
    executor = FakeEncoder()
    worker = encoder(executor, token_budget=10)
    ask(worker, *[encode([1] * length) for length in (4, 6, 3, 8, 30, 1)])
    finish(worker)
    assert [[end - start for start, end in zip(r.starts, r.starts[1:], strict=False)] for r in executor.seen] == [
        [4, 6],
        [3],
        [8],
        [30],
        [1],
    ]


def test_queries_are_read_by_a_network_of_their_own_in_steps_of_their_own() -> None:
    documents, queries = FakeEncoder(), FakeEncoder()
    worker = encoder(documents)
    worker.add_query_network(QueryNetwork(queries, FakeHead(), 7))
    worker.self_test()
    worker.warm_up()
    assert [each.tokens for each in queries.seen] == [each.tokens for each in documents.seen]
    documents.seen.clear()
    queries.seen.clear()
    tickets = ask(worker, *[encode([1] * (n + 1), raw=True, is_query=n in (1, 2, 5)) for n in range(6)])
    finish(worker)
    assert [each.starts for each in documents.seen] == [[0, 1], [0, 4], [0, 5]], "7 tokens a step"
    assert [each.starts for each in queries.seen] == [[0, 2, 5], [0, 6]]
    assert [values(ticket)[0] for ticket in tickets] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_an_aborted_text_is_skipped() -> None:
    executor = FakeEncoder()
    worker = encoder(executor)
    gone, here = ask(worker, encode([1, 1]), encode([2]))
    worker.abort(gone)
    worker.abort(gone)
    finish(worker)
    assert executor.seen[0].tokens == [2]
    assert not gone.events
    assert here.ended


def test_a_text_with_a_nan_result_fails_alone() -> None:
    worker = encoder(FakeEncoder())
    bad, good = ask(worker, encode([13, 1]), encode([2, 2]))
    finish(worker)
    message = "the model computed numbers that are not finite for this request"
    assert failure(bad).message == message, "its base is not named: an adapter may be what was asked"
    assert good.ended
    assert values(good) == pytest.approx([4 / 17**0.5, 1 / 17**0.5, 0])


@pytest.mark.parametrize("lasting", [False, True])
def test_a_failed_step_fails_only_the_texts_that_cause_it(lasting: bool) -> None:
    executor = FakeEncoder()
    worker = encoder(executor)
    tickets = ask(worker, *[encode([index, index]) for index in range(1, 8)])
    executor.failing_tokens = {5}
    failures = 0
    while worker.has_work:
        try:
            turn(worker)
        except RuntimeError:
            failures += 1
            executor.failing_tokens = {5} if lasting else set()
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
            assert not worker._batch, "a handle keeps its worker's memory"
    worker.check_invariants()
    assert failures == (4 if lasting else 1)
    for index, ticket in enumerate(tickets, 1):
        if lasting and index == 5:
            failure(ticket)
        else:
            assert values(ticket)


def test_texts_wait_by_priority_and_owner() -> None:
    executor = FakeEncoder()
    worker = encoder(executor, token_budget=4)
    many = [encode([index, 1], terms=Terms(owner="many")) for index in range(20, 26)]
    ask(worker, *many, encode([2, 2], terms=Terms(owner="one")), encode([3, 3], terms=Terms(owner="many", priority=1)))
    finish(worker)
    assert executor.seen[0].tokens == [3, 3, 2, 2], "by priority, then the owner with the fewest tokens so far"


def test_an_expired_text_is_not_computed() -> None:
    executor = FakeEncoder()
    worker = encoder(executor)
    late, good = ask(worker, encode([1, 1], terms=Terms(deadline=3.0)), encode([2]))
    for ticket, event in worker.expire(3.0):
        ticket.receive(event)
    finish(worker)
    assert isinstance(late.events[-1], Failed)
    assert isinstance(late.events[-1].error, Expired)
    assert good.ended
    assert executor.seen[0].tokens == [2]


def test_the_recovery_probe_of_an_encoder() -> None:
    executor = FakeEncoder()
    worker = encoder(executor)
    worker.self_test()
    executor.raises = True
    with pytest.raises(RuntimeError):
        worker.self_test()
    worker.check_invariants()


def test_an_encoder_warms_up() -> None:
    executor = FakeEncoder()
    encoder(executor, token_budget=40).warm_up()
    assert executor.seen


def test_with_a_network_a_batch_equals_single_texts() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50,
        width=16,
        depth=2,
        heads=4,
        kv_heads=4,
        head_width=4,
        mlp_width=32,
        max_positions=64,
        causal=False,
    )
    executor, head = TorchExecutor(Transformer(config)), Pooler("mean", normalise=True)
    choice = random.Random(0)
    requests = [encode([choice.randrange(50) for _ in range(choice.randint(1, 40))]) for _ in range(20)]
    worker = EncoderWorker(executor, head, model="reader", task="embed", token_budget=200)
    together = ask(worker, *requests)
    finish(worker)
    for ticket, request in zip(together, requests, strict=True):
        (alone,) = ask(worker, request)
        finish(worker)
        assert values(ticket) == pytest.approx(values(alone), abs=1e-6)


def test_a_weighted_mean_counts_the_later_more() -> None:
    states = torch.randn(7, 4)
    pooled = Pooler("weighted", normalise=False)(states, [0, 4, 7])
    expected = [
        (some * torch.arange(1, len(some) + 1)[:, None]).sum(0) / sum(range(1, len(some) + 1))
        for some in (states[:4], states[4:])
    ]
    assert torch.allclose(pooled, torch.stack(expected), atol=1e-6)


class FakeLabelHead(LabelHead):
    """Adds the states of a label and of a row of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[float] = []  # the first token of the text of each piece
        self.failing_token, self.closed = -1, 0

    def score_in_pieces(self, states: Tensor, label_rows: Sequence[int], text_rows: Sequence[int]) -> Pieces[Tensor]:
        """A piece for each label."""
        labels, rows = states[list(label_rows), 0], states[list(text_rows), 0]
        try:
            for _ in label_rows:
                self.pieces.append(float(states[0, 0]))
                if self.pieces[-1] == self.failing_token and len(self.pieces) > 1:
                    raise RuntimeError("the head is on fire")
                yield
        finally:
            self.closed += 1
        return rows[:, None] + labels


def test_labels_and_texts_are_read_at_their_rows() -> None:
    worker = EncoderWorker(FakeEncoder(), FakeLabelHead(), model="finder", task="label_spans")
    requests = [
        encode([5, 6, 7, 8], label_rows=(0, 2), text_rows=(1, 3)),
        encode([9, 1], label_rows=(0,), text_rows=(1,)),
    ]
    tickets = ask(worker, *requests)
    finish(worker)
    tables = [ticket.events[0] for ticket in tickets]
    assert all(isinstance(table, TokenOutputs) for table in tables)
    expected = 1 / (1 + torch.exp(-torch.tensor([[11.0, 13.0], [13.0, 15.0]])))
    torch.testing.assert_close(torch.tensor(cast(TokenOutputs, tables[0]).scores.tolist()), expected)
    assert cast(TokenOutputs, tables[1]).scores.shape == (1, 1)
    for wrong, message in (
        (encode([5]), "label_rows: must be ascending"),
        (encode([5, 6], label_rows=(0,), text_rows=(2,)), "text_rows: must be ascending and below the 2 tokens"),
        (encode([5, 6], label_rows=(1, 0), text_rows=(1,)), "label_rows: must be ascending"),
        (encode([5, 6], label_rows=(0,), text_rows=(1,), rows=(1,)), "no other rows"),
        (encode([5] * 102, label_rows=tuple(range(101)), text_rows=(101,)), "at most 100, got 101"),
    ):
        with pytest.raises(BadRequest, match=message):
            worker.validate(wrong)
    with pytest.raises(BadRequest, match="the model reads no labels"):
        encoder(FakeEncoder()).validate(encode([5, 6], label_rows=(0,), text_rows=(1,)))


def labelled(first: int, labels: int, owner: str = "", **options: object) -> Encode:
    """A text that begins with this token, whose scores take so many pieces."""
    rows = tuple(range(labels))
    return encode([first] + [5] * labels, label_rows=rows, text_rows=(labels,), terms=Terms(owner, **options))  # type: ignore[arg-type]


def finder(**options: object) -> tuple[EncoderWorker, FakeLabelHead]:
    """A worker whose steps read one piece each."""
    head = FakeLabelHead()
    worker = EncoderWorker(FakeEncoder(), head, model="finder", task="label_spans", **options)  # type: ignore[arg-type]
    worker.reading_turn_s = 0
    return worker, head


def test_texts_are_answered_while_another_is_scored() -> None:
    """Every second step is for texts that wait, so a text of many pieces delays them by one step each."""
    worker, head = finder()
    [long] = ask(worker, labelled(100, labels=50))
    report = turn(worker)
    assert (report.sequences, report.running, len(head.pieces)) == (1, 1, 1), "a piece, and it goes on later"
    short = ask(worker, labelled(1, labels=1), labelled(2, labels=1))
    reports = [turn(worker)]
    while not all(ticket.ended for ticket in short):
        reports.append(turn(worker))
    assert not long.ended
    assert len(reports) <= 8
    assert sum(report.sequences for report in reports) == 2, "steps that read on count no text again"
    finish(worker)
    assert head.pieces.count(100) == 50, "nothing is computed twice"
    worker = EncoderWorker(FakeEncoder(), FakeLabelHead(), model="finder", task="label_spans")
    worker.reading_turn_s = 60
    [alone] = ask(worker, long.request)
    assert len(finish(worker)) == 1
    assert alone.events == long.events


@pytest.mark.parametrize("how", ["abort", "expire"])
def test_a_request_that_ends_meanwhile_stops_its_work(how: str) -> None:
    worker, head = finder()
    first, beside, last = ask(worker, labelled(7, 20, deadline=3.0), labelled(8, 21), labelled(9, 3, deadline=3.0))
    turn(worker)
    assert head.pieces == [9.0], "shortest first"
    if how == "abort":
        worker.abort(first)
        worker.abort(last)
    else:
        assert [ticket for ticket, _ in worker.expire(4.0)] == [first, last]
    finish(worker)
    assert head.pieces == [9.0] + [8.0] * 21, "no piece more for those that ended"
    assert isinstance(beside.events[-1], Done)
    assert not first.events
    [alone] = ask(worker, labelled(7, 20))
    turn(worker)
    worker.abort(alone)
    assert not worker.has_work
    worker.check_invariants()
    assert head.closed == 3, "an unfinished computation is closed with its last request"


def test_a_failing_computation_fails_its_text_only() -> None:
    worker, head = finder()
    head.failing_token = 8
    tickets = ask(worker, labelled(7, 3), labelled(8, 4), labelled(9, 5))
    finish_with_failures(worker)
    assert [isinstance(ticket.events[-1], Done) for ticket in tickets] == [True, False, True]
    assert "failed" in str(failure(tickets[1]))


def test_one_owner_does_not_take_all_readings() -> None:
    """Two of an owner's readings are open at a time, and a third one of another owner."""
    worker, head = finder(token_budget=170)
    heavy = list[RecordingTicket]()
    for number in range(2):
        heavy += ask(worker, labelled(100 + number, 40, owner="heavy"))
        while not turn(worker).sequences:
            pass
    heavy += ask(worker, labelled(102, 40, owner="heavy"))
    for _ in range(10):
        assert turn(worker).sequences == 0, "its third text waits"
    [light] = ask(worker, labelled(1, 2, owner="light"))
    reports = 0
    while not light.ended:
        turn(worker)
        reports += 1
    assert reports <= 8
    assert {piece for piece in head.pieces if piece >= 100} == {100, 101}
    finish(worker)
    assert all(isinstance(ticket.events[-1], Done) for ticket in heavy)


def test_texts_beside_an_unfinished_one_are_few() -> None:
    """What is held for unfinished texts counts as tokens of the step."""
    worker, _ = finder(token_budget=20)
    ask(worker, labelled(7, 29))
    assert turn(worker).tokens == 30, "a longer text goes alone"
    ask(worker, labelled(8, 1), labelled(9, 1), labelled(9, 1))
    turn(worker)
    assert turn(worker).tokens == 4, "at most a quarter of the tokens"
    finish(worker)


class SlowEncoder(FakeEncoder):
    """Computes a step in one turn for each ten tokens. `turns` are the first tokens of the steps that had them."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.dropped = list[int](), list[int]()

    def step_in_turns(self, rows: StepInput, turn_s: float) -> Iterator[Tensor | None]:
        assert turn_s > 0
        first, turns = rows.tokens[0], -(-len(rows.tokens) // 10)
        try:
            for number in range(turns):
                self.turns.append(first)
                if number + 1 < turns:
                    yield None
            yield self.step(rows)
        except GeneratorExit:
            self.dropped.append(first)


def test_texts_are_answered_while_a_long_one_is_computed() -> None:
    executor = SlowEncoder()
    worker = encoder(executor, token_budget=20)
    [long] = ask(worker, encode([100] * 200, raw=True))
    report = turn(worker)
    assert (report.sequences, report.tokens, report.running) == (1, 200, 1)
    short = ask(worker, encode([1, 2], raw=True), encode([3] * 4, raw=True))
    reports = [turn(worker)]
    while not all(ticket.ended for ticket in short):
        reports.append(turn(worker))
    assert not long.ended
    assert len(reports) <= 4
    assert sum(report.tokens for report in reports) == 6, "no text is counted twice"
    finish(worker)
    assert executor.turns.count(100) == 20, "nothing is computed twice"
    assert values(long) == [20_000.0, 200 * 199 / 2, 0.0]


def test_a_batch_is_finished_before_the_next_one() -> None:
    """Batches that share the time would all be later."""
    executor = SlowEncoder()
    worker = encoder(executor, token_budget=20)
    tickets = ask(worker, *(encode([number] * 20, raw=True) for number in (1, 2, 3)))
    finish(worker)
    assert executor.turns == [1, 1, 2, 2, 3, 3]
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)


@pytest.mark.parametrize("how", ["abort", "expire"])
def test_a_long_text_that_ends_meanwhile_is_computed_no_further(how: str) -> None:
    executor = SlowEncoder()
    worker = encoder(executor, token_budget=20)
    [long] = ask(worker, encode([100] * 200, terms=Terms(deadline=3.0)))
    turn(worker)
    if how == "abort":
        worker.abort(long)
    else:
        assert [ticket for ticket, _ in worker.expire(4.0)] == [long]
    assert not worker.has_work
    worker.check_invariants()
    assert executor.turns == executor.dropped == [100]


@pytest.mark.parametrize("how", ["abort", "expire"])
def test_a_text_that_ends_while_its_batch_is_computed_fails_no_other(how: str) -> None:
    executor = SlowEncoder()
    worker = encoder(executor, token_budget=40)
    first, other = ask(worker, encode([1] * 10, terms=Terms(deadline=3.0)), encode([2] * 11, raw=True))
    turn(worker)
    if how == "abort":
        worker.abort(first)
    else:
        assert [ticket for ticket, _ in worker.expire(4.0)] == [first]
    finish(worker)
    assert values(other) == [22.0, 55.0, 0.0]
    assert not first.events
    assert len(executor.seen) == 1, "nothing is computed again"


def test_a_long_text_has_its_turns_while_batches_of_several_turns_arrive() -> None:
    executor = SlowEncoder()
    worker = encoder(executor, token_budget=80)
    [long] = ask(worker, encode([100] * 200))
    turn(worker)
    for _ in range(60):
        if not worker._requests.waiting:
            ask(worker, encode([1] * 20), encode([1] * 20))
        turn(worker)
    assert long.ended
    assert executor.turns.count(100) == 20
    assert executor.turns.count(1) > 30


def test_a_turn_that_fails_fails_its_text_only() -> None:
    executor = SlowEncoder()
    executor.failing_tokens = {100}
    worker = encoder(executor, token_budget=20)
    [long] = ask(worker, encode([100] * 50))
    turn(worker)
    [short] = ask(worker, encode([1, 2], raw=True))
    finish_with_failures(worker)
    assert "failed" in str(failure(long))
    assert values(short) == [3.0, 1.0, 0.0]


class FakeDecisionHead(DecisionHead):
    """Adds the number of the question's kind to the states of its options."""

    def score_in_pieces(self, states: Tensor, option_rows: Sequence[int], kind: int) -> Pieces[Tensor]:
        yield
        return states[list(option_rows), 0] + 100 * kind


def test_options_are_read_at_their_rows() -> None:
    worker = EncoderWorker(FakeEncoder(), FakeDecisionHead(), model="decider", task="decide")
    worker.self_test()
    long = encode([5] * 300, label_rows=tuple(range(300)), question="noul")
    tickets = ask(worker, encode([5, 6, 7], label_rows=(0, 2), question="score"), long)
    finish(worker)
    values = [cast(HeadOutput, ticket.events[0]).values for ticket in tickets]
    assert (values[0], len(values[1]), values[1][0]) == ([105.0, 107.0], 300, 205.0)
    for wrong, message in (
        (encode([5]), "label_rows: must be ascending"),
        (encode([5, 6], label_rows=(2,)), "label_rows: must be ascending and below the 2 tokens"),
        (encode([5, 6], label_rows=(0,), text_rows=(1,)), "a model that can decide reads no text_rows"),
        (encode([5, 6], label_rows=(0,), rows=(1,)), "no other rows"),
    ):
        with pytest.raises(BadRequest, match=message):
            worker.validate(wrong)
