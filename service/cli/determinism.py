"""`polyhead verify-determinism`: whether answers depend on what is computed in the same batch.

All requests are computed alone first, then under conditions that change the shapes of the arithmetic (batches, chunks,
cached prefixes, preemption), and compared bit by bit.  It uses workers directly, without the engine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, cast

import torch

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.core.errors import ModelError
from polyhead.models.executors.contract import Executor
from polyhead.models.network.heads import LanguageHead

from ..config.settings import Settings
from ..core.request import (
    Done,
    Encode,
    Event,
    Failed,
    Generate,
    GeneratedToken,
    HeadOutput,
    Request,
    Sampling,
    Task,
    TokenCandidates,
    TokenOutputs,
)
from ..engine.encoder_worker import EncoderWorker
from ..engine.generator_worker import GeneratorWorker
from ..engine.head_outputs import OutputHead
from ..engine.state_slots import smallest_slot_count
from ..engine.worker import RequestTiming, StepReport, Worker
from ..runtime.executor_choice import CacheSize, build_executor, build_sampler, make_deterministic
from ..runtime.placement import choose_placement
from .checkpoint_source import try_tokenizer_apart
from .labelled_files import read_lines

SMALL_BLOCK = 4  # tokens in a block of a small cache; answers need new blocks more often
MIN_BATCH, MAX_BATCH = 2, 32  # requests in a batch
USUAL_PROMPT, LONG_PROMPT = 40, 320  # tokens of most prompts, and of every 25th, at most
LONG_PROMPT_EVERY = 25
CACHE_DIVISOR = 6  # the small cache has this part of the tokens of the largest batch
USUAL_ANSWER, LONG_ANSWER = 8, 40  # tokens of most answers, at most, and of every fourth, which needs several blocks
TOP_LOGPROBS = 5  # alternatives whose probabilities are compared too
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(temperature=1),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.2, top_k=20, min_p=0.01),
)
ProgressCallback = Callable[[str, int, int], None]


@dataclass(eq=False, slots=True)
class RecordedRequest:
    """A request handle that keeps the events of its answer."""

    request: Request
    submitted: float = field(default_factory=perf_counter)
    timing: RequestTiming = field(default_factory=RequestTiming)
    events: list[Event] = field(default_factory=list)

    def receive(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True)
class Condition:
    """A condition of computing: `batches` are the requests computed together, by number, on `make_worker()`."""

    name: str
    batches: list[list[int]]
    make_worker: Callable[[], Worker]
    describe: Callable[[list[StepReport]], str]


@dataclass(frozen=True)
class ConditionResult:
    """How many answers equal those computed alone.  `max_difference` is the largest difference of a probability or
    number.
    """

    condition: str
    equal: int
    total: int
    max_difference: float
    note: str


def load_checkpoint(settings: Settings) -> Checkpoint:
    """Load the first model of the settings, as a server would, in this thread."""
    placement = choose_placement(settings)
    torch.set_num_threads(placement.torch_threads)
    source = next(iter(settings.models.values()))
    loaded = load(source, dtype=placement.dtype, device=placement.device, folder_check=try_tokenizer_apart)
    make_deterministic(loaded, settings, placement)
    return loaded


def verify(
    loaded: Checkpoint, settings: Settings, requests: Sequence[Request], report_progress: ProgressCallback
) -> list[ConditionResult]:
    """Return one result for each condition.  `report_progress` is called with the condition, the answered requests
    and their total.
    """
    first, *others = list_conditions(loaded, settings, requests)
    alone, _ = run_condition(first, requests, report_progress)
    return [
        compare_answers(condition, alone, *run_condition(condition, requests, report_progress)) for condition in others
    ]


def compare_answers(
    condition: Condition, alone: list[list[Event]], answers: list[list[Event]], reports: list[StepReport]
) -> ConditionResult:
    pairs = list(zip(alone, answers, strict=True))
    equal = sum(comparable_events(one) == comparable_events(other) for one, other in pairs)
    worst = max((max_difference(one, other) for one, other in pairs), default=0.0)
    return ConditionResult(condition.name, equal, len(pairs), worst, condition.describe(reports))


def comparable_events(events: list[Event]) -> list[object]:
    """Return what must be equal in two answers: all but the number of cached prompt tokens."""

    def comparable(event: Event) -> object:
        match event:
            case GeneratedToken(token, logprob, top):
                return token, logprob, top
            case Done(reason):
                return reason
            case _:
                return event

    return [comparable(event) for event in events]


def max_difference(one: list[Event], other: list[Event]) -> float:
    """Return the largest difference of a probability or of an encoder's number, up to the first different token."""
    worst = 0.0
    for a, b in zip(one, other, strict=False):
        if isinstance(a, GeneratedToken) and isinstance(b, GeneratedToken):
            other_logprobs = {**dict(b.top), b.id: b.logprob}
            for token, logprob in (*a.top, (a.id, a.logprob)):
                if token in other_logprobs:
                    worst = max(worst, abs(math.exp(logprob) - math.exp(other_logprobs[token])))
            if a.id != b.id:
                break
        else:
            worst = max(worst, *(abs(x - y) for x, y in zip(encoder_values(a), encoder_values(b), strict=True)), 0.0)
    return worst


