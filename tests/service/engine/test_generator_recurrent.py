"""The generator worker with a tiny network of every kind of recurrent layer beside attention, batch-invariant on torch
and on the compiled step.

Whatever happens to a sequence, its answer has the same tokens and the same probabilities to the bit."""

import random
from collections.abc import Iterator
from dataclasses import replace
from threading import Semaphore
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import BLOCK_TOKENS
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import MixerConfig, ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.service.core.guide import GuideSpec
from polyhead.service.core.request import BeamSearchOptions, Done, Failed, Generate, Sampling
from polyhead.service.engine import generator_worker
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.state_slots import smallest_slot_count
from tests.support.engine_fakes import RecordingTicket, answer_scores, ask, finish, generate, scores, turn

WORDS, BLOCK = 90, BLOCK_TOKENS
CONFIG = ModelConfig(
    vocab_size=WORDS,
    width=16,
    depth=5,
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
    mixers=("state_space", "attention", "delta", "convolution", "attention"),
    recurrent=MixerConfig(kernel=4, kernel_bias=True, heads=4, head_width=4, key_heads=2, key_width=8),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RaisingExecutor:
    """Raises after a step was computed, and has written its slots, if the step has a token that is in `failing`."""

    failing: frozenset[int] = frozenset()
    often = 0.0
    choice = random.Random(3)

    def step(self, rows: StepInput) -> Tensor:
        logits: Tensor = super().step(rows)  # type: ignore[misc]
        if self.failing & set(rows.tokens) or self.choice.random() < self.often:
            raise RuntimeError("the device is on fire")
        return logits


class RaisingTorch(RaisingExecutor, TorchExecutor):
    pass


class RaisingNative(RaisingExecutor, NativeExecutor):
    pass


class Network(NamedTuple):
    """A network and what computes it."""

    body: Transformer
    head: LanguageHead
    compiled: bool

    def executor(self, blocks: int, states: int) -> RaisingTorch | RaisingNative:
        if self.compiled:
            return RaisingNative(self.body, self.head, block_count=blocks, state_count=states)
        return RaisingTorch(self.body, self.head, block_count=blocks, block_size=BLOCK, state_count=states)


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "compiled"])
def network(request: pytest.FixtureRequest, one_thread: None) -> Network:
    torch.manual_seed(0)
    body = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in body.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    head = LanguageHead(CONFIG, body.tokens)
    if not request.param:
        make_invariant(body, head)
    return Network(body, head, request.param)


def talker(network: Network, blocks: int = 400, checkpoints: int = 8, **budgets: int) -> GeneratorWorker:
    budgets = {"sequence_budget": 12} | budgets
    states = smallest_slot_count(budgets["sequence_budget"]) + checkpoints
    return GeneratorWorker(network.executor(blocks, states), model="talker", **budgets)


def prompts(count: int) -> list[list[int]]:
    choice = random.Random(1)
    return [[choice.randrange(WORDS) for _ in range(choice.randint(1, 40))] for _ in range(count)]


