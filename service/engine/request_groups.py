"""The requests that are being generated: by sequence, by handle, and in groups that share a prompt.

Of a group, the leader computes the prompt.  The followers are not scheduled until it is computed, then they start from
a fork of its sequence.  If the leader is aborted, the next request leads.
"""

from ..core.request import Generate
from .beam_groups import Beam, SearchStep
from .request_state import RequestState
from .scheduler import Scheduler, TokenSequence
from .worker import RequestHandle


class RequestGroups:
    """`states` maps each scheduled sequence to its request; a beam search has one entry for each of its beams."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.states: dict[TokenSequence, RequestState] = {}
        self._scheduler = scheduler
        self._by_handle: dict[RequestHandle, RequestState] = {}
        self._leaders: dict[str, RequestState] = {}  # by group, until the prompt is computed

    def state_of(self, ticket: RequestHandle) -> RequestState | None:
        return self._by_handle.get(ticket)

    def add(self, ticket: RequestHandle) -> None:
        request = ticket.request
        assert isinstance(request, Generate)
        talk = leader = self._leaders.get(request.group)
        if talk is None or talk.search is None:
            talk = RequestState.create(ticket)
        if leader is None:
            self._make_leader(talk)
        elif leader is talk:
            leader.handles.append(ticket)
        else:
            leader.followers.append(talk)
        self._by_handle[ticket] = talk

    def abort(self, ticket: RequestHandle) -> None:
        """Remove one handle.  An unknown one is no error."""
        talk = self._by_handle.pop(ticket, None)
        if talk is None:
            return
        talk.handles[talk.handles.index(ticket)] = None
        leader = self._leaders.get(talk.request.group)
        if leader is not None and talk in leader.followers:
            leader.followers.remove(talk)
        elif not any(talk.handles):
            self.remove(talk)

    def start_followers(self, talk: RequestState) -> list[RequestState]:
        """The prompt of `talk` is computed: start its followers.  Returns all of the group, the leader first."""
        if self._leaders.get(talk.request.group) is talk:
            del self._leaders[talk.request.group]
        followers, talk.followers = talk.followers, []
        for follower in followers:
            follower.started = True
            self.states[follower.sequence] = follower
            self._scheduler.fork(talk.sequence, follower.sequence)
        return [talk, *followers]

    def replace_beams(self, talk: RequestState, turn: SearchStep) -> None:
        """Continue a search with the beams of `turn`.

        The first beam that continues a parent takes over its sequence; the others take unused sequences, or new forks.
        """
        search = talk.search
        assert search is not None
        before, after = search.beams, list[Beam]()
        kept = {choice.beam for choice, _ in turn.continuations}
        spare = [beam.sequence for index, beam in enumerate(before) if index not in kept]
        for choice, scored in turn.continuations:
            parent, shape = before[choice.beam].sequence, before[choice.beam].processor
            if choice.beam in kept:
                kept.remove(choice.beam)
                sequence = parent
            elif spare:
                sequence = spare.pop()
                sequence.tokens = list(parent.tokens)
                self._scheduler.copy_progress(sequence, parent)
            else:
                sequence = parent.copy_uncomputed()
                self.states[sequence] = talk
                self._scheduler.fork(parent, sequence)
            if shape is not None and sequence is not parent:
                shape = shape.fork()
            after.append(Beam(sequence, choice.score, scored, processor=shape))
        for sequence in spare:
            self._scheduler.remove(sequence)
            del self.states[sequence]
        for beam, (choice, _) in zip(after, turn.continuations, strict=True):
            beam.sequence.tokens.append(choice.token)
            if beam.processor is not None:
                beam.processor.push(choice.token)
        search.beams = after

    def remove(self, talk: RequestState) -> None:
        """Remove a request.  If it led a group, its first follower leads from now on."""
        for sequence in talk.sequences:
            self._scheduler.remove(sequence)
            del self.states[sequence]
        for ticket in talk.handles:
            if ticket:
                del self._by_handle[ticket]
        if self._leaders.get(talk.request.group) is talk:
            del self._leaders[talk.request.group]
        if talk.followers:
            first, *others = talk.followers
            first.followers = others
            self._make_leader(first)

    def check(self) -> None:
        """Assert that no ended request is kept."""
        assert self.states or not (self._by_handle or self._leaders), "a request is kept that has no sequence"

    def _make_leader(self, talk: RequestState) -> None:
        """Schedule a request, and let later requests of its group follow it."""
        if talk.request.group:
            self._leaders[talk.request.group] = talk
        self.states[talk.sequence] = talk
        self._scheduler.add(talk.sequence)
