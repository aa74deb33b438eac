"""The scheduler: a fuzz test of thousands of random runs, and a test for each rule.

A dictionary is the network of the fuzz test: a slot of the cache stores a hash of the prefix it was computed from,
and the next token is a function of all tokens before it. So a block with contents of another sequence, a leaked
block, or a sequence that was changed by another is found at once. The same holds for the slots of recurrent states, of
which half of the runs have some, and for the blocks of windowed layers."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from math import inf
from typing import Any

import pytest

from polyhead.service.engine.block_allocator import ROOT_KEY, BlockAllocator, block_keys, child_key
from polyhead.service.engine.scheduler import Chunk, LayerCaches, Scheduler, TokenSequence, logits_row_count
from polyhead.service.engine.state_slots import NO_SLOT, smallest_slot_count
from polyhead.service.engine.window_blocks import held_limit

STOP = 5
PLAIN = LayerCaches()
NEVER = -1
NO_TEXT = 0  # the hash of a prefix without tokens


def next_token(tokens: list[int]) -> int:
    """The next token of a fake network."""
    return (sum((index + 1) * token for index, token in enumerate(tokens)) * 7 + 3) % 11


def alone(prompt: list[int], limit: int, stop: int = STOP) -> list[int]:
    """The tokens of a sequence that is computed alone."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] == stop or len(tokens) >= limit:
            return tokens


