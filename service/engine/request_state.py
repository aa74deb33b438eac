"""The state of one generation request: all that its next token depends on besides the network.

Random numbers, tokens so far, logits processor and guide belong to the request alone, so its neighbours in a batch
never change its answer.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from ..core.guide import GuideState
from ..core.request import Done, Generate
from .beam_groups import BeamSearch
from .logits_processors import LogitsProcessor, SharedRules, needs_processing
from .scheduler import TokenSequence
from .speculation import DraftState
from .worker import RequestHandle


@dataclass(eq=False, slots=True)
class RequestState:
    """`handles` receive its events: one, or as many as the best answers of a search, in order.

    `followers` are requests with the same prompt, which wait until it is computed.
    """

    request: Generate
    sequence: TokenSequence
    random: Random
    handles: list[RequestHandle | None]
    submitted: float
    processor: LogitsProcessor | None = None
    guide_state: GuideState | None = None
    draft_state: DraftState | None = None  # set when decoding starts
    search: BeamSearch | None = None
    followers: list["RequestState"] = field(default_factory=list)
    uniforms: deque[float] = field(default_factory=deque)  # random numbers of its next tokens
    started: bool = False
    last_token_at: float = 0.0  # when its last token was sampled
    scored_tokens: int = 0  # prompt tokens that have been scored, or need not be
    prompt_scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    @classmethod
    def create(cls, handle: RequestHandle, rules: SharedRules) -> "RequestState":
        request = handle.request
        assert isinstance(request, Generate)
        terms, scoring = request.terms, request.prompt_logprobs >= 0
        processor = LogitsProcessor(request, rules.find(request)) if needs_processing(request.sampling) else None
        sequence = TokenSequence(
            list(request.tokens),
            terms.owner,
            terms.priority,
            terms.deadline,
            request.adapter,
            f"{request.salt} {request.source}" if request.source else request.salt,
            request.source,
            scored_prefix=len(request.tokens) if scoring else 0,
            width=1 if request.beams is None else request.beams.width,
        )
        return cls(
            request,
            sequence,
            Random(request.sampling.seed),
            [handle],
            handle.submitted,
            processor=processor,
            guide_state=request.guide.new_state() if request.guide is not None else None,
            search=BeamSearch(request, sequence, processor) if request.beams is not None else None,
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
        """How many more tokens may be generated."""
        return self.request.max_tokens - self.generated_count

    @property
    def may_draft(self) -> bool:
        return self.guide_state is None and self.search is None

    def done_event(self, reason: Literal["stop", "length"], token: int = -1) -> Done:
        """The final event; `token` is the stop token, if one ended it: it counts, but is not part of the answer."""
        completed = self.generated_count + (token >= 0)
        return Done(reason, self.request.prompt_tokens, completed, self.sequence.cached_tokens, token)

    def uniform_at(self, ahead: int) -> float:
        """The random number for the token `ahead` positions after the next.  It stays the same if a step is tried
        again.
        """
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
    """Seconds measured in one step, and the number of accepted draft tokens."""

    queue: list[float] = field(default_factory=list)
    first_token: list[tuple[float, str]] = field(default_factory=list)  # with the id of its trace
    inter_token: list[float] = field(default_factory=list)
    accepted: int = 0
