"""The state of one generation request: all that its next token depends on besides the network.

Random numbers, tokens so far, logits processor and guide belong to the request alone, so its neighbours in a batch
never change its answer.  What takes memory is created when the request is first computed: a call may have thousands of
answers that wait.
"""

from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np
from numpy.typing import NDArray

from ..concurrency.outcome import Failure, attempt
from ..core.errors import PolyheadError
from ..core.guide import GuideState
from ..core.request import AnswerEnd, Done, Generate
from .logits_processors import LogitsProcessor, SharedRules, TokenRules, needs_processing
from .request_beams import BeamSearch
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
    handles: list[RequestHandle | None]
    submitted: float
    rules: TokenRules | None = None
    processor: LogitsProcessor | None = None  # set by `begin`, as the next
    guide_state: GuideState | None = None
    has_begun: bool = False
    draft_state: DraftState | None = None  # set when decoding starts
    search: BeamSearch | None = None
    followers: list["RequestState"] = field(default_factory=list)
    random: Random | None = None  # set when the first random number is needed
    uniforms: list[float] = field(default_factory=list)  # random numbers of its next tokens
    started: bool = False
    last_token_at: float = 0.0  # when its last token was sampled
    scored_tokens: int = 0  # prompt tokens that have been scored, or need not be
    prompt_scores: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)

    @classmethod
    def create(cls, handle: RequestHandle, rules: SharedRules) -> "RequestState":
        request = handle.request
        assert isinstance(request, Generate)
        terms, scoring = request.terms, request.prompt_logprobs >= 0
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
            [handle],
            handle.submitted,
            rules=rules.find(request) if needs_processing(request.sampling) else None,
            search=BeamSearch(request, sequence) if request.beams is not None else None,
            scored_tokens=1 if scoring else len(request.tokens),
        )

    def begin(self) -> None:
        """Create what its tokens are sampled by, before it is first computed.  Does nothing if it has begun."""
        if self.has_begun:
            return
        if self.rules is not None:
            self.processor = LogitsProcessor(self.request, self.rules)
        if self.search is not None:
            self.search.beams[0].processor = self.processor
        if self.request.guide is not None:
            guide_state = attempt(partial(self.request.guide.new_state, self.request.terms.owner))
            if not isinstance(guide_state, Failure):
                self.guide_state = guide_state
            elif isinstance(guide_state.error, PolyheadError):
                self.guide_state = FailedGuideState(guide_state.error)
            else:
                raise guide_state.error
        self.has_begun = True

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
        return self.request.guide is None and self.search is None

    def done_event(self, reason: AnswerEnd, token: int = -1) -> Done:
        """The final event; `token` is the stop token, if one ended it: it counts, but is not part of the answer."""
        completed = self.generated_count + (token >= 0)
        return Done(reason, self.request.prompt_tokens, completed, self.sequence.cached_tokens, token)

    def uniform_at(self, ahead: int) -> float:
        """The random number for the token `ahead` positions after the next.  It stays the same if a step is tried
        again.
        """
        self.random = self.random or Random(self.request.sampling.seed)
        while len(self.uniforms) <= ahead:
            self.uniforms.append(self.random.random())
        return self.uniforms[ahead]

    def append_token(self, token: int) -> None:
        self.uniform_at(0)
        del self.uniforms[0]
        self.sequence.tokens.append(token)
        if self.processor is not None:
            self.processor.push(token)
        if self.guide_state is not None:
            self.guide_state.advance(token)


@dataclass(frozen=True, slots=True)
class FailedGuideState:
    """The state of a guide that could not begin: its request fails where the first mask is filled."""

    error: PolyheadError
    is_finished = False

    def fill_mask(self, words: NDArray[np.int32]) -> bool:  # noqa: ARG002
        raise self.error

    def advance(self, token: int) -> None:
        raise AssertionError(f"token {token} was sampled without a mask")

    def forced_tokens(self, *, computes: bool = True) -> list[int]:  # noqa: ARG002
        return []


@dataclass(slots=True)
class StepTimes:
    """Seconds measured in one step, and the number of accepted draft tokens."""

    queue: list[float] = field(default_factory=list)
    first_token: list[tuple[float, str]] = field(default_factory=list)  # with the id of its trace
    inter_token: list[float] = field(default_factory=list)
    accepted: int = 0