@dataclass
class SimulatedRun:
    """A scheduler with a fake cache."""

    scheduler: Scheduler
    cache: dict[int, int] = field(default_factory=dict)
    limits: dict[TokenSequence, int] = field(default_factory=dict)
    order: list[TokenSequence] = field(default_factory=list)
    was_paused: set[TokenSequence] = field(default_factory=set)  # were paused once: they may be overtaken
    stop: int = STOP
    preemptions: int = 0
    cached: int = 0
    accepted: int = 0
    forks: int = 0
    copies: int = 0
    late: int = 0
    checkpoints: int = 0
    longest_held: int = 0  # blocks of windowed layers that one sequence held
    given_back: int = 0
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)  # slots, in this step
    start_of: dict[TokenSequence, list[int]] = field(default_factory=dict)

    def check_published_states(self) -> None:
        """Each state that was published by this step is that after the tokens of its key."""
        pool, size = self.scheduler.states._pool, self.scheduler.blocks.size
        for slot in self.written & pool.key_of.keys():
            tokens = list(self.states[slot])
            assert len(tokens) % size == 0
            assert block_keys(ROOT_KEY, tokens, size)[-1] == pool.key_of[slot], "a state has the key of another one"
        self.written.clear()

    @classmethod
    def of(cls, count: int, size: int, caches: LayerCaches = PLAIN, **budgets: int) -> "SimulatedRun":
        return cls(Scheduler(BlockAllocator(count, size), **budgets, caches=caches))

    def add(self, prompt: list[int], more: int, **terms: Any) -> TokenSequence:
        sequence = TokenSequence(list(prompt), **terms)
        self.limits[sequence], self.start_of[sequence] = len(prompt) + more, list(prompt)
        self.order.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def pause_some(self, choice: random.Random) -> int:
        """Pause some sequences, and resume some of the paused ones."""
        scheduler = self.scheduler
        for sequence in [held for held in scheduler.paused if choice.random() < 0.2]:
            scheduler.resume(sequence)
        present = [*scheduler.running, *scheduler.waiting]
        if not present or choice.random() >= 0.03:
            return 0
        self.was_paused.add(sequence := choice.choice(present))
        scheduler.pause(sequence)
        return 1

    def step(self, is_late: Callable[[], bool] = lambda: False) -> list[Chunk]:
        """One step, computed twice, as after an error; chunks that are late are not committed."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self.check_plan(plan.chunks)
        self.preemptions += plan.preemptions
        self.checkpoints += sum(chunk.sequence.slots.border != NO_SLOT for chunk in plan.chunks)
        self.cached += plan.cached_tokens
        for copy in plan.copies:
            self.copy(*copy)
        for chunk in (*plan.chunks, *plan.chunks):
            self.write(chunk)
        done = [chunk for chunk in plan.chunks if not is_late()]
        self.late += len(plan.chunks) - len(done)
        drawn = [(chunk, self.draw(chunk)) for chunk in done if chunk.is_last]
        scheduler.commit(done)
        for chunk, tokens in drawn:
            scheduler.advance(chunk.sequence, len(tokens) - 1)
            self.accepted += len(tokens) - 1
            self.take(chunk.sequence, tokens)
        self.copies += len(plan.copies)
        scheduler.check()
        self.check_published_states()
        self.longest_held = max([self.longest_held, *(len(s.window.blocks) for s in scheduler.running)])
        self.given_back += sum(sequence.window.first for sequence in scheduler.running)
        size = scheduler.blocks.size
        assert all(s.published == s.computed // size for s in scheduler.running), "a full block was not published"
        return plan.chunks

    def draw(self, chunk: Chunk) -> list[int]:
        """The next token, and those after it as far as the draft is right."""
        tokens = self.read(chunk)
        drawn = [next_token(tokens)]
        for guess in chunk.sequence.draft[: chunk.draft]:
            if guess != drawn[-1] or len(tokens) + len(drawn) >= self.limits[chunk.sequence] or guess == self.stop:
                break
            drawn.append(next_token(tokens + drawn))
        return drawn

    def take(self, sequence: TokenSequence, tokens: list[int]) -> None:
        sequence.tokens += tokens
        sequence.draft = []
        if tokens[-1] == self.stop or len(sequence.tokens) >= self.limits[sequence]:
            self.scheduler.remove(sequence)

    def guess(self, choice: random.Random) -> None:
        """Give some running sequences a draft: right up to some token, or to the end."""
        for sequence in self.scheduler.running:
            if sequence.uncomputed == 1 and choice.random() < 0.3:
                tokens = list(sequence.tokens)
                for _ in range(choice.randint(1, 5)):
                    tokens.append(next_token(tokens) if choice.random() < 0.8 else 10)
                sequence.draft = tokens[len(sequence.tokens) :]

    def fork_some(self, choice: random.Random) -> None:
        """Fork a running sequence, whose fork must generate the same tokens; or copy its progress to its fork."""
        running_ones = [
            sequence for sequence in self.scheduler.running if sequence.uncomputed == 1 and sequence.computed
        ]
        if not running_ones or choice.random() > 0.2:
            return
        parent = choice.choice(running_ones)
        others = [
            other for other in running_ones if other is not parent and self.start_of[other] == self.start_of[parent]
        ]
        if others and choice.random() < 0.5:
            other = choice.choice(others)
            other.tokens, self.limits[other] = list(parent.tokens), self.limits[parent]
            other.draft = []
            self.scheduler.copy_progress(other, parent)
            return
        twin = TokenSequence(list(parent.tokens), parent.owner, parent.priority)
        self.limits[twin], self.start_of[twin] = self.limits[parent], self.start_of[parent]
        self.order.append(twin)
        self.was_paused.add(twin)
        self.scheduler.fork(parent, twin)
        self.forks += 1

    def copy(self, source: int, target: int) -> None:
        size = self.scheduler.blocks.size
        for offset in range(size):
            if source * size + offset in self.cache:
                self.cache[target * size + offset] = self.cache[source * size + offset]

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(), "no progress"

    def check_plan(self, chunks: list[Chunk]) -> None:
        scheduler = self.scheduler
        assert sum(chunk.count + chunk.draft for chunk in chunks) <= scheduler.token_budget
        assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= scheduler.sequence_budget
        assert all(chunk.count > 0 and chunk.count + chunk.draft <= scheduler.chunk for chunk in chunks)
        assert all(chunk.draft <= len(chunk.sequence.draft) and (chunk.is_last or not chunk.draft) for chunk in chunks)
        assert all(chunk.sequence in scheduler.running for chunk in chunks)
        assert sum(map(logits_row_count, chunks)) <= scheduler.sequence_budget, "more logits than the limit"
        assert all(chunk.is_last == (chunk.count == chunk.sequence.uncomputed) for chunk in chunks)
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        assert running == sorted(running, key=lambda sequence: sequence.rank), "out of order"
        line: dict[tuple[int, str], tuple[int, int]] = {}
        for sequence in [sequence for sequence in running if sequence not in self.was_paused]:
            line[sequence.priority, sequence.owner] = sequence.rank
        for sequence in [sequence for sequence in waiting if sequence not in self.was_paused]:
            last = line.get((sequence.priority, sequence.owner), sequence.rank)
            assert last <= sequence.rank, "overtaken by a sequence of the same owner and priority"

    def slots(self, sequence: TokenSequence, position: int, first: int = 0) -> list[int]:
        """The slot of a token in each pool; of windowed layers only for a token that the row at `first` sees."""
        size, windows, index = (
            self.scheduler.blocks.size,
            self.scheduler.windows,
            position // self.scheduler.blocks.size,
        )
        found = [sequence.blocks[index]]
        if windows.count and position > first - windows._window:
            table = windows.table(sequence.window, len(sequence.tokens) + len(sequence.draft))
            assert index >= sequence.window.first, "a block was given back that a row sees"
            found.append(table[index - sequence.window.first])
            assert found[1] >= self.scheduler.blocks.count
        return [block * size + position % size for block in found]

    def references(self, slot: int) -> int:
        block, blocks = slot // self.scheduler.blocks.size, self.scheduler.blocks
        pool = blocks if block < blocks.count else self.scheduler.windows._pool
        return pool.reference_counts[block % blocks.count if pool is blocks else block - blocks.count]

    def write(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        tokens, start = sequence.tokens + sequence.draft, sequence.computed
        size, text = self.scheduler.blocks.size, NO_TEXT
        if start:
            text = self.cache[sequence.blocks[(start - 1) // size] * size + (start - 1) % size]
        for position in range(start, start + chunk.count + chunk.draft):
            text = hash((text, tokens[position]))
            for slot in self.slots(sequence, position):
                assert self.references(slot) == 1, "written to a shared block"
                self.cache[slot] = text
        if self.scheduler.states.count:
            self.write_states(chunk)

    def write_states(self, chunk: Chunk) -> None:
        held, tokens, start = chunk.sequence.slots, chunk.sequence.tokens, chunk.sequence.computed
        pool = self.scheduler.states._pool
        before = () if held.current == NO_SLOT else self.states[held.current]
        assert before == tuple(tokens[:start]), "state of another sequence, or of another token"
        assert not chunk.draft, "a state cannot go back"
        rows = {held.write: chunk.count} | ({held.border: held.border_rows} if held.border != NO_SLOT else {})
        for slot, count in rows.items():
            assert pool.reference_counts[slot] == 1, "written to a shared slot"
            assert slot not in pool.key_of, "written to a cached slot"
            assert 0 < count <= chunk.count
            self.states[slot] = (*before, *tokens[start : start + count])
            self.written.add(slot)

    def read(self, chunk: Chunk) -> list[int]:
        sequence = chunk.sequence
        length, text = sequence.computed + chunk.count, NO_TEXT
        for position in range(length):
            text = hash((text, sequence.tokens[position]))
            for slot in self.slots(sequence, position, sequence.computed):
                assert self.cache[slot] == text, "block of another sequence"
        return sequence.tokens[:length]


@dataclass
class Totals:
    """What a run of the fuzz test has covered."""

    preemptions: int = 0
    cached: int = 0
    aborted: int = 0
    expired: int = 0
    mixed: int = 0  # steps with both prompts and running answers
    yielded: int = 0  # sequences that were preempted by a more urgent one, or by one of another owner
    held: int = 0
    accepted: int = 0  # draft tokens
    forks: int = 0
    copies: int = 0  # of blocks with two holders
    late: int = 0  # chunks that were not committed
    checkpoints: int = 0  # states inside a chunk
    resumed: int = 0  # prompt tokens that were skipped with a cached state
    windowed: int = 0  # prompt tokens that were skipped with a cached window
    given_back: int = 0  # blocks before the windows of running sequences

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            *(mine + others_tokens for mine, others_tokens in zip(astuple(self), astuple(other), strict=True))
        )


def draw_terms(choice: random.Random, now: int) -> dict[str, Any]:
    """Most sequences have equal terms; some are urgent, of a second owner, or have a deadline."""
    return {
        "owner": choice.choice(["", "", "a", "b"]),
        "priority": choice.choice([0, 0, 0, 5, -5]),
        "deadline": now + choice.randint(0, 30) if choice.random() < 0.2 else inf,
        "scored_prefix": choice.choice([0, 0, 0, 3]),
    }


def fuzz(seed: int, context_cost: float = 0.0) -> Totals:
    """One random run."""
    choice = random.Random(seed)
    size, count = choice.choice([1, 2, 4]), choice.choice([6, 12, 20, 40])
    sequences, state_room = choice.choice([1, 3, 8]), choice.choice([0, 1, 10])
    budget, chunk, window = choice.choice([1, 3, 8, 64]), choice.choice([1, 3, 64]), choice.choice([1, 2, 5, 9, 100])
    least = min(held_limit(window, min(budget, chunk), size), count)
    caches = LayerCaches(
        state_count=smallest_slot_count(sequences) + state_room if choice.random() < 0.5 else 0,
        window_blocks=least + choice.choice([0, 0, 1, 5, count]) if choice.random() < 0.6 else 0,
        window=window,
    )
    play = SimulatedRun.of(count, size, caches, token_budget=budget, sequence_budget=sequences, chunk=chunk)
    play.scheduler.context_cost = context_cost
    scheduler, capacity, lateness = play.scheduler, size * count, choice.choice([0.0, 0.1])
    prompts = [
        [choice.randint(0, 2) for _ in range(choice.randint(1, max(1, capacity // choice.choice([1, 2, 3]) - 1)))]
        for _ in range(choice.randint(1, 12))
    ]
    todo = [(prompt, min(choice.randint(1, 10), capacity - len(prompt))) for prompt in prompts]
    gone: set[TokenSequence] = set()
    totals, now = Totals(), 0
    while todo or scheduler.waiting or scheduler.running or scheduler.paused:
        now += 1
        while todo and choice.random() < 0.6:
            play.add(*todo.pop(0), **draw_terms(choice, now))
        present = [*scheduler.running, *scheduler.waiting, *scheduler.paused]
        if present and choice.random() < 0.05:
            gone.add(sequence := choice.choice(present))
            scheduler.remove(sequence)
            totals.aborted += 1
        totals.held += play.pause_some(choice)
        for sequence in scheduler.expired(now):
            assert sequence.deadline <= now
            gone.add(sequence)
            scheduler.remove(sequence)
            totals.expired += 1
        present = [*scheduler.running, *scheduler.waiting]
        assert all(sequence.deadline > now for sequence in present), "computed after its deadline"
        play.guess(choice)
        play.fork_some(choice)
        before = set(scheduler.running)
        present = [*scheduler.running, *scheduler.waiting]
        chunks = play.step(lambda: choice.random() < lateness)
        assert chunks or not present, "no progress"
        totals.mixed += len({chunk.count > 1 for chunk in chunks}) > 1
        totals.yielded += len(before & set(scheduler.waiting))
    for sequence in play.order:
        prompt = play.start_of[sequence]
        assert sequence in gone or sequence.tokens == alone(prompt, play.limits[sequence])
        assert sequence.cached_tokens < play.limits[sequence]
        assert not sequence.blocks
    assert not scheduler.blocks.used_count
    assert not scheduler.states.used_count
    return replace(
        totals,
        preemptions=play.preemptions,
        cached=play.cached,
        accepted=play.accepted,
        forks=play.forks,
        copies=play.copies,
        late=play.late,
        checkpoints=play.checkpoints,
        resumed=play.cached if scheduler.states.count else 0,
        windowed=play.cached if scheduler.windows.count else 0,
        given_back=play.given_back,
    )


@pytest.mark.parametrize("part", range(4))
def test_thousands_of_random_runs(part: int, full: bool) -> None:
    """Six hundred runs, or ten thousand: deliberate mistakes are found within the first two hundred."""
    runs = 2500 if full else 150
    totals = sum((fuzz(seed) for seed in range(part * runs, (part + 1) * runs)), Totals())
    assert all(total > runs // 5 for total in astuple(totals)), f"the fuzz test does not cover everything: {totals}"


def test_random_runs_whose_chunks_depend_on_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhead.service.engine.scheduler.FULL_CHUNK_CONTEXT", 3)
    monkeypatch.setattr("polyhead.service.engine.scheduler.SMALLEST_CHUNK", 2)
    for seed in range(100):
        fuzz(seed, context_cost=0.5)


def present(play: SimulatedRun) -> list[TokenSequence]:
    return [*play.scheduler.running, *play.scheduler.waiting]


def served(play: SimulatedRun, *sequences: TokenSequence) -> int:
    """Steps until all of these have ended."""
    steps = 0
    while any(sequence in play.scheduler.running or sequence in play.scheduler.waiting for sequence in sequences):
        play.step()
        steps += 1
    return steps


def test_an_owner_with_a_thousand_does_not_starve_one_with_one() -> None:
    play = SimulatedRun.of(400, 4, token_budget=64, sequence_budget=8, chunk=16)
    play.stop = NEVER
    for index in range(1000):
        play.add([index % 11, index % 7, 3], 30, owner="many")
    for _ in range(20):
        play.step()
    one = play.add([1, 2, 3], 10, owner="one")
    assert served(play, one) <= 11, "it takes the place of one of the thousand at once"
    assert play.preemptions == 1
    again = play.add([4, 5], 10, owner="one")
    assert served(play, again) <= 11


def test_an_owner_with_many_short_prompts_does_not_starve_a_longer_prompt_of_another() -> None:
    play = SimulatedRun.of(400, 4, token_budget=32, sequence_budget=8, chunk=16)
    play.stop = NEVER
    for index in range(1000):
        play.add([index % 11, index // 11 % 11, index // 121, *[1] * 12], 1, owner="many")
    for _ in range(20):
        play.step()
    one = play.add([3] * 60, 1, owner="one")
    assert served(play, one) <= 8, "its owner has its share of the steps"


def test_owners_share_by_tokens_not_by_requests() -> None:
    play = SimulatedRun.of(1000, 4, token_budget=32, sequence_budget=4, chunk=32)
    play.stop = NEVER
    for index in range(300):
        play.add([index % 11, 1] * 10, 40, owner="long")
        play.add([index % 11], 10, owner="short")
    for _ in range(400):
        play.step()
    tokens: Counter[str] = Counter()
    for sequence in play.order:
        if len(sequence.tokens) == play.limits[sequence]:
            tokens[sequence.owner] += len(sequence.tokens)
    assert tokens["short"] == pytest.approx(tokens["long"], rel=0.2), "five times as many requests"


@dataclass
class BusyKeys:
    """A scheduler with the defaults of a server, whose steps take a simulated time.  Keys always have prompts."""

    busy: dict[str, tuple[int, int, int]]  # by owner: how many prompts it always has, and their least and most tokens
    is_scored: bool
    token_seconds: float = 0.0005
    scheduler: Scheduler = field(
        default_factory=lambda: Scheduler(BlockAllocator(20_000, 16), token_budget=512, sequence_budget=64, chunk=256)
    )
    choice: random.Random = field(default_factory=lambda: random.Random(1))
    present: dict[TokenSequence, None] = field(default_factory=dict)
    steps: int = 0

    def add(self, owner: str, length: int, *, is_scored: bool) -> TokenSequence:
        tokens = self.choice.choices(range(10**6), k=length)
        sequence = TokenSequence(tokens, owner, scored_prefix=length if is_scored else 0)
        self.present[sequence] = None
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Chunk]:
        counts = Counter(sequence.owner for sequence in self.present)
        for owner, (count, least, most) in self.busy.items():
            for _ in range(count - counts[owner]):
                self.add(owner, self.choice.randint(least, most), is_scored=self.is_scored)
        chunks = self.scheduler.schedule().chunks
        rows = sum(map(logits_row_count, chunks))
        assert rows <= self.scheduler.sequence_budget
        self.scheduler.record_time(chunks, sum(chunk.count for chunk in chunks) * self.token_seconds)
        self.scheduler.commit(chunks)
        for sequence in [chunk.sequence for chunk in chunks if chunk.is_last]:
            self.scheduler.remove(sequence)
            del self.present[sequence]
        self.steps += 1
        return chunks

    def wait_for(self, length: int, *, is_scored: bool) -> int:
        """How many steps a prompt of a small key takes."""
        sequence, began = self.add("small", length, is_scored=is_scored), self.steps
        while sequence in self.present and self.steps < began + 3000:
            self.step()
        return self.steps - began


ONE_KEY = {"one": (240, 20, 480)}
LONG_BESIDE_MANY = {"long": (4, 60_000, 60_000), "a": (60, 200, 2000), "b": (60, 200, 2000), "c": (60, 20, 300)}


@pytest.mark.parametrize(
    ("busy", "is_scored", "token_seconds", "most"),
    [
        (ONE_KEY, True, 0.0005, 10),
        (ONE_KEY, True, 0.005, 10),
        (ONE_KEY, False, 0.0005, 10),
        (LONG_BESIDE_MANY, True, 0.0005, 35),  # 4 keys and the oldest prompt share 64 rows of logits
        (LONG_BESIDE_MANY, False, 0.0005, 8),
        (LONG_BESIDE_MANY, False, 0.005, 25),  # 100 tokens in half a second
    ],
)
def test_a_small_key_waits_for_a_few_steps_beside_any_prompts(
    busy: dict[str, tuple[int, int, int]], is_scored: bool, token_seconds: float, most: int
) -> None:
    keys = BusyKeys(busy, is_scored, token_seconds)
    for _ in range(40):
        keys.step()
    waits = [keys.wait_for(200, is_scored=is_scored) for _ in range(20)]
    assert max(waits) <= most, waits


def test_prompts_to_be_scored_have_all_rows_of_the_steps() -> None:
    keys = BusyKeys({}, is_scored=True)
    prompts = [keys.add("one", 20 + index * 2, is_scored=True) for index in range(240)]
    while keys.present:
        keys.step()
    assert keys.steps <= 1.02 * sum(len(prompt.tokens) for prompt in prompts) / 64


def test_what_others_left_to_a_key_is_no_debt_to_prompts_that_wait_for_rows() -> None:
    keys = BusyKeys(ONE_KEY, is_scored=True)
    for _ in range(40):
        keys.step()
    assert keys.wait_for(20_000, is_scored=False) <= 100, "of the tokens that prompts to be scored cannot use"
    assert keys.wait_for(200, is_scored=True) <= 10


def test_a_scored_prompt_is_no_debt_beside_sequences_that_decode() -> None:
    """Its tokens cost a step's tokens for each of its rows, not all that decoding leaves for the few rows it does."""
    play = SimulatedRun.of(4000, 4, token_budget=256, sequence_budget=8, chunk=64)
    play.stop = NEVER

    def keep_busy() -> None:
        for index in range(20 - sum(sequence.owner == "busy" for sequence in present(play))):
            play.add([index % 11, len(play.order) % 7] * 10, 20, owner="busy")

    def steps_until_served(sequence: TokenSequence) -> int:
        steps = 0
        while sequence in present(play) and steps < 3000:
            keep_busy()
            play.step()
            steps += 1
        return steps

    keep_busy()
    for _ in range(30):
        keep_busy()
        play.step()
    steps_until_served(play.add([1] * 200, 1, owner="one", scored_prefix=200))
    least = 8  # tokens of others in a step
    assert steps_until_served(play.add([2] * 20, 1, owner="one")) <= 200 * 256 / 8 / least