def mixed(count: int) -> list[Generate]:
    ways = [Sampling(0.0), Sampling(seed=3), Sampling(0.7, top_p=0.9, seed=4)]
    return [generate(prompt, 12, sampling=ways[number % 3], logprobs=2) for number, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(network: Network) -> list[list[object]]:
    """The answers to `mixed`, each in a worker of its own."""
    return [answer_scores(talker(network), request)[0] for request in mixed(7)]


def test_alone_with_neighbours_and_in_chunks(network: Network, alone: list[list[object]]) -> None:
    assert len(set(map(repr, alone))) == 7
    assert answer_scores(talker(network), *mixed(7)) == alone
    assert answer_scores(talker(network, token_budget=24, prefill_chunk=7), *mixed(7)) == alone


def test_preempted_sequences_begin_again(network: Network, alone: list[list[object]]) -> None:
    worker = talker(network, blocks=5, token_budget=32)
    tickets = ask(worker, *mixed(7))
    assert sum(report.preemptions for report in finish(worker))
    assert [scores(ticket.events) for ticket in tickets] == alone


@pytest.mark.parametrize("checkpoints", [0, 40])
def test_a_cached_prefix_gives_the_same_answer(network: Network, checkpoints: int) -> None:
    opening = [(7 * index) % WORDS for index in range(69)]
    requests = [generate([*opening, *last], 5, logprobs=2) for last in ([1, 2] * 20, [4] * 9, [5, 6], [])]
    fresh = [answer_scores(talker(network), request)[0] for request in requests]
    worker = talker(network, checkpoints=checkpoints, sequence_budget=2, prefill_chunk=48)
    cached: list[int] = []
    for request in requests:
        (ticket,) = ask(worker, request)
        finish(worker)
        assert scores(ticket.events) == fresh[len(cached)]
        end = ticket.events[-1]
        assert isinstance(end, Done)
        cached.append(end.cached_tokens)
    assert cached == [0, 48, 64, 64], "what the first chunk kept; then the border where the second branched off"


def test_answers_of_one_prompt_share_its_state(network: Network) -> None:
    ways = [Sampling(temperature=1.5, seed=seed) for seed in range(4)]
    one = generate([*range(30)], 12, logprobs=2)
    wanted = [answer_scores(talker(network), replace(one, sampling=way))[0] for way in ways]
    worker = talker(network)
    tickets = ask(worker, *(replace(one, sampling=way, group="g") for way in ways))
    assert turn(worker).tokens == 30
    assert worker._groups.scheduler.states.used_count == 1, "four sequences go on from one state"
    finish(worker)
    assert [scores(ticket.events) for ticket in tickets] == wanted


def test_a_beam_search_is_the_same_in_any_cache(network: Network) -> None:
    search = replace(generate([*range(20)], 12, logprobs=1), beams=BeamSearchOptions(4), group="s")
    others = mixed(7)
    (roomy,) = answer_scores(talker(network), search)
    worker = talker(network, blocks=10, prefill_chunk=5, token_budget=40)
    tickets = ask(worker, *others, search)
    assert sum(report.preemptions for report in finish(worker))
    assert scores(tickets[-1].events) == roomy


def test_an_aborted_and_a_paused_sequence_change_no_other(network: Network, alone: list[list[object]]) -> None:
    worker = talker(network, token_budget=16)
    tickets = ask(worker, *mixed(7))
    for number in range(6):
        turn(worker)
        if number == 3:
            worker.pause(tickets[4])
    worker.abort(tickets[2])
    worker.resume(tickets[4])
    finish(worker)
    assert [scores(ticket.events) for ticket in tickets if ticket is not tickets[2]] == [*alone[:2], *alone[3:]]
    assert not worker._groups.scheduler.states.used_count


def test_steps_that_raise_are_computed_again_in_halves(network: Network, alone: list[list[object]]) -> None:
    """Each raises after it has written its slots."""
    requests = mixed(7)
    worker = talker(network, token_budget=64)
    executor = worker._executor
    assert isinstance(executor, RaisingExecutor)
    executor.failing, executor.often = frozenset({WORDS - 1}), 0.02
    tickets = ask(worker, *requests)
    raised = 0
    while worker.has_work:
        try:
            turn(worker)
        except RuntimeError:
            raised += 1
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
        worker._groups.check()
    assert raised > 5
    done = [number for number, ticket in enumerate(tickets) if not isinstance(ticket.events[-1], Failed)]
    failed = [ticket for ticket in tickets if isinstance(ticket.events[-1], Failed)]
    assert len(done) >= 2
    assert failed
    assert [scores(tickets[number].events) for number in done] == [alone[number] for number in done]
    assert not worker._groups.scheduler.states.used_count


class EvenGuide:
    """A guide that allows the tokens with even numbers, once a permit was given."""

    spec = GuideSpec(None, None)
    is_finished = False

    def __init__(self, permits: Semaphore | None) -> None:
        self.permits = permits

    def new_state(self, owner: str = "") -> "EvenGuide":
        return self

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        assert self.permits is None or self.permits.acquire(timeout=60)
        mask[:] = 0x55555555
        return True

    def advance(self, token: int) -> None:
        assert token % 2 == 0

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        return []


def test_a_late_mask_repeats_a_chunk(
    network: Network, alone: list[list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_worker, "MASK_WAIT_S", 0.001)
    quick: list[RecordingTicket] = []
    plain, guided = mixed(7)[3], [replace(one, guide=EvenGuide(None)) for one in mixed(3)]
    worker = talker(network)
    quick = ask(worker, *guided)
    finish(worker)
    permits, worker = Semaphore(0), talker(network)
    late = ask(worker, *(replace(one, guide=EvenGuide(permits)) for one in guided))
    (free,) = ask(worker, plain)
    while not free.ended:
        turn(worker)
        worker.check_invariants()
    assert not any(ticket.events for ticket in late)
    permits.release(1000)
    finish(worker)
    assert scores(free.events) == alone[3]
    assert [scores(ticket.events) for ticket in late] == [scores(ticket.events) for ticket in quick]


def test_the_self_test_and_the_warm_up_leave_no_state(network: Network, alone: list[list[object]]) -> None:
    worker = talker(network)
    worker.warm_up()
    worker.self_test()
    worker.check_invariants()
    assert worker._groups.scheduler.states.cached_count == worker._groups.scheduler.states.used_count == 0
    assert answer_scores(worker, mixed(1)[0]) == alone[:1]


def test_a_report_counts_the_states(network: Network) -> None:
    worker = talker(network, checkpoints=5)
    ask(worker, *mixed(6))
    first = turn(worker)
    assert (first.states_total, first.states_used) == (smallest_slot_count(12) + 5, 6)
    last = finish(worker)[-1]
    assert last.states_used == 0
    assert last.states_cached > 3
