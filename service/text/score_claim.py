"""Memory for log-probabilities: it is claimed when they are read, and released when they were sent."""

from collections.abc import Sequence

from ..core.errors import BodyTooLarge, Overloaded
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

    def add(self, tokens: Sequence[TokenLogprobs], times: int = 1) -> None:
        """Claim memory for tokens, which are written `times` times. Raises Overloaded if there is too little."""
        self._needed += times * score_memory(tokens)
        missing = self._needed - self._claimed
        if missing < SCORE_BYTES * CLAIM_STEP:
            return
        try:
            self._claim.grow(missing, "the answer")
        except (BodyTooLarge, Overloaded) as error:
            message = "the log-probabilities of the answer take more memory than is left for requests"
            advice = "ask for fewer of them, for fewer tokens or answers, or for a stream"
            raise Overloaded(f"logprobs: {message}; {advice}", param="logprobs", retry_after=1) from error
        self._claimed = self._needed

    def remove(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Release the memory of tokens that are no longer kept."""
        self._needed -= score_memory(tokens)
        spare = self._claimed - self._needed
        if spare >= SCORE_BYTES * CLAIM_STEP:
            self._claim.shrink(spare)
            self._claimed = self._needed


def score_memory(tokens: Sequence[TokenLogprobs]) -> int:
    """Bytes that the log-probabilities of tokens and of their alternatives take, at most, with the tokens' texts."""
    sizes = (len(each.token.data) + sum(len(data) for data, _, _ in each.likeliest) for each in tokens)
    return SCORE_BYTES * count_scores(tokens) + TOKEN_TEXT_BYTES * sum(sizes)


def count_scores(tokens: Sequence[TokenLogprobs]) -> int:
    """The number of log-probabilities: of the tokens and of their alternatives."""
    return len(tokens) + sum(len(each.likeliest) for each in tokens)