def test_a_prompt_that_waits_for_blocks_does_not_hold_the_virtual_time() -> None:
    """Otherwise an owner who was idle meanwhile would be owed all that others had."""
    play = SimulatedRun.of(200, 4, token_budget=32, sequence_budget=4, chunk=32)
    play.stop = NEVER

    def step(*owners: str) -> Counter[str]:
        for owner in owners:
            for index in range(8 - sum(sequence.owner == owner for sequence in present(play))):
                play.add([index % 11, len(play.order) % 7] * 5, 5, owner=owner)
        return Counter(chunk.sequence.owner for chunk in play.step())

    play.add([1] * 400, 350, owner="holds the cache")
    play.add([5] * 2, 1, owner="idle")
    for _ in range(20):
        step("busy")
    large = play.add([3] * 480, 1, owner="large")
    for _ in range(200):
        step("busy")
    assert large in play.scheduler.waiting
    chunks = sum((step("busy", "idle") for _ in range(60)), Counter[str]())
    assert large in play.scheduler.waiting
    assert chunks["busy"] > 0.7 * chunks["idle"], chunks


def test_a_prompt_without_a_row_for_its_last_token_ends_in_the_next_step() -> None:
    play = SimulatedRun.of(64, 4, token_budget=32, sequence_budget=4, chunk=16)
    oldest, scored = (play.add([index] * length, 1, scored_prefix=length) for index, length in ((1, 20), (2, 8)))
    plain = play.add([3] * 10, 1)
    assert {chunk.sequence: chunk.count for chunk in play.step()} == {oldest: 2, scored: 2, plain: 9}
    assert {chunk.sequence: chunk.count for chunk in play.step()} == {plain: 1, oldest: 2, scored: 1}


