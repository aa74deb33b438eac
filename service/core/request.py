"""The requests to the engine and the events that answer them: frozen, plain Python values, without text or tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from polyhead.models.core.decision_prompt import PromptKind

from .errors import PolyheadError
from .guide import Guide

Task = Literal[
    "generate", "classify", "rank", "choose", "embed", "tag", "span", "fill", "label_spans", "label_texts", "decide"
]
WorkerTask = Literal[Task, "explain"]  # what a worker does: the task of its model, or explanations of it
ExplainMethod = Literal[
    "attention", "attention_rollout", "attention_flow", "gradient_x_input", "integrated_gradients", "occlusion"
]
Goal = tuple[tuple[int, int], ...]  # cells (row, column) of a head's raw scores; their sum is explained
OutputForm = Literal["", "tokens", "words"]
AnswerEnd = Literal["stop", "length"]  # why a generated answer ended
FinishReason = AnswerEnd | Literal["encoded", "explained"]  # why a request ended that succeeded


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled from the logits.

    `temperature` 0 is greedy.  `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 exclude no token.  The same `seed`
    gives the same tokens whatever else is in the batch.

    `repetition_penalty` above 1 makes tokens of the prompt and the answer less likely (Keskar et al. 2019,
    arXiv:1909.05858); `presence_penalty` those of the answer, and `frequency_penalty` once for each occurrence.  `bias`
    is added to the logits of tokens.  If `allowed` is not empty, only these tokens are allowed.  The last token of a
    `banned` sequence is excluded after the others of it.  No n-gram of `no_repeat_ngram_size` tokens occurs twice
    (Paulus et al. 2018, arXiv:1705.04304); 0: no such rule.  The answer does not end before it has `min_tokens`.
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
    """The scheduling terms of a request.

    The engine is shared fairly between `owner`s.  Among waiting requests, higher `priority` goes first.  After
    `deadline` (`time.perf_counter`, seconds) the request expires.  `trace` is the id of its trace, 32 hex digits (W3C
    Trace Context); empty: it is not traced.
    """

    owner: str = ""
    priority: int = 0
    deadline: float = math.inf
    trace: str = ""


DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class BeamSearchOptions:
    """Search for the likeliest answers with `width` beams, instead of sampling one.

    A finished answer's log-probability is divided by its length to the power `length_penalty`.  With `early_stopping`
    the search ends as soon as there are `width` finished answers; otherwise when no beam looks better than the worst of
    them, at its present length or, with `never_stop_early`, at any length that it may reach.

    `prefix_length` tokens at the beginning of answers count as generated.  The last token is one of
    `forced_end_tokens`, if there are any.  `renormalize`: the probabilities of the tokens that remain allowed are
    normalised to a sum of 1.
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

    Requests of one `group` have the same `tokens`, which are computed once; with `beams` they receive the best answers
    of one search, in order.  `guide` constrains the answer.  With `prompt_logprobs` the prompt's own tokens are scored
    first, as `logprobs` says; `max_tokens` 0 asks for that alone.  Only requests with the same `salt` share cached
    prefixes.

    For a model that reads one sequence and writes another, `source` is the sequence that it reads, and `tokens` are the
    first tokens of the decoder.

    With `targets` the `top` of each generated token has the log-probabilities of these tokens, in their order, and not
    of the likeliest ones.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int = -1  # -1: none; 0: of the sampled token; n: and of the n likeliest
    terms: Terms = DEFAULT_TERMS
    adapter: int = 0  # number of an adapter of the worker; 0: none
    group: str = ""
    beams: BeamSearchOptions | None = None
    guide: Guide | None = None
    prompt_logprobs: int = -1
    salt: str = ""
    source: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens, for usage and metrics."""
        return len(self.source or self.tokens)

    @property
    def option_tokens(self) -> Iterator[int]:
        """All tokens that occur in its options."""
        sampling = self.sampling
        biased = (token for token, _ in sampling.bias)
        return chain(self.stop_tokens, self.targets, biased, sampling.allowed, *sampling.banned)


@dataclass(frozen=True, slots=True)
class Encode:
    """Run `tokens` through the network once and answer with the output of the checkpoint's head.

    `raw` leaves out the head's final function (softmax or sigmoid of a classifier, L2 normalisation of an embedding).
    `unit` scales an embedding to length one even where the checkpoint does not.  `dimensions` keeps the first so many
    of an embedding, before normalisation; 0 keeps all.

    `rows` are the tokens whose states the head reads, ascending; empty: all.  A head with an output for each token
    answers for these.  A mask head returns the `top_k` likeliest tokens, of the vocabulary or of `targets`.

    `form` asks for another output: "tokens" for the state of each token instead of one embedding, "words" for the
    weight of each entry of the vocabulary instead of mask candidates (SPLADE, Formal et al. 2021, arXiv:2109.10086).
    `more_forms` asks for further outputs of the same states; each is an event of its own, in this order. With
    `is_query` the text is read by the head for queries, where there is one. No token attends to the last `hidden` ones.

    A head that compares the text with labels reads those at `label_rows`, ascending, and the text at `text_rows`,
    ascending: its words, or neighbouring tokens. A head that answers questions about the text reads their options at
    `label_rows`; `question` is the kind of the questions, where the head distinguishes kinds.
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
    adapter: int = 0  # as in Generate; its head reads the states
    hidden: int = 0
    label_rows: tuple[int, ...] = ()
    text_rows: tuple[int, ...] = ()
    more_forms: tuple[OutputForm, ...] = ()
    is_query: bool = False
    question: PromptKind = "choice"

    @property
    def forms(self) -> tuple[OutputForm, ...]:
        """All outputs that it asks for."""
        return (self.form, *self.more_forms)

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ExplainTextRequest:
    """Explain the output for `tokens` by one `method`; see models.explain.

    `goals` are the scores to explain, each a sum of raw scores of the head (of a class; of a token's label; of a span's
    start and end; of the token in a masked position; of the next token).  Of attention weights, those of `layers` and
    `heads` are returned; empty: all.  `baseline` is the neutral token, -1: a zero vector; `kept_rows` stay unchanged in
    the baseline.  For a model that reads one sequence and writes another, `source` is what it read and `tokens` what it
    wrote, and rows are counted from the start of the source.  An embedding is compared with that of `compared_tokens`.
    `label_rows`, `text_rows` and `question` are as in Encode; the scores of the labels or options are one row. With
    `reports_progress` the result comes after events that say how much of the work is done.
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
    label_rows: tuple[int, ...] = ()
    text_rows: tuple[int, ...] = ()
    question: PromptKind = "choice"
    reports_progress: bool = False
    terms: Terms = DEFAULT_TERMS
    adapter: int = 0  # always 0: an adapter is explained by a network of its own

    @property
    def prompt_tokens(self) -> int:
        return len(self.source) + len(self.tokens)


Request = Generate | Encode | ExplainTextRequest


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One more generated token; `logprob` and `top` (token, logprob) only where asked for.

    `cached_tokens` of the prompt were found in the cache.
    """

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of the prompt's tokens from the second on, each given those before it: (logprob, top) as in
    GeneratedToken.
    """

    scores: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The head's output for a text: a score for each label, a relevance score, or an embedding."""

    values: list[float]


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """The head's output for each token asked for: [rows, columns] float32.

    One buffer, because thousands of Python floats for a text would be slow to create, pass on and free.
    """

    scores: "memoryview[float]"


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """For each token asked for: (token, probability or logit) of its candidates, likeliest first."""

    candidates: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """How much rows attend to others, [layers, heads, rows, columns] float32; of a rollout or flow one of each."""

    kind: Literal["self", "encoder", "decoder", "cross", "rollout", "flow"]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: "memoryview[float]"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The contribution of each token to a goal's `score`, [T] float32; `baseline` is the score of the baseline input,
    nan where none was computed.
    """

    values: "memoryview[float]"
    score: float
    baseline: float


@dataclass(frozen=True, slots=True)
class ExplanationProgress:
    """The share of an explanation's work that is done, from 0 to 1."""

    share: float


@dataclass(frozen=True, slots=True)
class ExplanationResult:
    """The result of an ExplainTextRequest.  `head_rows` are the rows that the head reads."""

    weights: tuple[AttentionWeights, ...]
    attributions: tuple[Attribution, ...]
    head_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that succeeded; `token` is the stop token that ended it, if one did."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    token: int = -1


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed."""

    error: PolyheadError


Event = (
    GeneratedToken
    | PromptScores
    | HeadOutput
    | TokenOutputs
    | TokenCandidates
    | ExplanationProgress
    | ExplanationResult
    | Done
    | Failed
)
