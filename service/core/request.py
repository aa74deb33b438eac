"""What is asked of the engine and the events that answer: frozen, plain Python values.  No tensor, no text, no HTTP."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from .errors import PolyheadError
from .guide import Guide

Task = Literal["generate", "classify", "rank", "embed", "tag", "span", "fill"]
WorkerTask = Literal[Task, "explain"]  # what a worker does: the task of its model, or it says why
ExplainMethod = Literal[
    "attention", "attention_rollout", "attention_flow", "gradient_x_input", "integrated_gradients", "occlusion"
]
Goal = tuple[tuple[int, int], ...]  # cells (row, column) of a head's raw scores, which are added up
OutputForm = Literal["", "tokens", "words"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn from the logits.

    `temperature` 0 is greedy.  `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 leave all tokens in.  The same `seed`
    gives the same draws whatever else is in the batch.

    A token that was in the prompt or the answer is made less likely by `repetition_penalty` (above 1; Keskar et al.
    2019, arXiv:1909.05858); one of the answer by `presence_penalty`, and for every time by `frequency_penalty`.  `bias`
    is added to the logits of tokens.  Where there are `allowed` tokens, no others come; the last token of a `banned`
    row never comes after the others of it; no `once` tokens in a row come a second time (Paulus et al. 2018,
    arXiv:1705.04304), 0: any may; and nothing ends the answer before there are `min_tokens`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a request is served.

    The engine is shared fairly between `owner`s; of what waits, higher `priority` goes first; after `deadline`
    (`time.perf_counter`, seconds) no answer is wanted any more.  `trace` is the id of the trace it belongs to, 32 hex
    digits (W3C Trace Context); empty: none that is kept.
    """

    owner: str = ""
    priority: int = 0
    deadline: float = math.inf
    trace: str = ""


DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class BeamSearchOptions:
    """Search for the likeliest answers, `width` at a time, instead of drawing one.

    A finished answer's log-probability is divided by its length to the power `length_penalty`.  `early` ends as soon
    as there are `width` finished ones; otherwise when none under way looks better than the worst of them, as long as it
    is now, or, if `patient`, as long as it may become.

    Of what answers begin with, `given` tokens count as said.  At the last place one of the `closing` tokens comes, if
    there are any.  `odds`: what may come has all the odds, not what is left of them.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    never_stop_early: bool = False
    prefix_length: int = 0
    forced_end_tokens: tuple[int, ...] = ()
    renormalize: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """Continue `tokens` by at most `max_tokens`, ending early at one of `stop_tokens` (itself not reported).

    Requests of one `group` have the same `tokens`, which are computed once; of one with `beams` they are the best
    answers of one search, in order.  `guide` says what the answer must look like.  With `prompt_logprobs` the prompt's
    own tokens are scored first, as `logprobs` says; `max_tokens` 0 asks for that alone.  Only requests of the same
    `salt` find each other's prefixes stored.

    A model that reads one sequence and writes another reads `source`, and `tokens` is what stands before its answer.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int = -1  # -1: none; 0: of the drawn token; n: and of the n likeliest
    terms: Terms = DEFAULT_TERMS
    adapter: int = 0  # of the worker's, by its number; 0: none
    group: str = ""
    beams: BeamSearchOptions | None = None
    guide: Guide | None = None
    prompt_logprobs: int = -1
    salt: str = ""
    source: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """How many were asked about."""
        return len(self.source or self.tokens)

    @property
    def option_tokens(self) -> Iterator[int]:
        """Tokens that it names besides its prompt."""
        sampling = self.sampling
        return chain(self.stop_tokens, (token for token, _ in sampling.bias), sampling.allowed, *sampling.banned)


