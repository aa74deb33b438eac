"""The requests that are being generated: by sequence, by handle, and in groups that share a prompt.

`RequestGroups` owns the scheduler: all changes of scheduled sequences go through it.

Of a group, the leader computes the prompt.  The followers are not scheduled until it is computed, then as many as there
are places for start from a fork of its sequence.  The first of the others leads them from then on, and finds the prompt
in the cache.  If the leader is aborted, the next request leads.
"""

from collections.abc import Sequence

from ..core.request import Generate
from .logits_processors import SharedRules
from .request_beams import Beam, SearchStep
from .request_state import RequestState
from .scheduler import Chunk, Scheduler, StepPlan, TokenSequence
from .worker import RequestHandle


class RequestGroups:
    """`states` maps each scheduled sequence to its request; a beam search has one entry for each of its beams.

    `scheduler` may be read from outside, and is changed only here.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.states: dict[TokenSequence, RequestState] = {}
        self.scheduler = scheduler
        self._rules = SharedRules()
        self._by_handle: dict[RequestHandle, RequestState] = {}
        self._leaders: dict[str, RequestState] = {}  # by group, until the prompt is computed

    def add(self, handle: RequestHandle) -> None:
        request = handle.request
        assert isinstance(request, Generate)
        state = leader = self._leaders.get(request.group)
        if state is None or state.search is None:
            state = RequestState.create(handle, self._rules)
        if leader is None:
            self._make_leader(state)
        elif leader is state:
            leader.handles.append(handle)
        else:
            leader.followers.append(state)
        self._by_handle[handle] = state

    def requests(self) -> set[RequestState]:
        """All requests, with those that wait for a prompt."""
        present = set(self.states.values())
        return present.union(*(state.followers for state in present))

    def abort(self, handle: RequestHandle) -> None:
        """Remove one handle.  An unknown one is no error."""
        state = self._by_handle.pop(handle, None)
        if state is None:
            return
        state.handles[state.handles.index(handle)] = None
        is_scheduled = state.search is not None or state.sequence in self.states
        if is_scheduled and not any(state.handles):  # its leader drops it otherwise
            self.remove(state)

    def pause(self, handle: RequestHandle) -> None:
        """Compute no more of a request until it is resumed.  An unknown one is no error, in both."""
        if state := self._by_handle.get(handle):
            self.scheduler.pause(state.sequence)

    def resume(self, handle: RequestHandle) -> None:
        if state := self._by_handle.get(handle):
            self.scheduler.resume(state.sequence)

    def expired(self, now: float) -> list[RequestState]:
        """Requests whose deadline has passed, for the caller to remove."""
        late = self.scheduler.expired(now)
        return list(dict.fromkeys(self.states[sequence] for sequence in late if sequence in self.states))

    def schedule(self) -> StepPlan:
        return self.scheduler.schedule()

    def commit(self, computed: Sequence[Chunk], done: Sequence[Chunk]) -> None:
        """Charge for all chunks that were computed.  Those of `done` whose requests have not ended count as computed,
        without their drafts.
        """
        kept = [chunk for chunk in done if chunk.sequence in self.states]
        self.scheduler.charge(chunk for chunk in computed if chunk not in kept)
        self.scheduler.commit(kept)

    def accept_draft(self, state: RequestState, count: int) -> None:
        """Count `count` tokens of a draft, which were computed with the last chunk, as computed."""
        self.scheduler.advance(state.sequence, count)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Let the requests of a step begin, and the followers of prompts that it completes."""
        places = self.scheduler.free_places
        for chunk in chunks:
            state = self.states[chunk.sequence]
            state.begin()
            if chunk.is_last and state.followers:
                self._drop_aborted(state)
                if state.request.max_tokens:
                    self._split_followers(state, places)
                    places -= len(state.followers)
                for follower in state.followers:
                    follower.begin()

    def start_followers(self, state: RequestState) -> list[RequestState]:
        """The prompt of `state` is computed: start its followers.  Returns all of the group, the leader first."""
        if self._leaders.get(state.request.group) is state:
            del self._leaders[state.request.group]
        followers, state.followers = state.followers, []
        for follower in followers:
            follower.started = True
            self.states[follower.sequence] = follower
            self.scheduler.fork(state.sequence, follower.sequence)
        return [state, *followers]

    def replace_beams(self, state: RequestState, step: SearchStep) -> None:
        """Continue a search with the beams of `step`.

        The first beam that continues a parent takes over its sequence; the others take unused sequences, or new forks.
        """
        search = state.search
        assert search is not None
        before, after = search.beams, list[Beam]()
        kept = {choice.beam for choice, _ in step.continuations}
        spare = [beam.sequence for index, beam in enumerate(before) if index not in kept]
        for choice, token_scores in step.continuations:
            parent, processor = before[choice.beam].sequence, before[choice.beam].processor
            if choice.beam in kept:
                kept.remove(choice.beam)
                sequence = parent
            elif spare:
                sequence = spare.pop()
                sequence.tokens = list(parent.tokens)
                self.scheduler.copy_progress(sequence, parent)
            else:
                sequence = parent.copy_uncomputed()
                self.states[sequence] = state
                self.scheduler.fork_beam(parent, sequence)
            if processor is not None and sequence is not parent:
                processor = processor.fork()
            after.append(Beam(sequence, choice.score, token_scores, processor=processor))
        for sequence in spare:
            self.scheduler.remove(sequence)
            del self.states[sequence]
        for beam, (choice, _) in zip(after, step.continuations, strict=True):
            beam.sequence.tokens.append(choice.token)
            if beam.processor is not None:
                beam.processor.push(choice.token)
            self.scheduler.requeue(beam.sequence)
        search.beams = after

    def remove(self, state: RequestState) -> None:
        """Remove a request.  If it led a group, its first follower leads from now on."""
        for sequence in state.sequences:
            self.scheduler.remove(sequence)
            del self.states[sequence]
        for handle in state.handles:
            if handle:
                del self._by_handle[handle]
        if self._leaders.get(state.request.group) is state:
            del self._leaders[state.request.group]
        self._drop_aborted(state)
        if state.followers:
            first, *others = state.followers
            first.followers = others
            self._make_leader(first)

    def check(self) -> None:
        """Assert that no block is leaked and no ended request is kept."""
        self.scheduler.check()
        assert self.states or not (self._by_handle or self._leaders), "a request is kept that has no sequence"

    def _drop_aborted(self, leader: RequestState) -> None:
        leader.followers = [follower for follower in leader.followers if any(follower.handles)]

    def _split_followers(self, leader: RequestState, count: int) -> None:
        """Leave `leader` its first `count` followers.  The first of the others leads these, as the next of its line."""
        if len(leader.followers) <= count:
            return
        first, *others = leader.followers[count:]
        del leader.followers[count:]
        first.followers = others
        self._leaders[leader.request.group] = first
        self.states[first.sequence] = first
        self.scheduler.add_after(leader.sequence, first.sequence)

    def _make_leader(self, state: RequestState) -> None:
        """Schedule a request, and let later requests of its group follow it."""
        if state.request.group:
            self._leaders[state.request.group] = state
        self.states[state.sequence] = state
        self.scheduler.add(state.sequence)
