"""A request to continue tokens, and how far it has come.

Knows neither scheduling nor logits.  The one idea: whatever the next token depends on besides the network (chance, what
was said before, what may be said) belongs to the one who talks, so nobody's neighbours change an answer.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from ..core.guide import Walk
from ..core.request import Done, Generate
from .beam_groups import Search
from .logits_processors import Shape, shaped
from .scheduler import Sequence
from .speculation import Trail
from .worker import Ticket


@dataclass(eq=False, slots=True)
class Talk:
    """`tickets` want its answers: one, or as many of a search's best, in order.  `followers` wait for its prompt."""

    request: Generate
    sequence: Sequence
    random: Random
    tickets: list[Ticket | None]
    submitted: float
    shape: Shape | None = None
    walk: Walk | None = None
    trail: Trail | None = None  # once it talks
    search: Search | None = None
    followers: list["Talk"] = field(default_factory=list)
    uniforms: deque[float] = field(default_factory=deque)  # what its next tokens are drawn with
    started: bool = False
    spoke: float = 0.0  # when its last token was drawn
    scored: int = 0  # tokens of its prompt that have been scored, or need not be
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, ticket: Ticket) -> "Talk":
        request = ticket.request
        assert isinstance(request, Generate)
        terms, scoring = request.terms, request.prompt_logprobs >= 0
        shape = Shape(request) if shaped(request.sampling) else None
        sequence = Sequence(
            list(request.tokens),
            terms.owner,
            terms.priority,
            terms.deadline,
            request.adapter,
            f"{request.salt} {request.source}" if request.source else request.salt,
            request.source,
            scored=len(request.tokens) if scoring else 0,
        )
        return cls(
            request,
            sequence,
            Random(request.sampling.seed),
            [ticket],
            ticket.submitted,
            shape=shape,
            walk=request.guide.begin() if request.guide is not None else None,
            search=Search(request, sequence, shape) if request.beams is not None else None,
            scored=1 if scoring else len(request.tokens),
        )

    @property
    def completed(self) -> int:
        return len(self.sequence.tokens) - len(self.request.tokens)

    @property
    def sequences(self) -> list[Sequence]:
        return [self.sequence] if self.search is None else [beam.sequence for beam in self.search.beams]

    @property
    def left(self) -> int:
        """How many more tokens it may say."""
        return self.request.max_tokens - self.completed

    @property
    def may_draft(self) -> bool:
        return self.walk is None and self.search is None

    def done(self, reason: Literal["stop", "length"], token: int = -1) -> Done:
        """It ends here, by its length or by a stop `token` if by any: that counts, but is not said."""
        completed = self.completed + (token >= 0)
        return Done(reason, self.request.prompt_tokens, completed, self.sequence.cached, token)

    def uniform(self, ahead: int) -> float:
        """The number that decides about the token `ahead` of the next: one a token, however often a step is tried."""
        while len(self.uniforms) <= ahead:
            self.uniforms.append(self.random.random())
        return self.uniforms[ahead]

    def say(self, token: int) -> None:
        self.uniform(0)
        self.uniforms.popleft()
        self.sequence.tokens.append(token)
        if self.shape is not None:
            self.shape.push(token)
        if self.walk is not None:
            self.walk.advance(token)


@dataclass(slots=True)
class Times:
    """Seconds, collected over one step; and tokens of drafts that came."""

    queue: list[float] = field(default_factory=list)
    first_token: list[tuple[float, str]] = field(default_factory=list)  # and the trace it is of
    inter_token: list[float] = field(default_factory=list)
    accepted: int = 0
