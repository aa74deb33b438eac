"""The generator worker: with a fake network that makes every mistake visible, and with a tiny real one."""

import math
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.service.core.errors import BadRequest, Expired, StepFailed
from polyhead.service.core.request import Done, Failed, Generate, GeneratedToken, Sampling, Terms
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.sampler import sample_rows
from tests.support.engine_fakes import (
    FakeGenerator,
    FakeRecurrentGenerator,
    RecordingTicket,
    ask,
    finish,
    generate,
    greedy,
    logits_after,
    turn,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks of this size are slower on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generator(executor: FakeGenerator | TorchExecutor, **budgets: int) -> GeneratorWorker:
    return GeneratorWorker(executor, model="talker", **budgets)


def failure(ticket: RecordingTicket) -> StepFailed:
    assert isinstance(ticket.events[-1], Failed)
    assert isinstance(ticket.events[-1].error, StepFailed)
    return ticket.events[-1].error


def test_it_ends_at_max_tokens() -> None:
    worker = generator(FakeGenerator())
    (ticket,) = ask(worker, generate([1, 2, 3], 5))
    finish(worker)
    assert ticket.tokens == greedy([1, 2, 3], 5)
    assert ticket.events[-1] == Done("length", 3, 5, 0)


def test_it_ends_at_a_stop_token_that_is_counted_but_not_part_of_the_answer() -> None:
    said = greedy([1, 2, 3], 5)
    stop = frozenset({said[3]})
    wanted = greedy([1, 2, 3], 5, stop)
    worker = generator(FakeGenerator())
    (ticket,) = ask(worker, generate([1, 2, 3], 50, stop_tokens=stop))
    finish(worker)
    assert ticket.tokens == wanted
    assert ticket.events[-1] == Done("stop", 3, len(wanted) + 1, 0, said[3])


def test_a_first_token_that_stops_is_a_whole_answer() -> None:
    worker = generator(FakeGenerator())
    (ticket,) = ask(worker, generate([1, 2, 3], 5, stop_tokens=frozenset(greedy([1, 2, 3], 1))))
    finish(worker)
    assert ticket.events == [Done("stop", 3, 1, 0, *greedy([1, 2, 3], 1))]


def test_a_batch_is_answered_as_its_requests_alone() -> None:
    choice = random.Random(0)
    requests = [
        generate(
            [choice.randrange(20) for _ in range(choice.randint(1, 30))],
            choice.randint(1, 12),
            sampling=Sampling(choice.choice([0.0, 1.0]), top_k=choice.choice([0, 5]), seed=choice.randrange(9)),
        )
        for _ in range(30)
    ]
    alone = []
    for request in requests:
        worker = generator(FakeGenerator())
        (ticket,) = ask(worker, request)
        finish(worker)
        alone.append(ticket.events[:-1])
    worker = generator(FakeGenerator(12, 4), token_budget=16, sequence_budget=8, prefill_chunk=5)
    together = ask(worker, *requests)
    reports = finish(worker)
    assert [ticket.events[:-1] for ticket in together] == alone
    assert sum(report.preemptions for report in reports), "the cache has to be too small"


def test_a_seed_gives_one_number_a_token() -> None:
    sampling = Sampling(temperature=1.5, seed=11)
    numbers, tokens = random.Random(11), [1, 2, 3]
    for _ in range(12):
        tokens += sample_rows(torch.tensor([logits_after(tokens)]), [sampling], [numbers.random()])
    worker = generator(FakeGenerator())
    (ticket,) = ask(worker, generate([1, 2, 3], 12, sampling=sampling))
    finish(worker)
    assert ticket.tokens == tokens[3:]


def test_logprobs_are_computed_for_requests_that_want_them() -> None:
    worker = generator(FakeGenerator())
    plain, bare, top = ask(worker, *[generate([4, 5], 2, logprobs=count) for count in (-1, 0, 3)])
    finish(worker)
    token = greedy([4, 5], 1)[0]
    logprobs = torch.tensor(logits_after([4, 5])).log_softmax(dim=0)
    likeliest = logprobs.argsort(descending=True)[:3].tolist()
    assert plain.events[0] == GeneratedToken(token)
    assert bare.events[0] == GeneratedToken(token, pytest.approx(float(logprobs[token])))
    assert isinstance(top.events[0], GeneratedToken)
    assert [word for word, _ in top.events[0].top] == likeliest


def test_a_cached_prefix_is_found_and_reported() -> None:
    executor = FakeGenerator()
    worker = generator(executor)
    prompt = list(range(14))
    (first,) = ask(worker, generate(prompt))
    finish(worker)
    (second,) = ask(worker, generate([*prompt, 3, 3, 3]))
    reports = finish(worker)
    assert second.events[-1] == Done("length", 17, 8, 12)
    assert sum(report.cached_tokens for report in reports) == 12
    assert reports[0].tokens == 17 - 12
    assert second.tokens == greedy([*prompt, 3, 3, 3], 8)
    assert first.tokens == greedy(prompt, 8)


def test_a_request_that_can_never_fit_is_rejected_with_its_size() -> None:
    worker = generator(FakeGenerator(10, 4))
    with pytest.raises(BadRequest, match=r"30 prompt tokens and max_tokens 11 make 41.* 40 tokens"):
        worker.validate(generate([1] * 30, 11))
    worker.validate(generate([1] * 30, 10))
    with pytest.raises(BadRequest, match="no tokens"):
        worker.validate(generate([]))
    with pytest.raises(BadRequest, match="at least 1"):
        worker.validate(generate([1], 0))
    (ticket,) = ask(worker, generate([1] * 30, 10))
    finish(worker)
    assert len(ticket.tokens) == 10


def test_an_abort_frees_a_waiting_and_a_running_request() -> None:
    worker = generator(FakeGenerator(8, 4), sequence_budget=1)
    running, waiting, last = ask(worker, *[generate([index, 1, 1], 9) for index in range(3)])
    turn(worker)
    worker.abort(waiting)
    worker.abort(running)
    worker.abort(running)
    worker.abort(RecordingTicket(generate([1])))
    worker.check_invariants()
    assert turn(worker).blocks_used == 1
    finish(worker)
    assert last.tokens == greedy([2, 1, 1], 9)
    assert not waiting.events
    assert len(running.events) == 1


def test_a_row_with_nan_logits_fails_alone() -> None:
    executor = FakeGenerator()
    worker = generator(executor)
    executor.poison = {22}
    bad, good = ask(worker, generate([1, 2, 3, 4, 5, 22]), generate([1, 2, 3, 4, 5, 6]))
    finish(worker)
    message = "the model computed numbers that are not finite for this request"
    assert failure(bad).message == message, "its base is not named: an adapter may be what was asked"
    assert good.tokens == greedy([1, 2, 3, 4, 5, 6], 8)


@pytest.mark.parametrize("kind", [FakeGenerator, FakeRecurrentGenerator])
def test_blocks_of_a_failed_sequence_are_not_found(kind: type[FakeGenerator]) -> None:
    executor = kind()
    worker = generator(executor, prefill_chunk=4)
    executor.poison = {22}
    (bad,) = ask(worker, generate([*range(10), 22]))
    finish(worker)
    failure(bad)
    (good,) = ask(worker, generate([*range(10), 11]))
    finish(worker)
    assert good.events[-1] == Done("length", 11, 8, 0)


def tried(worker: GeneratorWorker) -> int:
    """Run to the end as the engine does; return how many steps raised an error."""
    raised = 0
    while worker.has_work:
        try:
            turn(worker)
        except (RuntimeError, MemoryError):
            raised += 1
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
        worker._groups.scheduler.check()
    worker.check_invariants()
    return raised


@pytest.mark.parametrize("kind", [FakeGenerator, FakeRecurrentGenerator])
def test_a_step_that_raises_once_fails_no_request(kind: type[FakeGenerator]) -> None:
    executor = kind()
    worker = generator(executor)
    prompts = [[index, 2, 3, 4, 5] for index in range(5)]
    seeded = Sampling(temperature=1.0, seed=7)
    without_faults = generator(FakeGenerator())
    wanted = ask(without_faults, *[generate(prompt, sampling=seeded) for prompt in prompts])
    finish(without_faults)
    tickets = ask(worker, *[generate(prompt, sampling=seeded) for prompt in prompts])
    failures = iter([False, True, False, False, True, True])
    executor.raises = lambda rows: next(failures, False)
    assert tried(worker) == 3
    assert [ticket.tokens for ticket in tickets] == [ticket.tokens for ticket in wanted]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_request_that_always_makes_its_step_raise_fails_alone(error: type[Exception]) -> None:
    executor = FakeGenerator()
    worker = generator(executor, prefill_chunk=4)

    def raises(rows: StepInput) -> bool:
        if 99 in rows.tokens:
            raise error("no memory")
        return False

    executor.raises = raises
    before, bad, after = ask(worker, generate([1, 2, 3]), generate([*range(6), 99, 1]), generate([1, 2, 3, 4]))
    others = ask(worker, *[generate([index] * 5) for index in range(6)])
    assert 1 <= tried(worker) <= 5
    assert "no memory" not in failure(bad).message
    assert before.tokens == greedy([1, 2, 3], 8)
    assert after.tokens == greedy([1, 2, 3, 4], 8)
    assert [ticket.tokens for ticket in others] == [greedy([index] * 5, 8) for index in range(6)]
    assert worker._blocks.used_count == 0


def test_an_executor_that_always_raises_fails_all_one_by_one_and_stores_nothing() -> None:
    executor = FakeGenerator()
    worker = generator(executor, sequence_budget=2)
    prompt = [1, 2, 3, 4, 5]
    executor.raises = lambda rows: True
    tickets = ask(worker, generate(prompt), generate([9, *prompt]), generate(prompt))
    tried(worker)
    assert all(failure(ticket) for ticket in tickets)
    executor.raises = lambda rows: False
    (later,) = ask(worker, generate(prompt))
    finish(worker)
    assert later.events[-1] == Done("length", 5, 8, 0)


def test_an_aborted_request_is_left_out_when_a_step_is_repeated() -> None:
    executor = FakeGenerator()
    worker = generator(executor)
    first, second, third = ask(worker, *[generate([index]) for index in range(3)])
    executor.raises = lambda rows: True
    with pytest.raises(RuntimeError, match="on fire"):
        worker.step()
    assert worker.blame_failed_step() == []
    executor.raises = lambda rows: False
    worker.abort(first)
    worker.abort(third)
    tried(worker)
    assert second.tokens == greedy([1], 8)
    assert not first.events
    assert not third.events


def test_nan_keys_fail_a_request_in_the_middle_of_its_prompt() -> None:
    executor = FakeGenerator()
    worker = generator(executor, prefill_chunk=4)
    bad, good = ask(worker, generate([*range(12)]), generate([1, 2]))
    turn(worker)
    executor.nonfinite_blocks = {next(iter(worker._groups.scheduler.running)).blocks[1]}
    turn(worker)
    executor.nonfinite_blocks = set()
    finish(worker)
    failure(bad)
    assert good.tokens == greedy([1, 2], 8)
    (later,) = ask(worker, generate([*range(12)]))
    finish(worker)
    assert later.events[-1] == Done("length", 12, 8, 0), "a block of the failed request was found"


def test_expired_requests_take_part_in_no_step() -> None:
    executor = FakeGenerator()
    worker = generator(executor, sequence_budget=1)
    runs, waits, stays = ask(
        worker,
        generate([1], terms=Terms(deadline=10.0)),
        generate([2], terms=Terms(deadline=5.0)),
        generate([3], terms=Terms(deadline=99.0)),
    )
    turn(worker)
    assert worker.expire(4.9) == []
    for ticket, event in worker.expire(10.0):
        ticket.receive(event)
    finish(worker)
    for late in (runs, waits):
        assert isinstance(late.events[-1], Failed)
        assert isinstance(late.events[-1].error, Expired)
    assert len(runs.tokens) == 1
    assert stays.tokens == greedy([3], 8)
    assert not any(2 in rows.tokens[:1] and rows.positions[0] == 0 for rows in executor.seen)


@pytest.mark.parametrize("kind", [FakeGenerator, FakeRecurrentGenerator])
def test_the_recovery_probe_uses_a_block_and_frees_it(kind: type[FakeGenerator]) -> None:
    executor = kind(4, 4)
    worker = generator(executor)
    worker.self_test()
    worker.check_invariants()
    executor.poison = {0}
    with pytest.raises(StepFailed):
        worker.self_test()
    executor.raises = lambda rows: True
    with pytest.raises(RuntimeError):
        worker.self_test()
    worker.check_invariants()
    assert worker._blocks.used_count == worker._groups.scheduler.states.used_count == 0


def test_a_step_that_fails_before_its_schedule_is_made_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = generator(FakeGenerator(), sequence_budget=2)
    tickets = ask(worker, *[generate([index]) for index in range(4)])
    turn(worker)
    monkeypatch.setattr(worker._groups.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.step()
    for ticket, event in worker.blame_failed_step():
        ticket.receive(event)
    assert all(failure(ticket) for ticket in tickets)
    assert not worker.has_work
    worker.check_invariants()


def test_the_report_of_a_generator_adds_up() -> None:
    worker = generator(FakeGenerator(16, 4), sequence_budget=2, prefill_chunk=4)
    ask(worker, generate([1, 2, 3, 4, 5, 6], 3), generate([1], 3), generate([2], 3))
    first = turn(worker)
    assert (first.model, first.task, first.sequences, first.tokens) == ("talker", "generate", 2, 5)
    assert (first.running, first.waiting, first.blocks_total, first.blocks_used) == (2, 1, 16, 3)
    assert len(first.queue_s) == 2
    assert len(first.first_token_s) == 1
    assert not first.inter_token_s
    second = turn(worker)
    assert (second.sequences, second.tokens, second.padding) == (2, 3, 2)
    assert (len(second.first_token_s), len(second.inter_token_s)) == (1, 1)
    reports = [first, second, *finish(worker)]
    assert sum(len(report.queue_s) for report in reports) == 3
    assert sum(len(report.first_token_s) for report in reports) == 3
    assert sum(len(report.inter_token_s) for report in reports) == 6
    assert reports[-1].blocks_used == reports[-1].running == reports[-1].waiting == 0


@pytest.mark.parametrize("kind", [FakeGenerator, FakeRecurrentGenerator])
def test_a_generator_warms_up_without_a_trace(kind: type[FakeGenerator]) -> None:
    executor = kind()
    worker = generator(executor)
    worker.warm_up()
    assert executor.seen
    worker.check_invariants()
    (ticket,) = ask(worker, generate([0] * 32))
    finish(worker)
    assert ticket.events[-1] == Done("length", 32, 8, 0)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_a_generator_warms_up_in_any_cache(count: int) -> None:
    generator(FakeGenerator(count, 1)).warm_up()


@pytest.fixture(scope="module")
def network() -> tuple[Transformer, LanguageHead]:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=300,
        width=16,
        depth=2,
        heads=4,
        kv_heads=2,
        head_width=4,
        mlp_width=32,
        max_positions=256,
        causal=True,
        position="rotary",
        norm="rms",
        gated_mlp=True,
        activation="silu",
    )
    body = Transformer(config)
    with torch.no_grad():
        for parameter in body.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return body, LanguageHead(config, body.tokens)


def mixed(count: int) -> list[Generate]:
    choice = random.Random(1)
    ways = [Sampling(0.0), Sampling(seed=3), Sampling(0.7, top_p=0.9, seed=4), Sampling(1.2, top_k=20, min_p=0.01)]
    return [
        generate([choice.randrange(300) for _ in range(choice.randint(1, 40))], 12, sampling=ways[index % 4])
        for index in range(count)
    ]


def talker(network: tuple[Transformer, LanguageHead], blocks: int, **budgets: int) -> GeneratorWorker:
    return generator(TorchExecutor(*network, block_count=blocks, block_size=8), **budgets)


def test_with_a_network_a_batch_equals_single_requests(network: tuple[Transformer, LanguageHead]) -> None:
    requests = mixed(10)
    alone = []
    for request in requests:
        worker = talker(network, 64)
        (ticket,) = ask(worker, request)
        finish(worker)
        alone.append(ticket.tokens)
    assert len({tuple(tokens) for tokens in alone}) == 10
    together = talker(network, 256)
    tickets = ask(together, *requests)
    finish(together)
    assert [ticket.tokens for ticket in tickets] == alone
    chunked = talker(network, 256, token_budget=24, prefill_chunk=7)
    tickets = ask(chunked, *requests)
    finish(chunked)
    assert [ticket.tokens for ticket in tickets] == alone
    preempted = talker(network, 12, token_budget=32)
    tickets = ask(preempted, *requests)
    assert sum(report.preemptions for report in finish(preempted))
    assert [ticket.tokens for ticket in tickets] == alone


def test_with_a_network_a_cached_prefix_equals_a_recomputed_one(network: tuple[Transformer, LanguageHead]) -> None:
    prompt = [(7 * index) % 300 for index in range(50)]
    worker = talker(network, 64)
    (fresh,) = ask(worker, generate(prompt, 12))
    finish(worker)
    (again,) = ask(worker, generate(prompt, 12))
    finish(worker)
    assert again.tokens == fresh.tokens
    assert again.events[-1] == Done("length", 50, 12, 48)


def test_with_a_network_the_warm_up_leaves_no_trace(network: tuple[Transformer, LanguageHead]) -> None:
    worker = talker(network, 64)
    worker.warm_up()
    (ticket,) = ask(worker, generate([0] * 40))
    finish(worker)
    assert ticket.events[-1] == Done("length", 40, 8, 0)


def run_with_faults(seed: int) -> dict[str, int]:
    """A generator with random faults of every kind; returns how its requests ended."""
    choice = random.Random(seed)
    executor = choice.choice([FakeGenerator, FakeRecurrentGenerator])(
        choice.choice([10, 16, 64]), choice.choice([2, 4])
    )
    worker = generator(
        executor,
        token_budget=choice.choice([4, 16, 64]),
        sequence_budget=choice.choice([2, 8]),
        prefill_chunk=choice.choice([3, 64]),
    )
    failing, poison = 98, 99
    executor.poison = {poison}
    executor.raises = lambda rows: failing in rows.tokens or choice.random() < 0.05
    tickets, aborted, ends = [], set(), Counter[str]()
    now = 0
    while len(tickets) < 25 or worker.has_work:
        now += 1
        if len(tickets) < 25 and choice.random() < 0.5:
            prompt = [choice.randint(0, 2) for _ in range(choice.randint(1, 9))]
            prompt += choice.choice([[], [], [], [failing], [poison], [failing, 1], [poison, 1]])
            deadline = now + choice.randint(0, 20) if choice.random() < 0.1 else math.inf
            terms = Terms(choice.choice(["a", "b"]), choice.choice([0, 0, 3]), deadline)
            tickets += ask(worker, generate(prompt, choice.randint(1, 6), terms=terms))
        if choice.random() < 0.05:
            gone = choice.choice([ticket for ticket in tickets if not ticket.ended] or [None])
            if gone is not None:
                worker.abort(gone)
                aborted.add(gone)
        for ticket, event in worker.expire(now):
            ticket.receive(event)
        if worker.has_work:
            try:
                turn(worker)
            except RuntimeError:
                for ticket, event in worker.blame_failed_step():
                    ticket.receive(event)
        worker._groups.scheduler.check()
    worker.check_invariants()
    assert worker._blocks.used_count == worker._groups.scheduler.states.used_count == 0
    for ticket in tickets:
        prompt = list(ticket.request.tokens)
        event = ticket.events[-1] if ticket.events else None
        if ticket in aborted:
            ends["aborted"] += 1
        elif isinstance(event, Done):
            ends["done"] += 1
            assert failing not in prompt
            assert prompt[-1] != poison
            assert ticket.tokens == greedy(prompt, ticket.request.max_tokens)
        else:
            assert isinstance(event, Failed)
            ends[type(event.error).__name__] += 1
            if isinstance(event.error, StepFailed) and not {failing, poison} & set(prompt):
                ends["unlucky"] += 1  # a single failed step met this request alone
    return ends


def test_random_faults_fail_only_their_requests() -> None:
    ends = sum((Counter(run_with_faults(seed)) for seed in range(100)), Counter[str]())
    assert min(ends[kind] for kind in ("done", "aborted", "StepFailed", "Expired")) > 30, ends
    assert ends["unlucky"] < ends["done"] / 10, ends


def test_keys_of_a_step_that_raised_change_no_answer(network: tuple[Transformer, LanguageHead]) -> None:
    """Its keys were NaN, and were not checked."""
    body, head = network
    executor = TorchExecutor(body, head, block_count=2, block_size=16)
    worker = generator(executor)
    (wanted,) = ask(worker, generate([5, 6, 7], 4))
    finish(worker)
    weight = body.tokens.weight
    with torch.no_grad():
        kept = weight[9].clone()
        weight[9] = float("nan")

    def raises(module: object, given: object, out: object) -> None:
        raise RuntimeError("no memory")

    hook = body.register_forward_hook(raises)
    (bad,) = ask(worker, generate([9] * 20, 4))
    tried(worker)
    failure(bad)
    hook.remove()
    with torch.no_grad():
        weight[9] = kept
    (later,) = ask(worker, generate([5, 6, 7], 4))
    finish(worker)
    assert later.tokens == wanted.tokens