def encoder_values(event: Event) -> Sequence[float]:
    """Return the numbers in an encoder's event."""
    match event:
        case HeadOutput(values):
            return values
        case TokenOutputs(scores):
            return scores.cast("B").cast("f")
        case TokenCandidates(candidates):
            return [score for row in candidates for _, score in row]
        case _:
            return []


def run_condition(
    condition: Condition, requests: Sequence[Request], report_progress: ProgressCallback
) -> tuple[list[list[Event]], list[StepReport]]:
    """Compute all requests under a condition.  Returns the events of each, and the reports of all steps."""
    answers: list[list[Event]] = [[] for _ in requests]
    reports: list[StepReport] = []
    done = 0
    for batch in condition.batches:
        recorded, steps = run_batch(condition.make_worker(), [requests[number] for number in batch])
        for number, each in zip(batch, recorded, strict=True):
            answers[number] = each.events
        reports += steps
        done += len(batch)
        report_progress(condition.name, done, len(requests))
    return answers, reports


def run_batch(worker: Worker, requests: Sequence[Request]) -> tuple[list[RecordedRequest], list[StepReport]]:
    """Compute requests together.  Raises ModelError if one of them fails."""
    recorded = [RecordedRequest(request) for request in requests]
    for each in recorded:
        worker.validate(each.request)
        worker.submit(each)
    reports = []
    while worker.has_work:
        step = worker.step()
        reports.append(step.report)
        for handle, event in step.events:
            handle.receive(event)
            if isinstance(event, Failed):
                raise ModelError(f"a request failed: {event.error.message}")
    return recorded, reports


def list_conditions(loaded: Checkpoint, settings: Settings, requests: Sequence[Request]) -> list[Condition]:
    """List the conditions; the first one computes each request alone."""
    generator = isinstance(loaded.head, LanguageHead)
    return list((generator_conditions if generator else encoder_conditions)(loaded, settings, requests))


