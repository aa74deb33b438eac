"""Descriptions of served models: plain values, the tokenizer and the chat template.  Imports no torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import orjson

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.chat_format import ChatFormat
from polyhead.models.chat.pair_prompt import PairPrompt, PairTemplate
from polyhead.models.core.decision_prompt import DecisionPrompt
from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.models.core.late_interaction import LateInteraction
from polyhead.models.tokenizer import Tokenizer

from .calibration import NO_CALIBRATION, Calibration
from .errors import PolyheadError
from .request import BeamSearchOptions, OutputForm, Sampling, Task

TASK_VERBS: Mapping[Task, str] = {
    "generate": "generate text",
    "classify": "classify",
    "rank": "rank",
    "choose": "choose between texts",
    "embed": "embed",
    "tag": "label tokens",
    "span": "find answers in texts",
    "fill": "fill in masked tokens",
    "label_spans": "find spans of given labels",
    "label_texts": "classify by given labels",
    "decide": "answer questions about a text",
}

PLAIN_FORM: frozenset[OutputForm] = frozenset(("",))
TASK_FORMS: Mapping[Task, frozenset[OutputForm]] = {
    "embed": frozenset(("", "tokens")),
    "fill": frozenset(("", "words")),
}  # of other tasks: only the head's own output


def describe_tasks(tasks: Collection[Task]) -> str:
    """The tasks as a phrase for messages."""
    return " or ".join(TASK_VERBS[task] for task in sorted(tasks))


def json_sizes(labels: Iterable[str]) -> tuple[int, ...]:
    """The bytes of each label as JSON, the largest first."""
    return tuple(sorted((len(orjson.dumps(label)) for label in labels), reverse=True))


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The checkpoint's own defaults for a model that reads one sequence and writes another.

    `decoder_prompt` are the tokens before an answer.  Tokens that `sampling` bans are banned in every request.  With
    one beam nothing is searched unless the request asks for it.
    """

    decoder_prompt: tuple[int, ...]
    max_tokens: int  # tokens of an answer
    sampling: Sampling
    beams: BeamSearchOptions


@dataclass(frozen=True, kw_only=True)
class Model:
    """A loaded model.  `max_tokens` counts special tokens; `width` is the length of an embedding; `created` is in
    seconds since 1970.

    `prompts` are texts that may be put before an input, by name; the one with an empty name is put before every input.
    `adapter` is its number where it shares the network of another model; 0: it has its own network.
    `generation_defaults`: of a generator that reads one sequence and writes another.
    `both_orders`: of a classifier that reads a pair in both orders and adds the scores.
    `excludes_prompt`: of an embedder that does not pool the tokens of a prompt. `pair_prompt`: of a reranker that reads
    a pair in a prompt. `late`: of an embedder with a vector for each token. `label_prompt`: of a model that reads
    labels of the request; `decision_prompt`: of one that answers questions about a text. `sampling`: the sampling
    options of requests that do not set them, by the names of core.request.Sampling. `more_forms`: outputs that it has
    beside those of its task. `missing_forms`: by form, what would have to be done for the output. `has_queries`: it
    reads queries in another way than documents. `skipped_tokens` are not pooled. `is_static`: its tokens have vectors
    that do not depend on others. `calibration`: of its decisions.
    """

    name: str
    task: Task
    family: str
    labels: tuple[str, ...]
    max_tokens: int
    vocab_size: int
    width: int
    dtype: str
    executor: str
    source: str
    created: int
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    stop_tokens: frozenset[int]
    prompts: Mapping[str, str] = field(default_factory=dict)
    pooling: str = ""
    adapter: int = 0
    generation_defaults: GenerationDefaults | None = None
    both_orders: bool = False
    excludes_prompt: bool = False
    pair_prompt: PairPrompt | PairTemplate | None = None
    late: LateInteraction | None = None
    label_prompt: LabelPrompt | None = None
    decision_prompt: DecisionPrompt | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    more_forms: tuple[OutputForm, ...] = ()
    missing_forms: Mapping[str, str] = field(default_factory=dict)
    has_queries: bool = False
    query_tokens: int = 0  # the longest query; 0: `max_tokens`
    skipped_tokens: frozenset[int] = frozenset()
    is_static: bool = False
    calibration: Calibration = NO_CALIBRATION

    @cached_property
    def entailment_label(self) -> int | None:
        """The index of a classifier's entailment label; None if it has none. A checkpoint may have very many labels, so
        they are looked at once."""
        return next((index for index, label in enumerate(self.labels) if label.lower().startswith("entail")), None)

    @cached_property
    def label_bytes(self) -> tuple[int, ...]:
        """The bytes of each label as JSON, the largest first."""
        return json_sizes(self.labels)

    @property
    def forms(self) -> frozenset[OutputForm]:
        """The outputs that it has of a text."""
        own: frozenset[OutputForm] = frozenset(("tokens",)) if self.late else TASK_FORMS.get(self.task, PLAIN_FORM)
        return own.union(self.more_forms)

    @property
    def chat_format(self) -> ChatFormat:
        """The format of its answers in a conversation."""
        return self.chat.format if self.chat else ChatFormat()


@contextmanager
def name_model_in_errors(model: Model) -> Iterator[None]:
    """A context in which errors get the name and the task of `model`."""
    try:
        yield
    except PolyheadError as error:
        error.model, error.task = model.name, model.task
        raise


@dataclass(frozen=True, slots=True)
class ServedName:
    """A served name as an administrator sees it.

    `memory` is the predicted size in bytes; it is 0, and the task is None, before the model is ready.  `explain_memory`
    is the size of the network that explains it, 0 while that is not loaded.
    """

    name: str
    source: str
    state: "LoadState"
    task: Task | None
    memory: int
    aliases: tuple[str, ...]
    explain_memory: int = 0


@dataclass(frozen=True, slots=True)
class LoadState:
    """The progress of a load: `fraction` of the file is downloaded or read, `reason` tells users why it failed."""

    phase: Literal["waiting", "downloading", "loading", "ready", "broken"]
    fraction: float = 0.0
    reason: str = ""

    @property
    def progress(self) -> str:
        """What has been done of the load, as the end of a sentence."""
        if self.phase == "waiting":
            return "others are loaded first"
        if self.phase == "loading" and self.fraction >= 1:
            return "it is read and is being tried; this takes some seconds"
        return f"{self.fraction:.0%} is {'downloaded' if self.phase == 'downloading' else 'read'}"

    @property
    def read_fraction(self) -> float:
        return 0.0 if self.phase == "downloading" else self.fraction

    @property
    def is_final(self) -> bool:
        return self.phase in ("ready", "broken")
