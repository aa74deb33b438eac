"""What is known of a served model once it is loaded: plain values, and the two things that read and write its text.

Knows no torch, so that whoever speaks HTTP can hold one.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.chat_format import ChatFormat
from polyhead.models.tokenizer import Tokenizer

from .errors import PolyheadError
from .request import BeamSearchOptions, Sampling, Task

TASK_VERBS: Mapping[Task, str] = {
    "generate": "generate text",
    "classify": "classify",
    "rank": "rank",
    "embed": "embed",
    "tag": "label tokens",
    "span": "find answers in texts",
    "fill": "fill in masked tokens",
}


def describe_tasks(tasks: Collection[Task]) -> str:
    return " or ".join(TASK_VERBS[task] for task in sorted(tasks))


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """How a model that reads one sequence and writes another goes about it where nobody asks otherwise.

    `opening` is what stands before an answer; what `sampling` bans never comes, whatever is asked.  Where `beams` are
    one wide nothing is searched for unless it is asked for.
    """

    decoder_prompt: tuple[int, ...]
    max_tokens: int  # tokens of an answer
    sampling: Sampling
    beams: BeamSearchOptions


@dataclass(frozen=True, kw_only=True)
class Model:
    """`max_tokens` counts special tokens; `width` is the length of an embedding; `created` in seconds since 1970.

    `prompts` are what may be put before a text, by name; the one without a name is put before every text.
    `adapter` is its number where it shares the network of another model; 0: it has its own.
    `customs`: of a generator that reads one sequence and writes another.
    `both_orders`: of a classifier that reads pairs, each in both orders, and adds its scores.
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

    @property
    def chat_format(self) -> ChatFormat:
        """What its answers look like in a conversation."""
        return self.chat.format if self.chat else ChatFormat()


@contextmanager
def name_model_in_errors(model: Model) -> Iterator[None]:
    """Errors inside are about `model`."""
    try:
        yield
    except PolyheadError as error:
        error.model, error.task = model.name, model.task
        raise


@dataclass(frozen=True, slots=True)
class ServedName:
    """A served name as an administrator sees it.  `memory` in bytes, as predicted; 0 and no task before it is ready;
    `explaining`: bytes of the network that explains it, 0 while that is not loaded."""

    name: str
    source: str
    state: "LoadState"
    task: Task | None
    memory: int
    aliases: tuple[str, ...]
    explain_memory: int = 0


@dataclass(frozen=True, slots=True)
class LoadState:
    """How far a served name is; `fraction` of its file is read, `why` it is broken is a sentence for people."""

    phase: Literal["waiting", "loading", "ready", "broken"]
    fraction: float = 0.0
    reason: str = ""

    @property
    def is_final(self) -> bool:
        return self.phase in ("ready", "broken")