def generator_conditions(loaded: Checkpoint, settings: Settings, requests: Sequence[Request]) -> Iterator[Condition]:
    needs = [len(request.tokens) + request.max_tokens for request in requests if isinstance(request, Generate)]
    batches = shuffle_batches(len(needs))
    placement = choose_placement(settings)
    size, sampler = placement.block_size, build_sampler(placement)
    states = smallest_slot_count(MAX_BATCH) if loaded.decoder_config.is_recurrent else 0
    large = CacheSize(sum(math.ceil(need / size) for need in needs), states)
    large_cache = build_executor(loaded, settings, placement, large)
    largest = max(sum(needs[number] for number in batch) for batch in batches)
    fixed = placement.instructions or placement.kernel is not None  # the block size then changes the order of sums
    small = settings if fixed else settings.model_copy(update={"block_size": SMALL_BLOCK})
    small_placement = choose_placement(small)
    few = math.ceil(max(*needs, largest // CACHE_DIVISOR) / small_placement.block_size)
    small_cache = build_executor(loaded, small, small_placement, CacheSize(few, states))

    def worker(executor: Executor = large_cache, **budgets: Any) -> Callable[[], Worker]:
        def build() -> Worker:
            generator = GeneratorWorker(executor, model="verified", sequence_budget=MAX_BATCH, **budgets)
            generator.sampler = sampler
            return generator

        return build

    shared = worker()()  # keeps its cache between conditions
    yield Condition("alone", [[number] for number in range(len(needs))], worker(), describe_nothing)
    yield Condition(f"in batches of {MIN_BATCH} to {MAX_BATCH}", batches, lambda: shared, describe_nothing)
    yield Condition("prefix found in the cache", batches, lambda: shared, describe_cached_tokens)
    yield Condition("in chunks of 7 tokens", batches, worker(token_budget=48, prefill_chunk=7), describe_nothing)
    yield Condition("preempted in a small cache", batches, worker(small_cache), describe_preemptions)


def encoder_conditions(loaded: Checkpoint, settings: Settings, requests: Sequence[Request]) -> Iterator[Condition]:
    executor, head = build_executor(loaded, settings, choose_placement(settings)), cast(OutputHead, loaded.head)

    def worker(token_budget: int = 4096) -> Callable[[], Worker]:
        task = cast(Task, loaded.task)
        return lambda: EncoderWorker(executor, head, model="verified", task=task, token_budget=token_budget)

    batches = shuffle_batches(len(requests))
    yield Condition("alone", [[number] for number in range(len(requests))], worker(), describe_nothing)
    yield Condition(f"in batches of {MIN_BATCH} to {MAX_BATCH}", batches, worker(), describe_nothing)
    yield Condition("in steps of 100 tokens", batches, worker(token_budget=100), describe_nothing)
    yield Condition("all at once", [list(range(len(requests)))], worker(token_budget=8192), describe_nothing)


def describe_nothing(reports: list[StepReport]) -> str:  # noqa: ARG001
    return ""


def describe_cached_tokens(reports: list[StepReport]) -> str:
    return f"{sum(report.cached_tokens for report in reports)} tokens found"


def describe_preemptions(reports: list[StepReport]) -> str:
    return f"{sum(report.preemptions for report in reports)} preemptions"


def shuffle_batches(count: int) -> list[list[int]]:
    """Return all numbers below `count`, shuffled, in batches of random sizes from MIN_BATCH to MAX_BATCH."""
    choice = Random(count)
    numbers = choice.sample(range(count), count)
    batches = []
    while numbers:
        size = choice.randint(MIN_BATCH, MAX_BATCH)
        batches.append(numbers[:size])
        numbers = numbers[size:]
    return batches


def random_requests(loaded: Checkpoint, count: int) -> list[Request]:
    """Return requests of random tokens and lengths.  Generators sample greedily and in three seeded ways."""
    choice = Random(0)
    room = loaded.max_tokens - USUAL_ANSWER
    requests = []
    for number in range(count):
        length = choice.randint(1, max(1, min(USUAL_PROMPT if number % LONG_PROMPT_EVERY else LONG_PROMPT, room)))
        tokens = tuple(choice.randrange(loaded.config.vocab_size) for _ in range(length))
        requests.append(build_request(loaded, number, tokens))
    return requests


def read_requests(loaded: Checkpoint, path: Path) -> list[Request]:
    """Read one prompt or text per line.  Raises ModelError if there is none, or one is too long."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in read_lines(path, file) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise ModelError(f"{path} has no prompts: write one per line")
    room = loaded.max_tokens - (USUAL_ANSWER if loaded.task == "generate" else 0)
    encoded = [tuple(each.ids) for each in loaded.tokenizer.encode_batch(lines)]
    for number, tokens in enumerate(encoded):
        if not 0 < len(tokens) <= room:
            raise ModelError(f"{path}: prompt {number + 1} has {len(tokens)} tokens; 1 to {room} are allowed")
    return [build_request(loaded, number, tokens) for number, tokens in enumerate(encoded)]


def build_request(loaded: Checkpoint, number: int, tokens: tuple[int, ...]) -> Request:
    if loaded.task != "generate":
        halves = (len(tokens) // 2, len(tokens) - len(tokens) // 2)
        pair = (0,) * halves[0] + (1,) * halves[1] if loaded.config.segments > 1 and number % 3 == 0 else ()
        return Encode(str(number), tokens, segments=pair)
    chosen = SAMPLINGS[number % len(SAMPLINGS)]
    answer = min(USUAL_ANSWER if number % 4 else LONG_ANSWER, loaded.max_tokens - len(tokens))
    sampling = Sampling(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, seed=number)
    return Generate(str(number), tokens, answer, loaded.stop_tokens, sampling, logprobs=TOP_LOGPROBS)


def format_table(verdicts: Sequence[ConditionResult]) -> str:
    """Format the results as a table."""
    rows = [(v.condition, f"{v.equal} of {v.total}", f"{v.max_difference:.1e}", v.note) for v in verdicts]
    rows.insert(0, ("condition", "equal to alone", "largest difference", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