def full_cache() -> tuple[SimulatedRun, TokenSequence]:
    """A cache of 8 blocks.  Two owners hold one each for 10 steps, which are too many for a prompt of a third one."""
    play = SimulatedRun.of(8, 16, token_budget=64, sequence_budget=8, chunk=64)
    play.stop = NEVER
    for index, owner in enumerate(("a", "b")):
        play.add([index] * 3, 10, owner=owner)
    play.step()
    return play, play.add([3] * 75, 2, owner="large")


def waits(play: SimulatedRun, head: TokenSequence) -> int:
    """Steps until a sequence runs; before the last one none is preempted."""
    steps = 0
    while head not in play.scheduler.running:
        assert not play.preemptions
        play.step()
        steps += 1
    return steps


def test_a_prompt_that_does_not_fit_is_overtaken_by_those_of_other_owners() -> None:
    play, head = full_cache()
    small = play.add([4, 4], 2, owner="small")
    second = play.add([5], 2, owner="large")
    assert served(play, small) <= 3
    assert {head, second} <= {*play.scheduler.waiting}, "of one owner the order is strict"
    play.run()


def test_a_prompt_is_not_delayed_by_those_that_overtake_it() -> None:
    """They are preempted for it, and not before it would fit."""
    alone = waits(*full_cache())
    assert alone > 5
    play, head = full_cache()
    for index in range(40):
        play.add([index % 11, 1], 6, owner=f"small {index}")
    assert waits(play, head) == alone
    assert play.preemptions
    play.run()


