"""Memory for log-probabilities: claimed before the engine computes those of prompts, and when those of generated tokens
are read; released when they were sent.
"""

from collections.abc import Sequence

from ..core.errors import BodyTooLarge, Overloaded
from ..core.request import Generate
from ..resources.request_memory import MemoryClaim
from .answer_delta import TokenLogprobs

SCORE_BYTES = 700  # bytes of each log-probability: from the engine, as a Python object, and as JSON
TOKEN_TEXT_BYTES = 32  # bytes of each byte of a token: its text with escapes, its number in a list, and both as JSON
CLAIM_STEP = 4096  # log-probabilities for which memory is claimed or released at a time


class ScoreClaim:
    """The part of a request's `claim` that is for the log-probabilities of its answers."""

    def __init__(self, claim: MemoryClaim) -> None:
        self._claim = claim
        self._needed = self._claimed = 0  # bytes
        self._expected = 0  # of `_needed`: for what the engine has not given yet

    def add(self, tokens: Sequence[TokenLogprobs], times: int = 1) -> None:
        """Claim memory for tokens, which are written `times` times. Raises Overloaded if there is too
        little, and BodyTooLarge if there is never as much."""
        self._grow(times * score_memory(tokens))

    def expect(self, requests: Sequence[Generate]) -> None:
        """Claim memory for the log-probabilities of prompts, all of which may wait for a client. Raises as
        `add` does."""
        size = sum(prompt_memory(request, len(request.tokens)) for request in requests)
        self._expected += size
        self._grow(size)

    def receive(self, request: Generate, count: int) -> None:
        """The log-probabilities of `count` tokens of the prompt are expected no more: they are added now."""
        size = min(prompt_memory(request, count), self._expected)
        self._expected -= size
        self._needed -= size

    def _grow(self, size: int) -> None:
        self._needed += size
        missing = self._needed - self._claimed
        if missing < SCORE_BYTES * CLAIM_STEP:
            return
        try:
            self._claim.grow(missing, "the answer")
        except (BodyTooLarge, Overloaded) as error:
            message = "the log-probabilities of the answer take more memory than is left for requests"
            advice = "ask for fewer of them, for fewer tokens or answers, or for a stream"
            raise type(error)(
                f"logprobs: {message}; {advice}", param="logprobs", retry_after=error.retry_after
            ) from error
        self._claimed = self._needed

    def remove(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Release the memory of tokens that are no longer kept."""
        self._needed -= score_memory(tokens)
        spare = self._claimed - self._needed
        if spare >= SCORE_BYTES * CLAIM_STEP:
            self._claim.shrink(spare)
            self._claimed = self._needed


def prompt_memory(request: Generate, count: int) -> int:
    """Bytes that the log-probabilities of `count` tokens of its prompt take, without the tokens' texts; 0 if it asks
    for none.
    """
    return SCORE_BYTES * count * (1 + request.prompt_logprobs)


def score_memory(tokens: Sequence[TokenLogprobs]) -> int:
    """Bytes that the log-probabilities of tokens and of their alternatives take, at most, with the tokens' texts."""
    sizes = (len(each.token.data) + sum(len(data) for data, _, _ in each.likeliest) for each in tokens)
    return SCORE_BYTES * count_scores(tokens) + TOKEN_TEXT_BYTES * sum(sizes)


def count_scores(tokens: Sequence[TokenLogprobs]) -> int:
    """The number of log-probabilities: of the tokens and of their alternatives."""
    return len(tokens) + sum(len(each.likeliest) for each in tokens)
