"""Who talks: by sequence, by ticket, and by the group that shares a prompt.

Knows neither logits nor steps.  The one idea: of a group one leads, and computes the prompt; the others follow, outside
of every line, until it is computed, and then go on from there (service.engine.scheduler forks).  Whoever leads may
leave: the next one leads.
"""

from ..core.request import Generate
from .beam_groups import Beam, Turn
from .request_state import Talk
from .scheduler import Scheduler, Sequence
from .worker import Ticket


class Company:
    """`talks` are those who have something to compute, a search once for each of its beams."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.talks: dict[Sequence, Talk] = {}
        self._scheduler = scheduler
        self._by_ticket: dict[Ticket, Talk] = {}
        self._leaders: dict[str, Talk] = {}  # of groups, until the prompt is computed

    def talk_of(self, ticket: Ticket) -> Talk | None:
        return self._by_ticket.get(ticket)

    def enter(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, Generate)
        talk = leader = self._leaders.get(request.group)
        if talk is None or talk.search is None:
            talk = Talk.of(ticket)
        if leader is None:
            self._lead(talk)
        elif leader is talk:
            leader.tickets.append(ticket)
        else:
            leader.followers.append(talk)
        self._by_ticket[ticket] = talk

    def leave(self, ticket: Ticket) -> None:
        """It is wanted no more; one that is not here is no error."""
        talk = self._by_ticket.pop(ticket, None)
        if talk is None:
            return
        talk.tickets[talk.tickets.index(ticket)] = None
        leader = self._leaders.get(talk.request.group)
        if leader is not None and talk in leader.followers:
            leader.followers.remove(talk)
        elif not any(talk.tickets):
            self.remove(talk)

    def join(self, talk: Talk) -> list[Talk]:
        """Its prompt is computed: those who waited for it go on from there.  All of them, it first."""
        if self._leaders.get(talk.request.group) is talk:
            del self._leaders[talk.request.group]
        followers, talk.followers = talk.followers, []
        for follower in followers:
            follower.started = True
            self.talks[follower.sequence] = follower
            self._scheduler.fork(talk.sequence, follower.sequence)
        return [talk, *followers]

    def fan(self, talk: Talk, turn: Turn) -> None:
        """The next beams: the first after each goes on in its place, the others begin where it is."""
        search = talk.search
        assert search is not None
        before, after = search.beams, list[Beam]()
        kept = {choice.beam for choice, _ in turn.going}
        spare = [beam.sequence for index, beam in enumerate(before) if index not in kept]
        for choice, scored in turn.going:
            parent, shape = before[choice.beam].sequence, before[choice.beam].shape
            if choice.beam in kept:
                kept.remove(choice.beam)
                sequence = parent
            elif spare:
                sequence = spare.pop()
                sequence.tokens = list(parent.tokens)
                self._scheduler.follow(sequence, parent)
            else:
                sequence = parent.twin()
                self.talks[sequence] = talk
                self._scheduler.fork(parent, sequence)
            if shape is not None and sequence is not parent:
                shape = shape.fork()
            after.append(Beam(sequence, choice.score, scored, shape=shape))
        for sequence in spare:
            self._scheduler.remove(sequence)
            del self.talks[sequence]
        for beam, (choice, _) in zip(after, turn.going, strict=True):
            beam.sequence.tokens.append(choice.token)
            if beam.shape is not None:
                beam.shape.push(choice.token)
        search.beams = after

    def remove(self, talk: Talk) -> None:
        """It is here no more.  Of those who waited for its prompt the first goes on with it."""
        for sequence in talk.sequences:
            self._scheduler.remove(sequence)
            del self.talks[sequence]
        for ticket in talk.tickets:
            if ticket:
                del self._by_ticket[ticket]
        if self._leaders.get(talk.request.group) is talk:
            del self._leaders[talk.request.group]
        if talk.followers:
            first, *others = talk.followers
            first.followers = others
            self._lead(first)

    def check(self) -> None:
        """Assert that nobody is kept who has left."""
        assert self.talks or not (self._by_ticket or self._leaders), "somebody waits whom nothing is computed for"

    def _lead(self, talk: Talk) -> None:
        """In line, and those of its group after it."""
        if talk.request.group:
            self._leaders[talk.request.group] = talk
        self.talks[talk.sequence] = talk
        self._scheduler.add(talk.sequence)