def test_an_urgent_sequence_goes_first_and_preempts_another() -> None:
    play = SimulatedRun.of(100, 4, token_budget=16, sequence_budget=2, chunk=16)
    play.stop = NEVER
    calm = [play.add([index, 1], 20) for index in range(6)]
    play.step()
    urgent = play.add([7, 7], 5, priority=1)
    assert served(play, urgent) <= 5
    assert play.preemptions == 1, "the younger of the two that ran"
    assert calm[0] in play.scheduler.running
    play.run()
    assert all(each.tokens == alone(each.tokens[:2], 22, NEVER) for each in calm)


def test_sequences_of_equal_rank_do_not_preempt_each_other() -> None:
    play = SimulatedRun.of(100, 4, token_budget=16, sequence_budget=2, chunk=16)
    for index in range(6):
        play.add([index, 1], 20, owner="a", priority=3)
    play.run()
    assert not play.preemptions


def test_only_expired_sequences_are_returned_as_expired() -> None:
    scheduler = Scheduler(BlockAllocator(16, 2), token_budget=16, sequence_budget=1, chunk=16)
    sequences = [TokenSequence([1, 2], deadline=deadline) for deadline in (5.0, inf, 3.0, 9.0)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    assert scheduler.expired(2.9) == []
    assert scheduler.expired(5.0) == [sequences[0], sequences[2]]
    for sequence in scheduler.expired(5.0):
        scheduler.remove(sequence)
    assert scheduler.expired(8.0) == []
    scheduler.remove(sequences[3])
    assert scheduler.expired(100.0) == []
    scheduler.check()


def test_running_sequences_go_on_while_a_long_prompt_is_computed() -> None:
    play = SimulatedRun.of(64, 4, token_budget=8, sequence_budget=8, chunk=4)
    play.stop = NEVER
    talkers = [play.add([1, index], 40) for index in range(3)]
    play.step()
    long = play.add([2] * 60, 1)
    for _ in range(5):
        counts = {chunk.sequence: chunk.count for chunk in play.step()}
        assert [counts[talker] for talker in talkers] == [1, 1, 1]
        assert counts[long] == 4, "its chunk, although the budget has room"


def test_a_step_does_not_get_longer_with_the_context_of_prompts() -> None:
    cost = 1 / 1000
    play = SimulatedRun.of(2000, 16, token_budget=512, sequence_budget=8, chunk=256)
    play.scheduler.context_cost = cost
    prompts = [play.add([index] * 9000, 1) for index in range(3)]
    slowest, sizes = 0.0, list[int]()
    while chunks := play.step():
        sizes += [chunk.count for chunk in chunks if not chunk.is_last]
        slowest = max(slowest, sum(chunk.count * (1 + cost * chunk.sequence.computed) for chunk in chunks))
        if all(prompt.computed >= 8900 for prompt in prompts):
            break
    assert sizes[:2] == [256, 256]
    assert 64 in sizes, "the smallest chunk"
    assert slowest <= 1.1 * 512 * (1 + cost * 512 * 1.5)


def test_a_slow_network_computes_fewer_tokens_of_prompts_in_a_step() -> None:
    play = SimulatedRun.of(2000, 16, token_budget=512, sequence_budget=8, chunk=256)

    def chunks_of_prompt(token_seconds: float) -> list[int]:
        """The chunks of a prompt whose tokens take so long."""
        prompt, sizes = play.add([len(play.order)] * 3000, 1), list[int]()
        while len(prompt.tokens) == 3000:
            chunks = play.scheduler.schedule().chunks
            play.scheduler.record_time(chunks, sum(chunk.count for chunk in chunks) * token_seconds)
            sizes += [chunk.count for chunk in play.step()]
        return sizes

    assert {*chunks_of_prompt(0.001)[:-1]} == {256}
    assert {*chunks_of_prompt(0.004)[2:-1]} == {125}, "those of half a second"
    assert {*chunks_of_prompt(1.0)[2:-1]} == {64}, "the smallest"
    assert {*chunks_of_prompt(0.001)[1:-1]} == {256}, "one fast step is enough"


@pytest.mark.parametrize("token_seconds", [0.0005, 0.003, 0.01, 1.0])
def test_short_prompts_do_not_wait_for_a_long_one_that_is_slow(token_seconds: float) -> None:
    play = SimulatedRun.of(3000, 16, token_budget=512, sequence_budget=8, chunk=256)
    play.scheduler.context_cost, play.stop = 1 / 1000, NEVER
    long = play.add([1] * 24000, 1)

    def step() -> None:
        chunks = play.scheduler.schedule().chunks
        costs = (chunk.count * (1 + chunk.sequence.computed / 1000) for chunk in chunks)
        play.scheduler.record_time(chunks, sum(costs) * token_seconds)
        play.step()

    while long.computed < 16000:
        step()
    short = [play.add([index + 2] * 100, 1) for index in range(3)]
    for _ in range(12):
        step()
    assert [len(prompt.tokens) for prompt in short] == [101] * 3, "three times 100 tokens, at least 32 a step"
    assert long.computed < 24000


def test_the_budget_grows_again_after_slow_steps() -> None:
    """Prompts of any length tell how long a token takes."""
    play = SimulatedRun.of(3000, 16, token_budget=512, sequence_budget=8, chunk=256)
    sizes = list[int]()
    for token_seconds in (1.0, 0.0001):
        for _ in range(40):
            play.add([len(play.order)] * 60, 1)
        while play.scheduler.waiting or play.scheduler.running:
            chunks = play.scheduler.schedule().chunks
            play.scheduler.record_time(chunks, sum(chunk.count for chunk in chunks) * token_seconds)
            sizes.append(sum(chunk.count for chunk in play.step()))
    assert min(sizes) <= 100
    assert max(sizes[sizes.index(min(sizes)) :]) > 400


def test_a_short_prompt_overtakes_long_ones() -> None:
    play = SimulatedRun.of(64, 4, token_budget=8, sequence_budget=8, chunk=4)
    long = [play.add([index, 1] * 20, 1) for index in range(3)]
    short = play.add([9, 9, 9], 5)
    counts = {chunk.sequence: chunk.count for chunk in play.step()}
    assert counts == {long[0]: 4, short: 3, long[1]: 1}, "the oldest, then the one that needs the fewest tokens"


def test_the_oldest_prompt_is_computed_beside_a_stream_of_short_prompts() -> None:
    play = SimulatedRun.of(64, 4, token_budget=4, sequence_budget=4, chunk=2)
    long = play.add([2, 1] * 20, 1)
    for index in range(25):
        play.add([index, 3], 1)
        play.add([index, 4], 1)
        play.step()
    assert len(long.tokens) == 41


def test_an_equal_prompt_finds_the_blocks_of_the_first() -> None:
    play = SimulatedRun.of(64, 4, token_budget=64, sequence_budget=8, chunk=64)
    prompt = [index % 7 for index in range(18)]
    play.add(prompt, 3)
    play.step()
    second = play.add(prompt, 3)
    assert sum(chunk.count for chunk in play.step()) == 1 + 2
    assert second.cached_tokens == play.cached == 16
    play.run()


def test_the_last_token_is_always_computed() -> None:
    play = SimulatedRun.of(64, 4, token_budget=64, sequence_budget=8, chunk=64)
    play.add([1, 2, 3, 4, 5, 6, 7, 8], 1)
    play.step()
    second = play.add([1, 2, 3, 4, 5, 6, 7, 8], 1)
    play.step()
    assert second.cached_tokens == 4


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    """Also where a step has room for several chunks: the others wait for the blocks that are being computed."""
    play = SimulatedRun.of(200, 4, token_budget=128, sequence_budget=16, chunk=32)
    play.stop = NEVER
    prompt = [index % 5 for index in range(120)]
    sequences = [play.add(prompt, 1) for _ in range(10)]
    computed = 0
    while play.scheduler.running or play.scheduler.waiting:
        computed += sum(chunk.count for chunk in play.step())
    assert computed == 120 + 9 * 4, "each of the others computes what follows the last full block"
    assert all(sequence.cached_tokens == 116 for sequence in sequences[1:])


def test_questions_about_one_text_compute_it_once() -> None:
    """Sequences that differ after a common beginning; one with another salt shares nothing."""
    play = SimulatedRun.of(400, 4, token_budget=128, sequence_budget=16, chunk=32)
    play.stop = NEVER
    text = [index % 5 for index in range(100)]
    asked = [play.add([*text, 6, number, number, 7], 1) for number in range(8)]
    alone_tokens = play.add([*text, 6, 1, 1, 7], 1, salt="other")
    computed = 0
    while play.scheduler.running or play.scheduler.waiting:
        computed += sum(chunk.count for chunk in play.step())
    assert computed == 2 * 104 + 7 * 4
    assert sorted(sequence.cached_tokens for sequence in asked) == [0, *[100] * 7]
    assert alone_tokens.cached_tokens == 0


def test_questions_find_their_text_although_others_wait_for_its_blocks() -> None:
    """Of a text whose first question is answered, the others hold the blocks before waiting sequences are admitted."""
    play = SimulatedRun.of(96, 4, token_budget=64, sequence_budget=16, chunk=64)
    play.stop = NEVER
    lengths = [40 + 4 * (text * 5 % 7) for text in range(12)]
    for text, length in enumerate(lengths):
        for number in range(4):
            play.add([*(text * index % 97 for index in range(length)), number, 6, number, 6], 1)
    computed = 0
    while play.scheduler.running or play.scheduler.waiting:
        computed += sum(chunk.count for chunk in play.step())
    assert computed == sum(length + 4 * 4 for length in lengths)


def test_the_youngest_sequence_is_preempted_and_continued_later() -> None:
    play = SimulatedRun.of(6, 2, token_budget=16, sequence_budget=4, chunk=16)
    play.stop = NEVER
    old, young = play.add([1, 2, 3], 8), play.add([3, 2, 1], 8)
    while play.step() and not play.preemptions:
        pass
    assert old in play.scheduler.running
    assert list(play.scheduler.waiting) == [young]
    assert not young.blocks
    play.run()
    assert old.tokens == alone([1, 2, 3], 11, NEVER)
    assert young.tokens == alone([3, 2, 1], 11, NEVER)
    assert young.cached_tokens == 0, "it finds its own blocks again; that is no hit of its prompt"


def test_an_admission_leaves_each_running_sequence_a_free_block() -> None:
    play = SimulatedRun.of(8, 2, token_budget=16, sequence_budget=4, chunk=16)
    play.add([1, 2, 3], 10)
    play.step()
    play.add([4] * 12, 1)
    play.step()
    assert len(play.scheduler.waiting) == 1, "6 of 6 free blocks would leave none"
    play.run()
    assert not play.preemptions


def test_uncommitted_blocks_are_not_found() -> None:
    scheduler = Scheduler(BlockAllocator(16, 2), token_budget=16, sequence_budget=4, chunk=16)
    first, second = TokenSequence([1, 2, 3, 4, 5]), TokenSequence([1, 2, 3, 4, 5])
    scheduler.add(first)
    scheduler.schedule()
    scheduler.remove(first)  # its step failed
    scheduler.add(second)
    assert scheduler.schedule().cached_tokens == 0


def windowed_run(blocks: int, window: int = 8, **budgets: int) -> SimulatedRun:
    budgets = {"token_budget": 64, "sequence_budget": 2, "chunk": 8} | budgets
    run = SimulatedRun.of(64, 4, LayerCaches(window_blocks=blocks, window=window), **budgets)
    run.stop = NEVER
    return run


def test_blocks_before_the_window_are_given_back() -> None:
    play = windowed_run(held_limit(8, 8, 4))
    sequence = play.add([index % 7 for index in range(60)], 150)
    while len(sequence.tokens) < 200:
        play.step()
    held = sequence.window
    assert play.longest_held == play.scheduler.windows.limit == 5, "8 tokens of the chunk, and 7 before it"
    assert (held.first, len(held.blocks)) == ((199 - 7) // 4, 2)
    assert len(sequence.blocks) == 50, "the other layers keep all"
    play.run()
    assert not play.preemptions


def test_windows_of_more_sequences_than_fit_wait_for_a_place() -> None:
    play = windowed_run(8, sequence_budget=4, chunk=8)
    for first in range(3):
        play.add([first] * 30, 20)
    play.step()
    assert len(play.scheduler.running) == 1, "three of eight blocks are left, and another needs five"
    play.run()
    assert not play.preemptions


def test_a_prefix_is_found_where_its_last_window_is_cached() -> None:
    play = windowed_run(40, sequence_budget=1)
    prompt = [index % 7 for index in range(34)]
    play.add(prompt, 20)
    play.run()
    found = play.add([*prompt, 9, 9], 1)
    play.run()
    assert found.cached_tokens == 32
    play.scheduler.windows.unpublish(block_keys(ROOT_KEY, prompt, 4)[6:7])
    shorter = play.add([*prompt, 8, 8], 1)
    play.step()
    assert shorter.cached_tokens == 24, "after 28 or 32 tokens, the row sees the block of tokens 24 to 28"


def test_places_where_others_may_begin_stay_cached_longest() -> None:
    """A pool that is too small for all windows of one long prompt keeps those of its end, of the prompt before it, and
    of the place where two prompts branched."""
    play = windowed_run(16, sequence_budget=1)
    shared = [index % 5 for index in range(17)]
    ended = play.add([6] * 18, 1)
    play.run()
    computed = []
    for first in (7, 8, 9):
        play.add([*shared, *[first] * 60], 1)
        computed.append(0)
        while play.scheduler.running or play.scheduler.waiting:
            computed[-1] += sum(chunk.count for chunk in play.step())
    assert computed == [77, 77, 61], "the second finds other layers' blocks of 16 tokens, the third its window too"
    again = play.add(ended.tokens, 1)
    play.run()
    assert again.cached_tokens == 16


def test_forks_share_a_window_until_they_write() -> None:
    play = windowed_run(20)
    parent = play.add([index % 7 for index in range(21)], 30)
    while parent.uncomputed > 1 or not parent.computed:
        play.step()
    twin = TokenSequence(list(parent.tokens))
    play.limits[twin], play.start_of[twin] = play.limits[parent], play.start_of[parent]
    play.order.append(twin)
    play.scheduler.fork(parent, twin)
    assert twin.window.blocks == parent.window.blocks[: len(twin.window.blocks)]
    before = play.copies
    play.step()
    assert play.copies == before + 2, "a block of windowed layers and one of the others"
    play.run()


def test_a_rejected_draft_gives_no_block_back() -> None:
    play = windowed_run(8, sequence_budget=8)
    sequence = play.add([1] * 12, 40)
    while len(sequence.tokens) < 14:
        play.step()
    sequence.draft = [10] * 6
    first = sequence.window.first
    [chunk] = play.step()
    assert chunk.draft == 6
    assert sequence.window.first == first, "the next row is one token further, not seven"
    play.run()


def test_too_few_blocks_for_a_window_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="window of one sequence"):
        windowed_run(held_limit(8, 8, 4) - 1)


def recurrent_run(states: int, **budgets: int) -> SimulatedRun:
    budgets = {"token_budget": 64, "sequence_budget": 2, "chunk": 64} | budgets
    run = SimulatedRun.of(64, 4, LayerCaches(states), **budgets)
    run.stop = NEVER
    return run


def test_a_cached_prefix_ends_at_a_cached_state() -> None:
    play = recurrent_run(12)
    play.add([index % 7 for index in range(18)], 1)
    play.step()
    same = play.add([index % 7 for index in range(18)], 1)
    assert sum(chunk.count for chunk in play.step()) == 2, "the state at the last border, 16, is cached"
    assert same.cached_tokens == 16
    other = play.add([*(index % 7 for index in range(10)), 9, 9], 1)
    assert sum(chunk.count for chunk in play.step()) == 12, "the first 8 tokens have blocks, and no state"
    assert other.cached_tokens == 0


def test_a_state_is_kept_where_two_prompts_branch() -> None:
    play, shared = recurrent_run(12), [index % 5 for index in range(9)]
    computed = []
    for first in (6, 7, 8):
        play.add([*shared, *[first] * 12], 1)
        computed.append(sum(chunk.count for chunk in play.step()))
    assert computed == [21, 21, 13], "the second finds the blocks of 8 tokens, the third their state"


def test_of_an_answer_only_the_last_border_stays_cached() -> None:
    play = recurrent_run(40)
    sequence = play.add([1, 2, 3, 4, 5, 6], 25)
    play.run()
    keys = block_keys(ROOT_KEY, sequence.tokens, 4)
    cached = [index for index, key in enumerate(keys) if key in play.scheduler.states._pool.block_of]
    assert cached == [0, 6], "after 4 tokens, in the prompt, and after 28, the last that was computed"


def test_without_a_free_slot_no_state_is_kept_inside_a_chunk() -> None:
    play = recurrent_run(smallest_slot_count(2), chunk=8)
    for first in (1, 2):
        play.add([first] * 20, 9)
    play.step()
    assert play.checkpoints == 2, "nothing is read yet, so six slots are enough"
    play.step()
    assert play.checkpoints == 3, "two are read and two written; one of the others stays free"
    play.run()


def test_states_that_are_not_valid_are_not_found() -> None:
    play = recurrent_run(12)
    bad = play.add([1] * 18, 5)
    play.step()
    play.scheduler.unpublish(bad)
    play.scheduler.remove(bad)
    same = play.add([1] * 18, 1)
    play.step()
    assert same.cached_tokens == 0
    play.scheduler.unpublish_all()
    assert play.scheduler.states.cached_count == 0


def test_a_recurrent_network_has_no_drafts() -> None:
    play = recurrent_run(12)
    sequence = play.add([1, 2, 3], 9)
    play.step()
    sequence.draft = [4, 5]
    assert [chunk.draft for chunk in play.step()] == [0]


def test_too_few_slots_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="too few slots"):
        recurrent_run(smallest_slot_count(2) - 1)


def test_a_block_is_published_once(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[int] = []
    monkeypatch.setattr(
        "polyhead.service.engine.scheduler.child_key",
        lambda parent, tokens: named.append(1) or child_key(parent, tokens),
    )
    play = SimulatedRun.of(64, 4, token_budget=8, sequence_budget=4, chunk=8)
    play.stop = NEVER
    play.add([6, 6, 1, 2] * 5, 30)
    play.run()
    assert len(named) == 49 // 4, "one for every block of the 49 tokens that were computed"
