"""A request to continue tokens, and how far it has come.

Knows neither scheduling nor logits.  The one idea: whatever the next token depends on besides the network (chance, what
was said before, what may be said) belongs to the one who talks, so nobody's neighbours change an answer.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from ..core.guide import GuideState
from ..core.request import Done, Generate
from .beam_groups import BeamSearch
from .logits_processors import LogitsProcessor, needs_processing
from .scheduler import TokenSequence
from .speculation import DraftState
from .worker import RequestHandle


@dataclass(eq=False, slots=True)
class RequestState:
    """`tickets` want its answers: one, or as many of a search's best, in order.  `followers` wait for its prompt."""

    request: Generate
    sequence: TokenSequence
    random: Random
    handles: list[RequestHandle | None]
    submitted: float
    processor: LogitsProcessor | None = None
    guide_state: GuideState | None = None
    draft_state: DraftState | None = None  # once it talks
    search: BeamSearch | None = None
    followers: list["RequestState"] = field(default_factory=list)
    uniforms: deque[float] = field(default_factory=deque)  # what its next tokens are drawn with
    started: bool = False
    last_token_at: float = 0.0  # when its last token was drawn
    scored_tokens: int = 0  # tokens of its prompt that have been scored, or need not be
    prompt_scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    @classmethod
    def create(cls, ticket: RequestHandle) -> "RequestState":
        request = ticket.request
        assert isinstance(request, Generate)
        terms, scoring = request.terms, request.prompt_logprobs >= 0
        shape = LogitsProcessor(request) if needs_processing(request.sampling) else None
        sequence = TokenSequence(
            list(request.tokens),
            terms.owner,
            terms.priority,
            terms.deadline,
            request.adapter,
            f"{request.salt} {request.source}" if request.source else request.salt,
            request.source,
            scored_prefix=len(request.tokens) if scoring else 0,
        )
        return cls(
            request,
            sequence,
            Random(request.sampling.seed),
            [ticket],
            ticket.submitted,
            processor=shape,
            guide_state=request.guide.new_state() if request.guide is not None else None,
            search=BeamSearch(request, sequence, shape) if request.beams is not None else None,
            scored_tokens=1 if scoring else len(request.tokens),
        )

    @property
    def generated_count(self) -> int:
        return len(self.sequence.tokens) - len(self.request.tokens)

    @property
    def sequences(self) -> list[TokenSequence]:
        return [self.sequence] if self.search is None else [beam.sequence for beam in self.search.beams]

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens it may say."""
        return self.request.max_tokens - self.generated_count

    @property
    def may_draft(self) -> bool:
        return self.guide_state is None and self.search is None

    def done_event(self, reason: Literal["stop", "length"], token: int = -1) -> Done:
        """It ends here, by its length or by a stop `token` if by any: that counts, but is not said."""
        completed = self.generated_count + (token >= 0)
        return Done(reason, self.request.prompt_tokens, completed, self.sequence.cached_tokens, token)

    def uniform_at(self, ahead: int) -> float:
        """The number that decides about the token `ahead` of the next: one a token, however often a step is tried."""
        while len(self.uniforms) <= ahead:
            self.uniforms.append(self.random.random())
        return self.uniforms[ahead]

    def append_token(self, token: int) -> None:
        self.uniform_at(0)
        self.uniforms.popleft()
        self.sequence.tokens.append(token)
        if self.processor is not None:
            self.processor.push(token)
        if self.guide_state is not None:
            self.guide_state.advance(token)


@dataclass(slots=True)
class StepTimes:
    """Seconds, collected over one step; and tokens of drafts that came."""

    queue: list[float] = field(default_factory=list)
    first_token: list[tuple[float, str]] = field(default_factory=list)  # and the trace it is of
    inter_token: list[float] = field(default_factory=list)
    accepted: int = 0