@dataclass(frozen=True, slots=True)
class Encode:
    """Read `tokens` once and answer with what the checkpoint's head makes of them.

    `raw` leaves out the head's closing function (softmax or sigmoid of a classifier, L2 normalisation of an
    embedding).  `unit` scales an embedding to length one even where the checkpoint does not.  `dimensions` keeps the
    first so many of an embedding, before normalisation; 0 keeps all.

    `rows` are the tokens whose states the head reads, ascending; empty: all.  A head that answers for each token
    answers for these.  Of what may fill such a place, the `top_k` likeliest are told, of all words or of `targets`.

    `form` asks for something else of the head: "tokens" for the state of each token where it would make one vector of
    them, "words" for the weight of each word of the vocabulary where it would fill in masks (SPLADE, Formal et al.
    2021, arXiv:2109.10086).
    """

    id: str
    tokens: tuple[int, ...]
    segments: tuple[int, ...] = ()  # as long as tokens, or empty: all zero
    form: OutputForm = ""
    raw: bool = False
    unit: bool = False
    dimensions: int = 0
    rows: tuple[int, ...] = ()
    top_k: int = 5
    targets: tuple[int, ...] = ()
    terms: Terms = DEFAULT_TERMS
    adapter: int = 0  # as in Generate; whose head reads, too

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ExplainTextRequest:
    """Show what `tokens` rest on in the network of a model, by one `method`; see models.explain.

    What is explained are `goals`: each a sum of raw scores of the head (of a class; of a token's label; of a span's
    start and end; of the word in a token's place; of the token that comes next).  Of weights, those of `layers` and
    `heads` are shown; empty: all.  `baseline` is the token that stands for nothing, -1: no vector at all; rows that are
    `kept` are themselves in it.  A model that reads one sequence and writes another has read `source` and written
    `tokens`, and rows are counted from the first of the source.  An embedding is compared with that of `beside`.
    """

    id: str
    tokens: tuple[int, ...]
    method: ExplainMethod
    segments: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    goals: tuple[Goal, ...] = ()
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    steps: int = 50  # of the path of integrated gradients
    baseline: int = -1
    kept_rows: frozenset[int] = frozenset()
    window: int = 1  # tokens that occlusion hides together
    compared_tokens: tuple[int, ...] = ()
    terms: Terms = DEFAULT_TERMS
    adapter: int = 0  # the network that explains is the adapter's own

    @property
    def prompt_tokens(self) -> int:
        return len(self.source) + len(self.tokens)


Request = Generate | Encode | ExplainTextRequest


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One more generated token; `logprob` and `top` (token, logprob) only where asked for.

    `cached` of the prompt's tokens were found in the cache.
    """

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the prompt's tokens from the second on score, each after those before it: (logprob, top) as in Token."""

    scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What the head says of an encoded text: a score per label, one relevance, or a vector."""

    values: list[float]


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What it says of each token asked for: a row of scores, [rows, columns] float32.

    As one piece of memory: thousands of Python floats a text would hold up whoever makes, passes on and frees them.
    """

    scores: "memoryview[float]"


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """What may stand in the place of each token asked for: (token, probability or logit), likeliest first."""

    candidates: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """How much rows look at others, [layers, heads, rows, columns] float32; of a rollout or flow one of each."""

    kind: Literal["self", "encoder", "decoder", "cross", "rollout", "flow"]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: "memoryview[float]"


@dataclass(frozen=True, slots=True)
class Attribution:
    """What of a goal's `score` each token is worth, [T] float32; `baseline` is the score of nothing, nan where no such
    thing was computed."""

    values: "memoryview[float]"
    score: float
    baseline: float


@dataclass(frozen=True, slots=True)
class ExplanationResult:
    """What Explain asked for.  `answering`: the rows that the head reads."""

    weights: tuple[AttentionWeights, ...]
    attributions: tuple[Attribution, ...]
    head_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that was answered; `token` is the stop token that ended it, if one did."""

    reason: Literal["stop", "length", "encoded", "explained"]
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    token: int = -1


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that was not."""

    error: PolyheadError


Event = GeneratedToken | PromptScores | HeadOutput | TokenOutputs | TokenCandidates | ExplanationResult | Done | Failed
